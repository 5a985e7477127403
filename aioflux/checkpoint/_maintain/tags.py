"""Operations on tags: list, verify, read and remove."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import gather_bounded
from aioflux.checkpoint._format.commit import COMMIT_KEY, part_key
from aioflux.checkpoint._maintain.verify import plan_pieces, verify
from aioflux.checkpoint._store.commits import MAX_IN_FLIGHT, is_home, read_commit, uri_below
from aioflux.checkpoint._store.mapping import MemoryFile
from aioflux.checkpoint._store.objects import open_checkpoint, read_range
from aioflux.checkpoint._store.tag_names import is_tag, part_name, quote_name, tag_of
from aioflux.errors import CheckpointCorruptError, CheckpointError, NotFoundError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.store import Store

__all__ = [
    "StoredTag",
    "is_valid",
    "keep_newest",
    "list_tags",
    "open_checkpoint",
    "quote_name",
    "read_part",
    "read_tag",
    "remove_tag",
]

_MAX_PIECES = 16
"""Pieces of a part that are read at once."""


@dataclass(frozen=True, slots=True)
class StoredTag:
    """A tag that is committed in a store."""

    tag: str
    """The tag."""
    commit: Commit
    """Its commit."""
    meta: ObjectMeta
    """The commit object."""

    @property
    def prefix(self) -> str:
        """Prefix of its objects."""
        return f"{quote_name(self.tag)}/"

    @property
    def names(self) -> list[str]:
        """Names of its parts."""
        return [part_name(each.key) for each in self.commit.objects]

    def part_uri(self, store: Store, name: str) -> str:
        """Return the uri of a part."""
        return uri_below(store, self.prefix + part_key(self.commit.save_id, quote_name(name)))


async def read_tag(store: Store, tag: str) -> StoredTag | None:
    """Return a committed tag; None if there is none, or another program wrote it."""
    try:
        found = await read_commit(store, f"{quote_name(tag)}/")
    except CheckpointError:
        return None
    if found.commit is None or found.commit.extra.get("tag") != tag:
        return None
    return StoredTag(tag, found.commit, found.meta)


async def list_tags(store: Store) -> list[StoredTag]:
    """Return all committed tags, the newest first: a listing, and a request or two for each."""
    listing = await store.list_all(delimiter="/")

    async def one(prefix: str) -> StoredTag | None:
        return await read_tag(store, tag_of(prefix.removesuffix("/")))

    prefixes = [each for each in listing.prefixes if is_tag(each.removesuffix("/"))]
    results = await gather_bounded(one, prefixes, max_in_flight=MAX_IN_FLIGHT)
    found = [each for each in results if each is not None]
    return sorted(found, key=lambda each: each.commit.save_id, reverse=True)


async def is_valid(store: Store, tag: StoredTag) -> bool:
    """Return whether a tag is complete, by its commit and one listing."""
    return (await verify(store, tag.prefix)).is_valid


async def read_part(store: Store, tag: StoredTag, name: str) -> MemoryFile:
    """Read one part into memory, each block verified, and return it as a file that has a path.

    Raises:
        KeyError: The tag has no such part.
        CheckpointCorruptError: It is gone, or damaged.
    """
    key = part_key(tag.commit.save_id, quote_name(name))
    stored = next((each for each in tag.commit.objects if each.key == key), None)
    if stored is None:
        raise KeyError(name)
    is_pinned = is_home(store, tag.prefix, tag.commit)
    file = MemoryFile(stored.size)
    try:
        with file.mapped() as view:

            async def read(piece: tuple[int, int]) -> None:
                start, end = piece
                await read_range(
                    store,
                    stored,
                    start=start,
                    into=view[start:end],
                    key=tag.prefix + key,
                    is_pinned=is_pinned,
                )

            await gather_bounded(read, plan_pieces(stored), max_in_flight=_MAX_PIECES)
    except NotFoundError as exc:
        file.close()
        raise CheckpointCorruptError(
            f"{uri_below(store, tag.prefix + key)} does not exist any more; load another tag"
        ) from exc
    except BaseException:
        file.close()
        raise
    return file


async def keep_newest(store: Store, keep: int) -> None:
    """Remove all tags except the newest `keep`."""
    for each in (await list_tags(store))[keep:]:
        await _remove(store, each)


async def remove_tag(store: Store, tag: str) -> None:
    """Remove a tag; it is no error if it does not exist."""
    found = await read_tag(store, tag)
    if found is not None:
        await _remove(store, found)


async def _remove(store: Store, tag: StoredTag) -> None:
    """Remove a tag, the commit object first, so that it is never visible in part."""
    with suppress(NotFoundError):  # it was removed meanwhile
        await store.delete(f"{tag.prefix}{COMMIT_KEY}")
    await store.delete_many([tag.prefix + stored.key for stored in tag.commit.objects])

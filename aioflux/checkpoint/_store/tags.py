"""Operations on tags: list, verify, read and remove."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import gather_bounded
from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    is_tag,
    part_key,
    part_name,
    quote_name,
    tag_of,
)
from aioflux.checkpoint._store.objects import MemoryFile, read_range
from aioflux.checkpoint._store.steps import MAX_IN_FLIGHT, is_original, read_commit, uri_below
from aioflux.checkpoint._store.verify import plan_pieces, verify
from aioflux.errors import CheckpointCorruptError, CheckpointError, NotFoundError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.store import Store

_MAX_PIECES = 16
"""Maximum number of ranges of one part that are read at the same time."""


@dataclass(frozen=True, slots=True)
class StoredTag:
    """A tag that is committed in a store."""

    tag: str
    commit: Commit
    meta: ObjectMeta
    """Metadata of the commit object."""

    @property
    def prefix(self) -> str:
        return f"{quote_name(self.tag)}/"

    @property
    def names(self) -> list[str]:
        return [part_name(stored.key) for stored in self.commit.objects]

    def part_uri(self, store: Store, name: str) -> str:
        return uri_below(store, self.prefix + part_key(self.commit.save_id, quote_name(name)))


async def read_tag(store: Store, tag: str) -> StoredTag | None:
    """Return a committed tag; None if it does not exist, or another program wrote it."""
    try:
        existing = await read_commit(store, f"{quote_name(tag)}/")
    except CheckpointError:
        return None
    if existing.commit is None or existing.commit.extra.get("tag") != tag:
        return None
    return StoredTag(tag, existing.commit, existing.meta)


async def list_tags(store: Store) -> list[StoredTag]:
    """Return all committed tags, newest first: a listing, then 1 or 2 requests for each tag."""
    listing = await store.list_all(delimiter="/")

    async def read(prefix: str) -> StoredTag | None:
        return await read_tag(store, tag_of(prefix.removesuffix("/")))

    prefixes = [prefix for prefix in listing.prefixes if is_tag(prefix.removesuffix("/"))]
    results = await gather_bounded(read, prefixes, max_in_flight=MAX_IN_FLIGHT)
    tags = [tag for tag in results if tag is not None]
    return sorted(tags, key=lambda tag: tag.commit.save_id, reverse=True)


async def is_valid(store: Store, tag: StoredTag) -> bool:
    """Return whether the objects of a tag are complete. Costs a listing; reads no parts."""
    return (await verify(store, tag.prefix)).is_valid


async def read_part(store: Store, tag: StoredTag, name: str) -> MemoryFile:
    """Read one part into memory, verify every block, and return it as a file that has a path.

    Raises:
        KeyError: The tag has no such part.
        CheckpointCorruptError: The part is damaged, or was deleted.
    """
    key = part_key(tag.commit.save_id, quote_name(name))
    stored = next((stored for stored in tag.commit.objects if stored.key == key), None)
    if stored is None:
        raise KeyError(name)
    is_pinned = is_original(store, tag.prefix, tag.commit)
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
            f"{uri_below(store, tag.prefix + key)} was deleted; load another tag"
        ) from exc
    except BaseException:
        file.close()
        raise
    return file


async def keep_newest(store: Store, keep: int) -> None:
    """Remove all tags except the newest `keep`."""
    for tag in (await list_tags(store))[keep:]:
        await _remove(store, tag)


async def remove_tag(store: Store, tag: str) -> None:
    """Remove a tag, if it exists."""
    stored = await read_tag(store, tag)
    if stored is not None:
        await _remove(store, stored)


async def _remove(store: Store, tag: StoredTag) -> None:
    """Remove a tag, the commit object first, so that it is never visible in part."""
    with suppress(NotFoundError):  # another process removed it
        await store.delete(f"{tag.prefix}{COMMIT_KEY}")
    await store.delete_many([tag.prefix + stored.key for stored in tag.commit.objects])

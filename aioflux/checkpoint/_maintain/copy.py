"""Copies of checkpoints, within a store and from one to another: objects first, the commit last.

    source: commit, one listing -> verified -> each object: exists already | copied by the service |
    copied through here, every block verified -> commit with the new generations -> copy verified

Objects are created and never replaced: two processes that copy a checkpoint to one place at the
same time use each other's objects, and a copy that was interrupted continues where it ended.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from aioflux._concurrency.async_iteration import nested
from aioflux._concurrency.fan_out import bounded_map, gather_bounded
from aioflux.checkpoint._format.commit import (
    INDEX_KEY,
    decode_commit,
    decode_index,
    encode_commit,
    encode_index,
    parse_step,
    step_prefix,
)
from aioflux.checkpoint._maintain.verify import check_listed, plan_pieces, verify
from aioflux.checkpoint._store.commit import commit as commit_object
from aioflux.checkpoint._store.commit import delete_logged
from aioflux.checkpoint._store.commits import (
    as_prefix,
    is_home,
    list_prefixes,
    read_commits,
    uri_below,
)
from aioflux.checkpoint._store.objects import read_range
from aioflux.errors import (
    AlreadyExistsError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit, StoredObject
    from aioflux.checkpoint._maintain.verify import Verification
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.errors import AiofluxError
    from aioflux.store import Store

__all__ = ["CheckpointLocation", "Copied", "copy_checkpoint", "copy_root"]

_MAX_OBJECTS = 4
"""Objects that are copied at once through here; each holds prefetched pieces."""
_MAX_READS = 3
"""Pieces of 8 MiB of one object that are read at once; as many may wait to be written."""
_MAX_ON_SERVICE = 32
"""Objects that the service copies at once."""


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The location of a checkpoint: a store and a prefix."""

    store: Store
    """A store that holds it."""
    prefix: str = ""
    """Its prefix there; empty for the store's own."""

    @property
    def uri(self) -> str:
        """Uri of the checkpoint."""
        return uri_below(self.store, as_prefix(self.prefix))


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """The result of a copy."""

    uri: str
    """Uri of the copy."""
    step: int | None
    """Its training step."""
    num_objects: int
    """Data objects of the checkpoint."""
    num_bytes: int
    """Bytes of all data objects, without the commit object."""
    is_new: bool
    """False if the same checkpoint was there already."""


async def copy_checkpoint(
    source: CheckpointLocation,
    target: CheckpointLocation,
    *,
    overwrite: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> Copied:
    """Copy a checkpoint; it appears whole or not at all.

    If both are in one store that lists checksums, the service copies. Otherwise all bytes come
    through here, a bounded part at a time; what is read is compared with the blocks of the commit,
    and what was written with its checksums. Objects that were restored with the same bytes, such as
    from a backup, are repaired by a copy: its commit has their new generations.

    Args:
        source: The checkpoint.
        target: The location of the copy.
        overwrite: Replace another checkpoint that is there, when the copy is whole.
        progress: Called with the number of bytes of each piece that was copied, or was there.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CheckpointCorruptError: It does not verify; nothing becomes visible.
        CheckpointError: Another checkpoint is there, or was committed meanwhile.
        ValueError: Source and target are the same, or two different steps.
    """
    if source.uri == target.uri:
        raise ValueError(f"cannot copy {source.uri} to itself")
    step = parse_step(target.uri.rstrip("/").rpartition("/")[2])
    verification, found, commit = await _verify_source(source)
    if None not in {step, commit.step} and step != commit.step:
        raise ValueError(f"{source.uri} is step {commit.step}: {target.uri} would be another")
    result = Copied(
        uri=target.uri,
        step=verification.step,
        num_objects=verification.num_objects,
        num_bytes=verification.num_bytes,
        is_new=True,
    )
    old = await _read_existing(target, commit, overwrite=overwrite)
    if old is None:
        progress(result.num_bytes)
        return replace(result, is_new=False)
    is_pinned = verification.is_valid and is_home(source.store, as_prefix(source.prefix), commit)
    stored = await _copy_objects(source, target, commit, progress, is_pinned=is_pinned)
    changed = msgspec.structs.replace(commit, uri=target.uri.rstrip("/"), objects=tuple(stored))
    is_new = await _commit(target, found, changed, old)
    (await verify(target.store, target.prefix)).check()
    return replace(result, is_new=is_new)


async def _commit(
    target: CheckpointLocation, found: CommitObject, commit: Commit, old: list[CommitObject]
) -> bool:
    """Commit a copy in place of older commit objects; False if another process did it meanwhile.

    Raises:
        CheckpointError: Another checkpoint was committed meanwhile, or a commit object stayed.
    """
    key = as_prefix(target.prefix) + found.meta.key.rpartition("/")[2]
    try:
        is_alone = await commit_object(
            target.store, key, _encode(found, commit), commit, replaces=old
        )
    except CheckpointError:
        # Another copy of the same at the same time?
        if await _read_existing(target, commit, overwrite=False) is not None:
            raise
        return False
    unreadable = [each.meta for each in old if each.commit is None and each.meta.key != key]
    if not (await delete_logged(target.store, unreadable, "another layout") and is_alone):
        raise CheckpointError(
            f"{target.uri} was copied, and the commit object of another layout could not be "
            "deleted there; delete it, and copy again"
        )
    return True


async def _verify_source(
    source: CheckpointLocation,
) -> tuple[Verification, CommitObject, Commit]:
    """Verify the source, without generations: bytes are verified when they are copied."""
    verification = await verify(source.store, source.prefix)
    damage = tuple(problem for problem in verification.problems if problem.kind != "generation")
    replace(verification, problems=damage).check()
    found = verification.found
    assert found is not None
    assert found.commit is not None
    return verification, found, found.commit


async def _read_existing(
    target: CheckpointLocation, commit: Commit, *, overwrite: bool
) -> list[CommitObject] | None:
    """Return the commit objects at the target; None if the same checkpoint is there.

    Raises:
        CheckpointError: Another one is there, and must not be replaced.
    """
    old = await read_commits(target.store, target.prefix)
    is_same = {each.commit.save_id if each.commit else "" for each in old} == {commit.save_id}
    if is_same and (await verify(target.store, target.prefix)).is_valid:
        return None
    if old and not is_same and not overwrite:
        raise CheckpointError(
            f"another checkpoint is at {target.uri}, and stays; choose another location, or ask "
            "for it to be replaced"
        )
    return old


async def _copy_objects(
    source: CheckpointLocation,
    target: CheckpointLocation,
    commit: Commit,
    progress: Callable[[int], object],
    *,
    is_pinned: bool,
) -> list[StoredObject]:
    """Copy what a commit names, and return it as the target's service confirmed it."""
    within, into = as_prefix(source.prefix), as_prefix(target.prefix)
    listed = {meta.key: meta for meta in await source.store.list_all(within)}
    existing = {meta.key: meta for meta in await target.store.list_all(into)}
    # If the service lists no checksums, the bytes have to come through here to be verified.
    on_service = source.store is target.store and all(
        listed[within + stored.key].crc32c is not None for stored in commit.objects
    )

    async def one(stored: StoredObject) -> StoredObject:
        key = into + stored.key
        meta = await _find_reusable(target.store, stored, existing.get(key))
        if meta is None:
            try:
                if on_service:
                    meta = await target.store.copy(listed[within + stored.key], key, mode="create")
                    progress(stored.size)
                else:
                    pieces = _pieces(source.store, stored, within, progress, is_pinned=is_pinned)
                    meta = await _write(target.store, key, pieces)
            except AlreadyExistsError:
                meta = await target.store.head(key)  # of another copy at the same time
        else:
            progress(stored.size)
        wrong = check_listed(stored, meta, meta.uri, is_pinned=False)
        if wrong:
            raise CheckpointError(f"could not copy to {target.uri}: {wrong[0].message}; try again")
        return msgspec.structs.replace(stored, generation=meta.generation)

    most = _MAX_ON_SERVICE if on_service else _MAX_OBJECTS
    return await gather_bounded(one, commit.objects, max_in_flight=most)


async def _find_reusable(
    store: Store, stored: StoredObject, meta: ObjectMeta | None
) -> ObjectMeta | None:
    """Return an object at the target if it is the same, by checksum or bytes; or delete it."""
    if meta is None:
        return None
    if not check_listed(stored, meta, meta.uri, is_pinned=False) and (
        meta.crc32c is not None or await _has_bytes(store, stored, meta)
    ):
        return meta
    # Another copy at the same time may have been quicker.
    with suppress(NotFoundError, PreconditionFailedError):
        await store.delete(meta)
    return None


async def _has_bytes(store: Store, stored: StoredObject, meta: ObjectMeta) -> bool:
    """Return whether an object has the bytes of another; for listings without checksums."""
    pinned = msgspec.structs.replace(stored, generation=meta.generation)
    try:
        for start, end in plan_pieces(stored):
            view = memoryview(bytearray(end - start))
            await read_range(store, pinned, start=start, into=view, key=meta.key)
    except CheckpointCorruptError:
        return False
    return True


async def _write(store: Store, key: str, pieces: AsyncGenerator[memoryview, None]) -> ObjectMeta:
    async with aclosing(pieces), store.open_writer(key, mode="create") as writer:
        async for piece in pieces:
            await writer.write(piece)
    return writer.meta


async def _pieces(
    store: Store,
    stored: StoredObject,
    within: str,
    progress: Callable[[int], object],
    *,
    is_pinned: bool,
) -> AsyncGenerator[memoryview, None]:
    """Yield the bytes of an object, every block verified, with some pieces prefetched."""

    async def read(piece: tuple[int, int]) -> memoryview:
        start, end = piece
        view = memoryview(bytearray(end - start))
        await read_range(
            store, stored, start=start, into=view, key=within + stored.key, is_pinned=is_pinned
        )
        return view

    async with nested(bounded_map(read, plan_pieces(stored), max_in_flight=_MAX_READS)) as views:
        async for view in views:
            yield view
            progress(view.nbytes)


def _encode(found: CommitObject, commit: Commit) -> bytes:
    """Return the bytes of a commit object with another commit in it."""
    if found.meta.key.endswith(INDEX_KEY):
        return encode_index(decode_index(found.data, uri=found.meta.uri)[0], commit)
    return encode_commit(decode_commit(found.data, uri=found.meta.uri)[0], commit)


async def copy_root(
    source: CheckpointLocation,
    target: CheckpointLocation,
    *,
    steps: Sequence[int] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> tuple[list[Copied], dict[str, AiofluxError]]:
    """Copy the steps below a root, oldest first, one after the other.

    Args:
        source: The root.
        target: The root of the copies.
        steps: Only these; all by default.
        overwrite: As `copy_checkpoint`.
        progress: As `copy_checkpoint`.

    Returns:
        The copies, and the errors of steps that could not be copied, by uri; a failure of one step
        does not stop the others.
    """
    copied: list[Copied] = []
    errors: dict[str, AiofluxError] = {}
    asked = steps if steps is not None else await list_prefixes(source.store, source.prefix)
    for step in sorted(set(asked)):
        each, goal = (
            CheckpointLocation(location.store, as_prefix(location.prefix) + step_prefix(step))
            for location in (source, target)
        )
        try:
            copied.append(await copy_checkpoint(each, goal, overwrite=overwrite, progress=progress))
        except CheckpointNotFoundError as exc:
            if steps is not None:
                errors[each.uri] = exc  # not one that is under way: it was asked for
        except (CheckpointError, StorageError) as exc:
            errors[each.uri] = exc
    return copied, errors

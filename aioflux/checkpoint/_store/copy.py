"""Copies of checkpoints, within a store or between stores: data objects first, the commit last.

    verify the source -> each object: exists already | copied by the service | read and written by
    this process, every block verified -> commit with the new generations -> verify the copy

Data objects are created and never overwritten; an existing object with wrong content is deleted
first. So two processes that copy the same checkpoint to the same uri use each other's objects, and
a repeated copy continues where an interrupted one stopped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from aioflux._concurrency.async_iteration import aclosing_inner
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
from aioflux.checkpoint._store.objects import read_range
from aioflux.checkpoint._store.steps import (
    as_prefix,
    delete_logged,
    is_original,
    list_prefixes,
    read_commits,
    uri_below,
    write_commit,
)
from aioflux.checkpoint._store.verify import check_listed, plan_pieces, verify
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
    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._format.commit import Commit, StoredObject
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.checkpoint._store.verify import Verification
    from aioflux.errors import AiofluxError
    from aioflux.store import Store

_MAX_OBJECTS = 4
"""Maximum number of objects that this process copies at the same time, if the service cannot."""
_MAX_READS = 3
"""Maximum number of pieces, of about 8 MiB, that are read from one object at the same time."""
_MAX_ON_SERVICE = 32
"""Maximum number of objects that the service copies at the same time."""


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The location of a checkpoint: a store and a prefix."""

    store: Store
    prefix: str = ""
    """Prefix of the checkpoint in the store; empty if the store's own prefix is the checkpoint."""

    @property
    def uri(self) -> str:
        return uri_below(self.store, as_prefix(self.prefix))


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """The result of a copy."""

    uri: str
    step: int | None
    """Training step; None if the checkpoint has none."""
    num_objects: int
    num_bytes: int
    """Bytes of all data objects, without the commit object."""
    is_new: bool
    """False if the target already had the same checkpoint, or if another process committed the same
    copy at the same time."""


async def copy_checkpoint(
    source: CheckpointLocation,
    target: CheckpointLocation,
    *,
    overwrite: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> Copied:
    """Copy a checkpoint. The copy becomes visible whole, or not at all.

    If source and target are in one store and its listings have checksums, the service copies the
    objects. Otherwise this process reads and writes all bytes, with a bounded part in memory,
    and compares the bytes read with the block checksums of the commit. In both cases it compares
    the new objects with the checksums of the commit. A copy also repairs a checkpoint whose objects
    were replaced by the same bytes, such as from a backup: the copy's commit has the new
    generations.

    Args:
        source: The checkpoint to copy.
        target: The location of the copy.
        overwrite: Replace another checkpoint at the target, once the copy is complete.
        progress: Called with a number of bytes after each piece that was copied or already existed.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the source.
        CheckpointCorruptError: The source failed verification, and nothing becomes visible; or the
            copy failed verification after its commit.
        CheckpointError: The target has another checkpoint and `overwrite` is False, another process
            committed one during the copy, or an object could not be copied or deleted.
        ValueError: Source and target are the same, or different steps.
    """
    if source.uri == target.uri:
        raise ValueError(f"cannot copy {source.uri} to itself")
    step = parse_step(target.uri.rstrip("/").rpartition("/")[2])
    verification, original, commit = await _verify_source(source)
    if None not in {step, commit.step} and step != commit.step:
        raise ValueError(f"{source.uri} is step {commit.step}, and {target.uri} names another step")
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
    is_pinned = verification.is_valid and is_original(
        source.store, as_prefix(source.prefix), commit
    )
    stored = await _copy_objects(source, target, commit, progress, is_pinned=is_pinned)
    changed = msgspec.structs.replace(commit, uri=target.uri.rstrip("/"), objects=tuple(stored))
    is_new = await _commit(target, original, changed, old)
    (await verify(target.store, target.prefix)).check()
    return replace(result, is_new=is_new)


async def _commit(
    target: CheckpointLocation, original: CommitObject, commit: Commit, old: list[CommitObject]
) -> bool:
    """Commit a copy in place of older commit objects.

    Returns:
        False if another process committed the same copy at the same time.

    Raises:
        CheckpointError: Another checkpoint was committed at the same time, or an older commit
            object could not be deleted.
    """
    key = as_prefix(target.prefix) + original.meta.key.rpartition("/")[2]
    try:
        is_alone = await write_commit(
            target.store, key, _encode(original, commit), commit, replaces=old
        )
    except CheckpointError:
        # Another process may have committed the same copy.
        if await _read_existing(target, commit, overwrite=False) is not None:
            raise
        return False
    unreadable = [other.meta for other in old if other.commit is None and other.meta.key != key]
    if not (await delete_logged(target.store, unreadable, "another layout") and is_alone):
        raise CheckpointError(
            f"{target.uri} was copied, but the commit object of another layout could not be "
            "deleted; delete it, and copy again"
        )
    return True


async def _verify_source(
    source: CheckpointLocation,
) -> tuple[Verification, CommitObject, Commit]:
    """Verify the source, except for generations, since the copy verifies the bytes."""
    verification = await verify(source.store, source.prefix)
    problems = tuple(problem for problem in verification.problems if problem.kind != "generation")
    replace(verification, problems=problems).check()
    original = verification.found
    assert original is not None
    assert original.commit is not None
    return verification, original, original.commit


async def _read_existing(
    target: CheckpointLocation, commit: Commit, *, overwrite: bool
) -> list[CommitObject] | None:
    """Return the commit objects at the target; None if they are those of a valid copy.

    Raises:
        CheckpointError: The target has another checkpoint, and `overwrite` is False.
    """
    old = await read_commits(target.store, target.prefix)
    is_same = {other.commit.save_id if other.commit else "" for other in old} == {commit.save_id}
    if is_same and (await verify(target.store, target.prefix)).is_valid:
        return None
    if old and not is_same and not overwrite:
        raise CheckpointError(
            f"another checkpoint is at {target.uri}, and is not replaced; choose another location, "
            "or set overwrite to replace it"
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
    """Copy the objects that a commit lists, and return them with their new generations."""
    within, into = as_prefix(source.prefix), as_prefix(target.prefix)
    listed = {meta.key: meta for meta in await source.store.list_all(within)}
    existing = {meta.key: meta for meta in await target.store.list_all(into)}
    # The checksums of listings verify a copy by the service. Without them, copy the bytes here.
    on_service = source.store is target.store and all(
        listed[within + stored.key].crc32c is not None for stored in commit.objects
    )

    async def copy_one(stored: StoredObject) -> StoredObject:
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
                meta = await target.store.head(key)  # another process copied it just now
        else:
            progress(stored.size)
        problems = check_listed(stored, meta, meta.uri, is_pinned=False)
        if problems:
            reason = problems[0].message
            raise CheckpointError(f"could not copy to {target.uri}: {reason}; try again")
        return msgspec.structs.replace(stored, generation=meta.generation)

    max_in_flight = _MAX_ON_SERVICE if on_service else _MAX_OBJECTS
    return await gather_bounded(copy_one, commit.objects, max_in_flight=max_in_flight)


async def _find_reusable(
    store: Store, stored: StoredObject, meta: ObjectMeta | None
) -> ObjectMeta | None:
    """Return an object at the target if its content is right; otherwise delete it, return None."""
    if meta is None:
        return None
    if not check_listed(stored, meta, meta.uri, is_pinned=False) and (
        meta.crc32c is not None or await _has_bytes(store, stored, meta)
    ):
        return meta
    # Another process that copies may delete or replace it first.
    with suppress(NotFoundError, PreconditionFailedError):
        await store.delete(meta)
    return None


async def _has_bytes(store: Store, stored: StoredObject, meta: ObjectMeta) -> bool:
    """Read an object that was listed without checksum; return whether it has the saved bytes."""
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
    """Yield the bytes of an object in verified pieces, and prefetch the next pieces."""

    async def read(piece: tuple[int, int]) -> memoryview:
        start, end = piece
        view = memoryview(bytearray(end - start))
        await read_range(
            store, stored, start=start, into=view, key=within + stored.key, is_pinned=is_pinned
        )
        return view

    async with aclosing_inner(
        bounded_map(read, plan_pieces(stored), max_in_flight=_MAX_READS)
    ) as views:
        async for view in views:
            yield view
            progress(view.nbytes)


def _encode(original: CommitObject, commit: Commit) -> bytes:
    """Return the bytes of the commit object with its commit replaced."""
    if original.meta.key.endswith(INDEX_KEY):
        return encode_index(decode_index(original.data, uri=original.meta.uri)[0], commit)
    return encode_commit(decode_commit(original.data, uri=original.meta.uri)[0], commit)


async def copy_root(
    source: CheckpointLocation,
    target: CheckpointLocation,
    *,
    steps: Sequence[int] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> tuple[list[Copied], dict[str, AiofluxError]]:
    """Copy the steps below a root, lowest first, one after another.

    `source` and `target` are roots of steps; all steps are copied by default. For the other
    arguments see `copy_checkpoint`.

    Returns:
        The copies, and the errors of the steps that could not be copied, by uri. After an error,
        the remaining steps are copied. Without `steps`, a step without a commit is left out.
    """
    copied: list[Copied] = []
    errors: dict[str, AiofluxError] = {}
    chosen = steps if steps is not None else await list_prefixes(source.store, source.prefix)
    for step in sorted(set(chosen)):
        original, copy = (
            CheckpointLocation(location.store, as_prefix(location.prefix) + step_prefix(step))
            for location in (source, target)
        )
        try:
            result = await copy_checkpoint(original, copy, overwrite=overwrite, progress=progress)
            copied.append(result)
        except CheckpointNotFoundError as exc:
            if steps is not None:  # otherwise a save of the listed step is in progress
                errors[original.uri] = exc
        except (CheckpointError, StorageError) as exc:
            errors[original.uri] = exc
    return copied, errors

"""Save: one save of one rank, from the staged state to a committed step.

    other ranks:  write data object -> write manifest -> wait for the outcome
    coordinator:  write data object -> wait for all manifests -> write commit object
                  -> delete the manifests and the steps beyond retention

A single rank writes no manifest. Several ranks communicate by manifests in the bucket (`manifests`)
and not by collectives, because the upload runs during training, and possibly in the uploader
process. If the heartbeats of a rank stop, or if its manifest is missing after `commit_seconds`, the
save fails on all ranks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from aioflux._concurrency.run_to_completion import wait_until_done
from aioflux.checkpoint._format.codec import Codec, EncodedItem, Packer
from aioflux.checkpoint._format.commit import COMMIT_KEY, Commit, data_key, encode_commit
from aioflux.checkpoint._format.dcp_metadata import ItemLocation, add_storage_data
from aioflux.checkpoint._save.job import (
    Manifest,
    SaveResult,
    plan_blocks_for,
    start_delay,
)
from aioflux.checkpoint._save.manifests import FailedElsewhereError, Manifests, failure_of
from aioflux.checkpoint._store.history import SaveRecord
from aioflux.checkpoint._store.objects import write_object
from aioflux.checkpoint._store.retention import prune
from aioflux.checkpoint._store.steps import (
    UnknownOutcomeError,
    as_public,
    begin_save,
    commit_of,
    commit_save,
    read_commit,
    uri_below,
)
from aioflux.errors import (
    AiofluxError,
    CheckpointError,
    NotFoundError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import StoredItem, StoredObject
    from aioflux.checkpoint._save.job import Compression, GlobalSavePlan, Job, UploadSettings
    from aioflux.checkpoint._store.history import Outcome
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.store import Store

T = TypeVar("T")

_log = logging.getLogger("aioflux")


class Save:
    """One save of one rank; rank 0 is the coordinator."""

    def __init__(
        self,
        store: Store,
        settings: UploadSettings,
        job: Job,
        memory: memoryview,
        progress: Callable[[int], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._job = job
        self._memory = memory
        self._progress = progress
        self._manifests = Manifests(store, settings, job) if job.world_size > 1 else None
        self._prefix = job.checkpoint_prefix
        self._uri = uri_below(store, self._prefix)
        self._num_earlier_retries = store.stats.num_retries
        self.record: SaveRecord | None = None
        """Record for the history, when the save of the coordinator has ended."""
        self._upload_seconds = 0.0
        self._num_bytes = 0
        self._is_reported = False
        """Whether the coordinator may have read the manifest of this rank."""
        self._may_be_committed = job.attempt > 0
        """Whether a commit may list the objects of this rank, such as the commit of an earlier
        attempt whose process died."""

    async def run(self) -> SaveResult:
        """Upload and commit.

        Raises:
            AiofluxError: The save is not committed on any rank, or its outcome is unknown.
        """
        job = self._job
        try:
            if job.attempt and (commit := await self._earlier_commit()) is not None:
                if job.rank == 0:
                    await self._record("committed", num_bytes=commit.num_bytes)
                return self._result()
            manifests = self._manifests
            reported = None
            if job.attempt and manifests is not None:
                reported = await self._read_own_manifest(manifests)
            if job.failure:
                raise _StagingError(job.failure)  # noqa: TRY301  `undo` handles all failures
            if job.rank == 0:
                await self._coordinate()
            elif manifests is not None:
                await self._participate(manifests, reported)
            await run_to_end(self.delete_earlier_attempts())
        except BaseException as exc:
            await self.undo(exc)
            if isinstance(exc, FailedElsewhereError) and _is_cancel_requested():
                raise asyncio.CancelledError from exc
            if isinstance(exc, FailedElsewhereError | UnknownOutcomeError):
                raise as_public(exc) from exc.__cause__
            raise
        return self._result()

    async def _coordinate(self) -> None:
        # Before the upload: this raises if the server ignores preconditions.
        replaces = await begin_save(self._store, self._prefix)
        if (manifests := self._manifests) is None:
            uploaded = [await self._upload()]
        else:
            # The coordinator polls twice per heartbeat, so that it notices a silent rank within
            # three heartbeats.
            own_objects = await self._upload_and_poll(
                manifests.poll_ranks, self._settings.heartbeat_seconds / 2, TransientError
            )
            uploaded = [own_objects, *await manifests.collect()]
        await run_to_end(self._commit(uploaded, replaces))

    async def _commit(
        self, uploaded: Sequence[tuple[StoredObject, ...]], replaces: Sequence[CommitObject]
    ) -> None:
        """Commit the objects of all ranks, and delete what is not needed any more."""
        job = self._job
        assert job.global_plan is not None
        facts = {**msgspec.structs.asdict(job.facts), "uri": self._uri, "created": time.time()}
        objects = tuple(stored for rank_objects in uploaded for stored in rank_objects)
        commit = Commit(**facts, objects=objects, extra=dict(job.global_plan.extra))
        data = encode_commit(self._encode_metadata(uploaded), commit)
        key, is_urgent = self._prefix + COMMIT_KEY, job.is_urgent
        self._may_be_committed = True  # from now on its objects stay, whatever fails
        try:
            await commit_save(
                self._store, key, data, commit, replaces=replaces, is_urgent=is_urgent
            )
        except UnknownOutcomeError:
            raise
        except (AiofluxError, OSError):
            self._may_be_committed = False
            raise
        await self._after_commit()
        await self._record("committed", num_bytes=commit.num_bytes)

    async def _after_commit(self) -> None:
        """Delete manifests and old steps; only log errors, because the step is committed."""
        job = self._job
        try:
            if (manifests := self._manifests) is not None:
                await manifests.delete([manifests.key(rank) for rank in range(1, job.world_size)])
            if self._settings.retention.has_rules:
                protected = {*job.protected, job.step}
                pruned = await prune(
                    self._store, self._settings.retention, now=time.time(), protected=protected
                )
                for uri, error in pruned.errors.items():
                    _log.warning("%s could not be removed: %s", uri, error)
        except (AiofluxError, OSError, ValueError) as exc:
            _log.warning(
                "%s is saved, but its manifests or older steps could not be deleted: %s",
                self._uri,
                exc,
            )

    async def _record(self, outcome: Outcome, *, num_bytes: int = 0, error: str = "") -> None:
        """Set the record of the save, on the coordinator; Nebula overrides this."""
        job = self._job
        self.record = SaveRecord(
            record_id=job.save_id,
            time=datetime.now(UTC),
            step=job.step,
            outcome=outcome,
            num_bytes=num_bytes,
            staged_seconds=job.staged_seconds,
            upload_seconds=max(0.0, time.time() - job.started - job.staged_seconds),
            num_retries=self._store.stats.num_retries - self._num_earlier_retries,
            world_size=job.world_size,
            error=error,
        )

    async def _participate(
        self, manifests: Manifests, reported: tuple[StoredObject, ...] | None
    ) -> None:
        """Upload, unless an earlier attempt has reported its objects, and wait for the commit."""
        if reported is None:
            poll_seconds = self._settings.heartbeat_seconds
            reported = await self._upload_and_poll(
                manifests.poll_coordinator_alive, poll_seconds, AiofluxError
            )
        # From now on the coordinator may commit the objects of this rank: do not delete them.
        self._is_reported = True
        is_written = await run_to_end(self._report(manifests, reported))
        await run_to_end(manifests.await_outcome(is_written=is_written))

    async def undo(self, error: BaseException) -> None:
        """Report a failure to the other ranks, and delete the objects of this rank.

        If the clean-up itself fails, the error receives a note.
        """
        error.add_note(f"while saving {self._uri} on rank {self._job.rank}")
        seconds = self._settings.cleanup_seconds
        try:
            await run_to_end(asyncio.wait_for(self._roll_back(error), seconds))
        except (AiofluxError, OSError) as exc:  # a TimeoutError is an OSError
            problem = f" within {seconds:g} s" if isinstance(exc, TimeoutError) else f" ({exc})"
            error.add_note(
                f"objects of the save could not be deleted{problem}; `aioflux clean` deletes them"
            )

    def _result(self) -> SaveResult:
        job = self._job
        return SaveResult(
            step=job.step,
            uri=self._uri,
            save_id=job.save_id,
            num_bytes=self._num_bytes,
            staged_seconds=job.staged_seconds,
            upload_seconds=self._upload_seconds,
            seconds=time.time() - job.started,
        )

    async def _earlier_commit(self) -> Commit | None:
        """Return the commit of an earlier attempt, whose process died, or None.

        Raises:
            UnknownOutcomeError: The commit object could not be read.
        """
        try:
            commit = await commit_of(self._store, self._prefix, self._job.save_id)
        except AiofluxError as exc:
            raise UnknownOutcomeError(
                f"{self._uri}: the uploader process died, and it is unknown whether it had "
                f"committed the step ({exc}); load the latest step to see"
            ) from exc
        self._may_be_committed = commit is not None
        return commit

    async def _read_own_manifest(self, manifests: Manifests) -> tuple[StoredObject, ...] | None:
        """Return the objects that an earlier attempt reported, or None if it reported nothing.

        The coordinator may commit reported objects, so they are not uploaded again.

        Raises:
            CheckpointError: The earlier attempt reported a failure.
        """
        self._is_reported = True  # so that a failed read does not delete reported objects
        try:
            manifest = await manifests.read(self._job.rank)
        except NotFoundError:
            self._is_reported = False
            return None
        if manifest.error:
            raise failure_of(manifest)
        return manifest.objects

    async def _upload_and_poll(
        self,
        poll: Callable[[], Awaitable[None]],
        poll_seconds: float,
        ignored: type[AiofluxError],
    ) -> tuple[StoredObject, ...]:
        """Upload, and poll at the same time whether the save has failed on another rank.

        Args:
            poll: Polls once; raises CheckpointError if the save failed on another rank.
            poll_seconds: Time between two polls.
            ignored: Errors of a poll that are only logged, because the next poll may succeed.
        """
        if math.isinf(poll_seconds):
            return await self._upload()
        uploading = asyncio.ensure_future(self._upload())
        try:
            while not (await asyncio.wait((uploading,), timeout=poll_seconds))[0]:
                try:
                    await poll()
                except CheckpointError:
                    raise
                except ignored as exc:
                    _log.warning("%s: the other ranks could not be polled: %s", self._uri, exc)
            return await uploading
        finally:
            uploading.cancel()
            await wait_until_done(uploading)  # it reads the arena, which the next save overwrites
            if not uploading.cancelled():
                uploading.exception()  # marks the error as retrieved

    async def _upload(self) -> tuple[StoredObject, ...]:
        job = self._job
        if not job.items:
            return ()
        if not job.is_urgent:
            is_multipart = job.num_bytes > self._store.transfer.part_size_bytes
            await asyncio.sleep(start_delay(job.rank, job.world_size, is_multipart=is_multipart))
        started = time.monotonic()
        key = data_key(job.save_id, job.rank, job.attempt)
        items = list(job.items)
        if (compression := self._settings.compression) is None:
            stored = await self._write(key, _staged_pieces(job, self._memory))
        else:
            items.clear()
            packing = _compressed_pieces(job, self._memory, compression, items)
            async with aclosing(packing) as pieces:
                stored = await self._write(key, pieces)
        self._num_bytes = stored.size
        self._upload_seconds = time.monotonic() - started
        return (replace(stored, key=key, items=tuple(items)),)

    async def _write(self, key: str, pieces: Any) -> StoredObject:
        return await write_object(
            self._store,
            self._prefix + key,
            pieces,
            rank=self._job.rank,
            size_hint=plan_blocks_for(self._job.num_bytes, self._job.world_size),
            progress=self._progress,
        )

    async def delete_earlier_attempts(self) -> None:
        """Delete the objects of killed attempts after the commit.

        Objects that the commit lists stay: it may list objects of an earlier attempt.
        """
        if not self._job.attempt:
            return
        with suppress(AiofluxError):  # `aioflux clean` deletes them, too
            current = await read_commit(self._store, self._prefix)
            if current.commit is not None and current.commit.save_id == self._job.save_id:
                listed = {self._prefix + stored.key for stored in current.commit.objects}
                await self._store.delete_many([k for k in self._own_keys() if k not in listed])

    def _own_keys(self) -> list[str]:
        """Return the keys that this rank may have written, in the order of attempts."""
        job = self._job
        return [
            self._prefix + data_key(job.save_id, job.rank, number)
            for number in range(job.attempt + 1)
        ]

    def _encode_metadata(self, uploaded: Sequence[tuple[StoredObject, ...]]) -> bytes:
        assert self._job.global_plan is not None
        return _encode_metadata(self._job.global_plan, uploaded, self._settings.compression)

    async def _report(self, manifests: Manifests, objects: tuple[StoredObject, ...]) -> bool:
        """Write the manifest of this rank; return False if the response was lost."""
        try:
            await manifests.write(Manifest(rank=self._job.rank, objects=objects))
        except StorageError as exc:
            if not (isinstance(exc, TransientError) or exc.maybe_done):
                self._is_reported = False
                raise
            _log.warning("%s: it is unknown whether the manifest was written: %s", self._uri, exc)
            return False
        return True

    async def _roll_back(self, error: BaseException) -> None:
        """Report a failure to the other ranks and the history, and delete this rank's objects."""
        job, manifests = self._job, self._manifests
        is_unknown = isinstance(error, UnknownOutcomeError) or self._may_be_committed
        is_cancel = isinstance(error, asyncio.CancelledError)
        text = "the save was cancelled" if is_cancel else str(error) or repr(error)
        if job.rank == 0:
            if manifests is not None:
                if not isinstance(error, CheckpointError):
                    text = f"{self._uri} was not saved: rank 0: {text}"
                await manifests.write(Manifest(rank=0, error=text, is_unknown=is_unknown))
            await self._record("cancelled" if is_cancel else "failed", error=text)
        if is_unknown:
            return  # a commit may list the objects of this rank
        if manifests is not None and job.rank != 0:
            if self._is_reported and not isinstance(error, FailedElsewhereError):
                return  # the coordinator may commit the objects of this rank
            await manifests.write(Manifest(rank=job.rank, error=text))
        errors = (await self._store.delete_many(self._own_keys())).errors
        if manifests is not None:
            await manifests.delete_after_failure()
        for problem in errors.values():
            raise problem


def _staged_pieces(job: Job, memory: memoryview) -> list[bytes | memoryview]:
    """Return the bytes of the data object without compression; `memory` is the arena."""
    return [memory[: job.arena_bytes], *job.tail]


async def _compressed_pieces(
    job: Job, memory: memoryview, compression: Compression, stored: list[StoredItem]
) -> AsyncGenerator[bytes | memoryview]:
    """Yield the bytes of the data object with its large tensors compressed.

    At the end of the iteration the location of each item is appended to `stored`.
    """
    # Tied tensors share one item, which is written once, for the first of them.
    firsts = {item.offset: number for number, item in reversed([*enumerate(job.items)])}
    with Codec(
        level=compression.level, threads=compression.threads, byte_planes=compression.byte_planes
    ) as codec:
        packer = Packer(codec)
        async with aclosing(packer.pack([*_staged_items(job, memory, firsts)])) as pieces:
            async for piece in pieces:
                yield piece
    written = dict(zip(sorted(firsts.values()), packer.stored, strict=True))
    stored += [written[firsts[item.offset]] for item in job.items]


def _staged_items(job: Job, memory: memoryview, firsts: dict[int, int]) -> Iterator[EncodedItem]:
    """Yield the items of a job; tied tensors yield one item."""
    tail = iter(job.tail)
    sizes = job.element_sizes
    for number, (item, element_size) in enumerate(zip(job.items, sizes, strict=True)):
        if firsts[item.offset] != number:
            continue
        if item.offset >= job.arena_bytes:
            yield EncodedItem((next(tail),), item.length)
            continue
        start, stop = item.data_start, item.data_start + item.data_size
        end = item.offset + item.length
        segments = (memory[item.offset : start], memory[start:stop], memory[stop:end])
        yield EncodedItem(segments, item.length, start - item.offset, item.data_size, element_size)


def _encode_metadata(
    plan: GlobalSavePlan,
    uploaded: Sequence[tuple[StoredObject, ...]],
    compression: Compression | None,
) -> bytes:
    """Return DCP's metadata, pickled, with the location of each item.

    Raises:
        CheckpointError: A rank uploaded more or fewer items than planned.
    """
    locations: list[tuple[bytes, ItemLocation]] = []
    for rank, (order, objects) in enumerate(zip(plan.orders, uploaded, strict=True)):
        items = [(stored.key, item) for stored in objects for item in stored.items]
        if len(items) != len(order):
            raise CheckpointError(
                f"rank {rank} uploaded {len(items)} items, but its plan has {len(order)}; report "
                "this as a bug of aioflux"
            )
        for index, (key, item) in zip(order, items, strict=True):
            transforms = (compression.descriptor,) if compression and item.frame_size else ()
            locations.append((index, ItemLocation(key, item.offset, item.length, transforms)))
    return add_storage_data(plan.metadata, locations)


class _StagingError(AiofluxError):
    """Staging of the state failed."""


def _is_cancel_requested() -> bool:
    """Return whether a cancellation of this task is pending, which `run_to_end` delayed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that must complete: a cancellation of the caller does not cancel it."""
    task = asyncio.ensure_future(work)
    await wait_until_done(task)
    return task.result()

"""The commit protocol: one save of one rank, from the staged state to a committed step.

    other ranks:  write data object -> write manifest -> wait for the outcome
    coordinator:  write data object -> wait for all manifests -> write commit object
                  -> delete the manifests and the steps beyond retention

The ranks communicate by manifests in the bucket (`manifests`) and not by collectives, because the
upload runs during training, and possibly in the uploader process. If the heartbeats of a rank stop,
or if its manifest is missing after `commit_seconds`, the save fails on all ranks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from aioflux._concurrency.run_to_completion import wait_until_done
from aioflux.checkpoint._format.codec import Codec, EncodedItem, Packer
from aioflux.checkpoint._format.commit import data_key
from aioflux.checkpoint._save.coordinator import Coordinator, encode_metadata
from aioflux.checkpoint._save.job import Manifest, SaveResult, plan_blocks_for, start_delay
from aioflux.checkpoint._save.manifests import (
    FailedElsewhereError,
    Manifests,
    OutcomeError,
    UnknownOutcomeError,
    failure_of,
)
from aioflux.checkpoint._store.objects import write_object
from aioflux.checkpoint._store.steps import begin_save, read_commit
from aioflux.errors import (
    AiofluxError,
    CheckpointError,
    CheckpointNotFoundError,
    NotFoundError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import Commit, StoredItem, StoredObject
    from aioflux.checkpoint._save.job import Compression, Job, StagedState, UploadSettings
    from aioflux.checkpoint._store.history import Outcome, SaveRecord
    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.store import Store

T = TypeVar("T")

_log = logging.getLogger("aioflux")

_POLLS_PER_COMMIT_READ = 8
"""A rank that waits for the outcome reads the commit object after this number of polls."""


class RankSave:
    """One save of one rank."""

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
        self._manifests = Manifests(store, settings, job)
        self._coordinator = Coordinator(self._manifests) if job.rank == 0 else None
        self._prefix = self._manifests.prefix
        self._uri = self._manifests.uri
        self.record: SaveRecord | None = None
        """Record for the history, when the save of the coordinator has ended."""
        self._upload_seconds = 0.0
        self._num_bytes = 0
        self._is_reported = False
        """Whether the coordinator may have read the manifest of this rank."""
        # An earlier attempt, whose process died, may have committed the save.
        self._may_be_committed = job.attempt > 0

    async def run(self) -> SaveResult:
        """Upload and commit.

        Raises:
            AiofluxError: The save is not committed on any rank, or its outcome is unknown.
        """
        job = self._job
        try:
            if job.attempt and (commit := await self._earlier_commit()) is not None:
                if self._coordinator is not None:
                    await self._record("committed", num_bytes=commit.num_bytes)
                return self._result()
            uploaded = await self._read_own_manifest() if job.attempt else None
            if job.failure:
                raise _StagingError(job.failure)  # noqa: TRY301  `undo` handles all failures
            if self._coordinator is not None:
                await self._coordinate(self._coordinator)
            else:
                await self._participate(uploaded)
            await self.delete_earlier_attempts()
        except BaseException as exc:
            await self.undo(exc)
            if isinstance(exc, FailedElsewhereError) and _is_cancel_requested():
                raise asyncio.CancelledError from exc
            if isinstance(exc, OutcomeError):  # private: raise its public base class
                raise CheckpointError(str(exc)) from exc.__cause__
            raise
        return self._result()

    async def _coordinate(self, coordinator: Coordinator) -> None:
        # Before the upload: this raises if the server ignores preconditions.
        replaces = await begin_save(self._store, self._prefix)
        # The coordinator polls twice per heartbeat, so that it notices a silent rank within three
        # heartbeats.
        own_objects = await self._upload_and_poll(
            coordinator.poll_ranks, self._settings.heartbeat_seconds / 2, TransientError
        )
        others = await coordinator.collect() if self._job.world_size > 1 else []
        await run_to_end(self._commit(coordinator, [own_objects, *others], replaces))

    async def _commit(
        self,
        coordinator: Coordinator,
        uploaded: Sequence[tuple[StoredObject, ...]],
        replaces: Sequence[CommitObject],
    ) -> None:
        objects = [stored for rank_objects in uploaded for stored in rank_objects]
        metadata = self._encode_metadata(uploaded)
        num_bytes = await coordinator.commit(objects, metadata, replaces)
        await self._record("committed", num_bytes=num_bytes)

    async def _record(self, outcome: Outcome, *, num_bytes: int = 0, error: str = "") -> None:
        """Set the record of the save, on the coordinator; Nebula overrides this."""
        assert self._coordinator is not None
        self.record = self._coordinator.record(outcome, num_bytes=num_bytes, error=error)

    async def _participate(self, uploaded: tuple[StoredObject, ...] | None) -> None:
        if uploaded is None:
            uploaded = await self._upload_and_poll(
                self._poll_coordinator, self._settings.heartbeat_seconds, AiofluxError
            )
        # From now on the coordinator may commit the objects of this rank: do not delete them.
        self._is_reported = True
        is_written = await run_to_end(self._report(uploaded))
        await run_to_end(self._await_outcome(is_written=is_written))

    async def undo(self, error: BaseException) -> None:
        """Report a failure to the other ranks, and delete the objects of this rank.

        If the clean-up itself fails, the error receives a note.
        """
        error.add_note(f"while saving {self._uri} on rank {self._job.rank}")
        seconds = self._settings.cleanup_seconds
        try:
            await run_to_end(asyncio.wait_for(self._roll_back(error), seconds))
        except (TimeoutError, AiofluxError) as exc:
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
            commit = await self._manifests.own_commit()
        except AiofluxError as exc:
            raise UnknownOutcomeError(
                f"{self._uri}: the uploader process died, and it is unknown whether it had "
                f"committed the step ({exc}); load the latest step to see"
            ) from exc
        self._may_be_committed = commit is not None
        return commit

    async def _read_own_manifest(self) -> tuple[StoredObject, ...] | None:
        """Return the objects that an earlier attempt reported, or None if it reported nothing.

        The coordinator may commit reported objects, so they are not uploaded again.

        Raises:
            OutcomeError: The earlier attempt reported a failure.
        """
        self._is_reported = True  # so that a failed read does not delete reported objects
        try:
            manifest = await self._manifests.read(self._job.rank)
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
        if self._job.world_size == 1 or math.isinf(poll_seconds):
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

    async def _poll_coordinator(self) -> None:
        await self._manifests.poll_coordinator()
        if self._manifests.silent:
            raise FailedElsewhereError(
                f"{self._uri} was not saved: {self._manifests.describe_silent()}"
            )

    async def _upload(self) -> tuple[StoredObject, ...]:
        job, staged = self._job, self._job.staged
        if not staged.items:
            return ()
        if not job.is_urgent:
            is_multipart = staged.num_bytes > self._store.transfer.part_size_bytes
            await asyncio.sleep(start_delay(job.rank, job.world_size, is_multipart=is_multipart))
        started = time.monotonic()
        key = data_key(job.save_id, job.rank, job.attempt)
        items = list(staged.items)
        if (compression := self._settings.compression) is None:
            stored = await self._write(key, _staged_pieces(staged, self._memory))
        else:
            items.clear()
            packing = _compressed_pieces(staged, self._memory, compression, items)
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
            size_hint=plan_blocks_for(self._job.staged.num_bytes, self._job.world_size),
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
        return encode_metadata(self._job.global_plan, uploaded, self._settings.compression)

    async def _report(self, objects: tuple[StoredObject, ...]) -> bool:
        """Write the manifest of this rank; return False if the response was lost."""
        try:
            await self._manifests.write(Manifest(rank=self._job.rank, objects=objects))
        except TransientError as exc:
            _log.warning("%s: it is unknown whether the manifest was written: %s", self._uri, exc)
            return False
        except AiofluxError:
            self._is_reported = False
            raise
        return True

    async def _await_outcome(self, *, is_written: bool) -> None:
        """Wait until the coordinator has committed, or reported a failure.

        `is_written` is whether the manifest of this rank is known to be written. An error of a poll
        is ignored, because the next poll may succeed.

        Raises:
            OutcomeError: The coordinator reported a failure, stopped its heartbeats, or did not
                commit in time.
        """
        manifests = self._manifests
        failure: AiofluxError | None = None
        num_polls = 0
        async for seconds_left in manifests.polls(self._settings.commit_seconds):
            is_last = seconds_left <= 0
            num_polls += 1
            try:
                await manifests.poll_coordinator()
                is_last = is_last or bool(manifests.silent)
                exists = await manifests.is_written()
                # The coordinator deletes the manifests after the commit.
                if is_written and not exists:
                    await self._confirm_commit()
                    return
                is_written = is_written or exists
                # A coordinator without the permission to delete objects does not delete manifests.
                is_read = is_last or not is_written or num_polls % _POLLS_PER_COMMIT_READ == 0
                if is_read and await manifests.own_commit() is not None:
                    return
            except OutcomeError:
                raise
            except AiofluxError as exc:
                failure = exc
            if is_last:
                raise self._no_outcome_error(failure) from failure

    def _no_outcome_error(self, failure: AiofluxError | None) -> UnknownOutcomeError:
        seconds = self._settings.commit_seconds
        poll = f" (the last poll failed: {failure})" if failure is not None else ""
        is_silent = bool(self._manifests.silent)
        reason = f": {self._manifests.describe_silent()}" if is_silent else f" within {seconds:g} s"
        return UnknownOutcomeError(
            f"{self._uri}: rank {self._job.rank} has uploaded its part, but the coordinator (rank "
            f"0) did not report the outcome{reason}; load the latest step to see whether the step "
            f"was committed{poll}"
        )

    async def _confirm_commit(self) -> None:
        """Raise an error if the manifest was deleted without a commit."""
        try:
            current = await read_commit(self._store, self._prefix)
        except CheckpointNotFoundError:
            return  # retention has removed the step
        if current.commit is None or current.commit.save_id < self._job.save_id:
            raise UnknownOutcomeError(
                f"{self._uri}: the manifest of rank {self._job.rank} was deleted, but the step was "
                "not committed; look for another program that deletes objects there"
            )

    async def _roll_back(self, error: BaseException) -> None:
        """Report a failure to the other ranks and the history, and delete this rank's objects."""
        job, manifests = self._job, self._manifests
        is_unknown = isinstance(error, UnknownOutcomeError) or self._may_be_committed
        is_cancel = isinstance(error, asyncio.CancelledError)
        text = "the save was cancelled" if is_cancel else str(error) or repr(error)
        if self._coordinator is not None:
            if job.world_size > 1:
                if not isinstance(error, CheckpointError):
                    text = f"{self._uri} was not saved: rank 0: {text}"
                await manifests.write(Manifest(rank=0, error=text, is_unknown=is_unknown))
            await self._record("cancelled" if is_cancel else "failed", error=text)
        if is_unknown:
            return  # a commit may list the objects of this rank
        if self._coordinator is None:
            if self._is_reported and not isinstance(error, FailedElsewhereError):
                return  # the coordinator may commit the objects of this rank
            await manifests.write(Manifest(rank=job.rank, error=text))
        await self._store.delete_many(self._own_keys())
        if job.world_size > 1:
            await manifests.delete_after_failure()


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


def _staged_pieces(state: StagedState, memory: memoryview) -> list[bytes | memoryview]:
    """Return the bytes of the data object without compression: the arena and the tail."""
    return [memory[: state.size], *state.tail]


async def _compressed_pieces(
    state: StagedState, memory: memoryview, compression: Compression, stored: list[StoredItem]
) -> AsyncGenerator[bytes | memoryview]:
    """Yield the bytes of the data object with its large tensors compressed.

    At the end of the iteration the location of each item is appended to `stored`.
    """
    # Tied tensors share one item, which is written once, for the first of them.
    firsts = {item.offset: number for number, item in reversed([*enumerate(state.items)])}
    with Codec(
        level=compression.level, threads=compression.threads, byte_planes=compression.byte_planes
    ) as codec:
        packer = Packer(codec)
        async with aclosing(packer.pack([*_staged_items(state, memory, firsts)])) as pieces:
            async for piece in pieces:
                yield piece
    written = dict(zip(sorted(firsts.values()), packer.stored, strict=True))
    stored += [written[firsts[item.offset]] for item in state.items]


def _staged_items(
    state: StagedState, memory: memoryview, firsts: dict[int, int]
) -> Iterator[EncodedItem]:
    """Yield the items of a state; tied tensors yield one item."""
    tail = iter(state.tail)
    sizes = state.element_sizes
    for number, (item, element_size) in enumerate(zip(state.items, sizes, strict=True)):
        if firsts[item.offset] != number:
            continue
        if item.offset >= state.size:
            yield EncodedItem((next(tail),), item.length)
            continue
        start, stop = item.data_start, item.data_start + item.data_size
        end = item.offset + item.length
        segments = (memory[item.offset : start], memory[start:stop], memory[stop:end])
        yield EncodedItem(segments, item.length, start - item.offset, item.data_size, element_size)

"""The commit protocol: one save of one rank, from staged bytes to a committed step.

    every rank:   data object -> manifest in the bucket -> wait for the outcome
    coordinator:  data object -> all manifests -> commit object -> manifests and old steps deleted

The ranks communicate through the bucket (`manifests`), not by collectives: this runs during
training, in another process if it has to outlive the trainer. A rank that is gone is noticed by its
missing heartbeats (`heartbeat`), and without them after `commit_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from aioflux._concurrency.run_to_completion import wait_until_done
from aioflux.checkpoint._format.commit import data_key
from aioflux.checkpoint._save.coordinator import Coordinator, encode_metadata
from aioflux.checkpoint._save.job import Manifest, SaveResult
from aioflux.checkpoint._save.manifests import (
    FailedElsewhereError,
    Manifests,
    OutcomeError,
    UnknownOutcomeError,
    failure_of,
)
from aioflux.checkpoint._save.packing import compressed_pieces, staged_pieces
from aioflux.checkpoint._store.commits import read_commit
from aioflux.checkpoint._store.objects import write_object
from aioflux.errors import (
    AiofluxError,
    CheckpointError,
    CheckpointNotFoundError,
    NotFoundError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from aioflux.checkpoint._format.commit import StoredObject
    from aioflux.checkpoint._maintain.history import Outcome
    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.store import Store

__all__ = ["RankSave", "run_to_end"]

T = TypeVar("T")

_log = logging.getLogger("aioflux")

_POLLS_PER_COMMIT_READ = 8
"""Polls of the manifests for each read of the commit object."""


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
        self._upload_seconds = 0.0
        self._num_bytes = 0
        self._is_reported = False
        """Whether the coordinator may have read the manifest of this rank."""
        self._may_be_committed = job.attempt > 0

    async def run(self) -> SaveResult:
        """Upload and commit.

        Raises:
            AiofluxError: It is not committed, on any rank.
        """
        job = self._job
        try:
            if job.attempt and await self._was_committed():
                return self._result()
            uploaded = await self._read_own_manifest() if job.attempt else None
            if job.failure:
                raise _StagingError(job.failure)  # noqa: TRY301  one way for all failures
            if self._coordinator is not None:
                await self._coordinate(self._coordinator)
            else:
                await self._participate(uploaded)
            await self.delete_earlier_attempts()
        except BaseException as exc:
            await self.undo(exc)
            if isinstance(exc, FailedElsewhereError) and _is_cancel_requested():
                raise asyncio.CancelledError from exc
            if isinstance(exc, OutcomeError):  # private to the protocol
                raise CheckpointError(str(exc)) from exc.__cause__
            raise
        return self._result()

    async def _coordinate(self, coordinator: Coordinator) -> None:
        # Before anything is uploaded: without conditions, saves could replace each other.
        replaces = await coordinator.read_replaced()
        # The coordinator polls twice as often, so that a rank is gone for less than three
        # heartbeats unnoticed.
        mine = await self._upload_watched(
            coordinator.poll_ranks, self._settings.heartbeat_seconds / 2, TransientError
        )
        others = await coordinator.collect() if self._job.world_size > 1 else []
        await run_to_end(self._commit(coordinator, [mine, *others], replaces))

    async def _commit(
        self,
        coordinator: Coordinator,
        uploaded: Sequence[tuple[StoredObject, ...]],
        replaces: Sequence[CommitObject],
    ) -> None:
        objects = [stored for each in uploaded for stored in each]
        metadata = self._encode_metadata(uploaded)
        num_bytes = await coordinator.commit(objects, metadata, replaces)
        await self._record("committed", num_bytes=num_bytes)

    async def _record(self, outcome: Outcome, *, num_bytes: int = 0, error: str = "") -> None:
        """Record the outcome of the save, on the coordinator; Nebula has a history of its own."""
        assert self._coordinator is not None
        await self._coordinator.record(outcome, num_bytes=num_bytes, error=error)

    async def _participate(self, uploaded: tuple[StoredObject, ...] | None) -> None:
        if uploaded is None:
            uploaded = await self._upload_watched(
                self._poll_coordinator, self._settings.heartbeat_seconds, AiofluxError
            )
        # From here on the coordinator may commit the objects of this rank: they stay.
        self._is_reported = True
        is_there = await run_to_end(self._report(uploaded))
        await run_to_end(self._await_outcome(is_there=is_there))

    async def undo(self, error: BaseException) -> None:
        """Report a failure and remove what was written; a failure of that is noted on the error."""
        error.add_note(f"while saving {self._uri} on rank {self._job.rank}")
        seconds = self._settings.cleanup_seconds
        try:
            await run_to_end(asyncio.wait_for(self._roll_back(error), seconds))
        except TimeoutError:
            error.add_note("what it wrote could not be removed in time, `aioflux clean` does")
        except AiofluxError as exc:
            error.add_note(f"what it wrote could not be removed, `aioflux clean` does: {exc}")

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

    async def _was_committed(self) -> bool:
        """Return whether an earlier attempt, whose process died, had committed the save.

        Raises:
            OutcomeError: That is unknown.
        """
        try:
            self._may_be_committed = await self._manifests.is_committed()
        except AiofluxError as exc:
            raise UnknownOutcomeError(
                f"{self._uri}: the process that uploaded it died, and whether it had committed it, "
                f"the next load shows ({exc})"
            ) from exc
        return self._may_be_committed

    async def _read_own_manifest(self) -> tuple[StoredObject, ...] | None:
        """Return the objects that an earlier attempt reported: others rely on them.

        Raises:
            OutcomeError: It had reported a failure.
        """
        self._is_reported = True  # so that nothing is removed as long as this is unknown
        try:
            manifest = await self._manifests.read(self._job.rank)
        except NotFoundError:
            self._is_reported = False
            return None
        if manifest.error:
            raise failure_of(manifest)
        return manifest.objects

    async def _upload_watched(
        self,
        poll: Callable[[], Awaitable[None]],
        poll_seconds: float,
        ignored: type[AiofluxError],
    ) -> tuple[StoredObject, ...]:
        """Upload, and poll meanwhile whether the other ranks are still alive.

        Args:
            poll: Raises CheckpointError if the save failed on another rank.
            poll_seconds: Time between two polls.
            ignored: Errors of a poll that decide nothing: the next one may succeed.
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
            await wait_until_done(uploading)  # it reads memory that is about to be used again
            if not uploading.cancelled():
                uploading.exception()  # raised above, or a consequence of the cancellation

    async def _poll_coordinator(self) -> None:
        await self._manifests.poll_coordinator()
        if self._manifests.gone:
            raise FailedElsewhereError(
                f"{self._uri} was not saved: {self._manifests.describe_gone()}"
            )

    async def _upload(self) -> tuple[StoredObject, ...]:
        """Write the data objects of this rank."""
        job, staged = self._job, self._job.staged
        if not staged.items:
            return ()
        started = time.monotonic()
        key = data_key(job.save_id, job.rank, job.attempt)
        items = list(staged.items)
        if (compression := self._settings.compression) is None:
            stored = await self._write(key, staged_pieces(staged, self._memory))
        else:
            items.clear()
            packing = compressed_pieces(staged, self._memory, compression, items)
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
            size_hint=self._job.staged.num_bytes,
            progress=self._progress,
        )

    async def delete_earlier_attempts(self) -> None:
        """Delete objects that attempts wrote whose process died, after the save was committed.

        The commit names those that stay: it may consist of objects of an earlier attempt.
        """
        if not self._job.attempt:
            return
        with suppress(AiofluxError):  # `aioflux clean` finds them, too
            found = await read_commit(self._store, self._prefix)
            if found.commit is not None and found.commit.save_id == self._job.save_id:
                named = {self._prefix + stored.key for stored in found.commit.objects}
                await self._store.delete_many([k for k in self._own_keys() if k not in named])

    def _own_keys(self) -> list[str]:
        """Return the keys that this rank may have written, in the order of attempts."""
        job = self._job
        return [
            self._prefix + data_key(job.save_id, job.rank, number)
            for number in range(job.attempt + 1)
        ]

    def _encode_metadata(self, uploaded: Sequence[tuple[StoredObject, ...]]) -> bytes:
        """Return the pickle of DCP's metadata; on the coordinator."""
        assert self._job.global_plan is not None
        return encode_metadata(self._job.global_plan, uploaded, self._settings.compression)

    async def _report(self, objects: tuple[StoredObject, ...]) -> bool:
        """Write the manifest of this rank, and return whether it is surely there."""
        try:
            await self._manifests.write(Manifest(rank=self._job.rank, objects=objects))
        except TransientError as exc:
            _log.warning("%s: whether the manifest was written is unknown: %s", self._uri, exc)
            return False
        except AiofluxError:
            self._is_reported = False
            raise
        return True

    async def _await_outcome(self, *, is_there: bool) -> None:
        """Wait until the coordinator has committed, or reported a failure.

        A poll that fails decides nothing: the next one may succeed.

        Raises:
            OutcomeError: It has not committed, is gone, or reported nothing in time.
        """
        manifests, rank = self._manifests, self._job.rank
        failure: AiofluxError | None = None
        num_polls = 0
        async for seconds_left in manifests.polls(self._settings.commit_seconds):
            is_last = seconds_left <= 0
            num_polls += 1
            try:
                ranks = await manifests.poll_coordinator()
                is_last = is_last or bool(manifests.gone)
                is_there = is_there or rank in ranks
                # The coordinator deletes manifests after the commit.
                if is_there and rank not in ranks:
                    await self._confirm()
                    return
                # A coordinator without the permission to delete leaves them.
                is_time = is_last or not is_there or num_polls % _POLLS_PER_COMMIT_READ == 0
                if is_time and await manifests.is_committed():
                    return
            except OutcomeError:
                raise
            except AiofluxError as exc:
                failure = exc
            if is_last:
                raise self._no_outcome_error(failure) from failure

    def _no_outcome_error(self, failure: AiofluxError | None) -> UnknownOutcomeError:
        seconds = self._settings.commit_seconds
        why = f" (the last poll failed: {failure})" if failure is not None else ""
        what = f"within {seconds:g} s the coordinator (rank 0) reported neither"
        if self._manifests.gone:
            what = (
                f"the coordinator is gone: {self._manifests.describe_gone()}; it reported neither"
            )
        return UnknownOutcomeError(
            f"{self._uri}: rank {self._job.rank} is done, and {what} a commit nor a failure; load "
            f"the latest step to see which it was{why}"
        )

    async def _confirm(self) -> None:
        """Make sure that the manifest was deleted because of a commit."""
        try:
            found = await read_commit(self._store, self._prefix)
        except CheckpointNotFoundError:
            return  # retention has removed the step
        if found.commit is None or found.commit.save_id < self._job.save_id:
            raise UnknownOutcomeError(
                f"{self._uri}: the manifest of rank {self._job.rank} was removed, and the step was "
                "not committed; something else deletes objects there"
            )

    async def _roll_back(self, error: BaseException) -> None:
        """Report a failure to the other ranks and the history, and delete what was written."""
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
            return  # the objects of the step must stay
        if self._coordinator is None:
            if self._is_reported and not isinstance(error, FailedElsewhereError):
                return  # the coordinator may commit the objects of this rank
            await manifests.write(Manifest(rank=job.rank, error=text))
        await self._store.delete_many(self._own_keys())
        if job.world_size > 1:
            await manifests.delete_after_failure()


class _StagingError(AiofluxError):
    """A state could not be copied."""


def _is_cancel_requested() -> bool:
    """Return whether this task was cancelled when it was too late to stop."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not stop half-way: a cancellation comes too late for it."""
    task = asyncio.ensure_future(work)
    await wait_until_done(task)
    return task.result()

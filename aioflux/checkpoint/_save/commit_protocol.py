"""From staged bytes to a checkpoint: the part of a save that training does not wait for.

    every rank:   data object -> manifest in the bucket -> wait for the outcome
    coordinator:  data object -> all manifests -> commit object -> manifests away, old steps away

The ranks meet in the bucket and in no collective: it runs beside training, in another process where
it has to outlive the trainer. A rank that is gone is missed by its heartbeats (`_heartbeat`), and
without them after a time that is known before.

Over 500 lines, because what coordinator and ranks tell each other, and what they take back when a
save fails, can only be read as one exchange.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    Commit,
    StoredObject,
    data_key,
    encode_commit,
    step_prefix,
)
from aioflux.checkpoint._format.dcp_metadata import ItemLocation, add_storage_data
from aioflux.checkpoint._maintain import history
from aioflux.checkpoint._maintain.history import SaveRecord
from aioflux.checkpoint._maintain.retention import prune
from aioflux.checkpoint._save.heartbeat import Heartbeat, Watch
from aioflux.checkpoint._save.job import Manifest, SaveResult, manifest_key
from aioflux.checkpoint._save.packing import compressed_pieces, staged_pieces
from aioflux.checkpoint._store.commit import commit as commit_object
from aioflux.checkpoint._store.commit import delete_replaced
from aioflux.checkpoint._store.commits import read_commit, read_commits, uri_below
from aioflux.checkpoint._store.objects import write_object
from aioflux.errors import (
    AiofluxError,
    CheckpointError,
    CheckpointNotFoundError,
    NotFoundError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable, Sequence

    from aioflux.checkpoint._maintain.history import Outcome
    from aioflux.checkpoint._save.job import Compression, Job, UploadSettings, Whole
    from aioflux.checkpoint._store.commits import CommitObject
    from aioflux.store import Store

__all__ = ["Save", "Uploads"]

T = TypeVar("T")

_log = logging.getLogger("aioflux")

_FIRST_POLL_SECONDS = 0.05
_LAST_POLL_SECONDS = 1.0

_LOOKS_PER_COMMIT = 8
"""Looks at the manifests for each one at the commit object."""

_CLEANUP_SECONDS = 10.0
"""Time for the removal of what a failed save wrote."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)


class Uploads:
    """The saves of one rank on one event loop: one after another, so that commits are in order."""

    def __init__(self, store: Store, settings: UploadSettings) -> None:
        self._store = store
        # Uploads fill the limits of their own store for minutes, and a heartbeat must not wait.
        self.heartbeat_store = store.reopened()
        self._settings = settings
        self._turn = asyncio.Lock()
        self._announced: dict[str, Heartbeat] = {}

    def announce(self, save_id: str, prefix: str, rank: int) -> None:
        """Begin the heartbeats of a save whose job is to come: it may take long to be staged.

        Args:
            save_id: The save.
            prefix: Prefix of the checkpoint.
            rank: This rank.
        """
        self._announced[save_id] = self._heartbeat(save_id, prefix, rank, is_late=False)

    def withdraw(self, save_id: str = "") -> None:
        """End the heartbeats of a save whose job does not come; of all such saves by default."""
        for each in [save_id] if save_id else list(self._announced):
            heartbeat = self._announced.pop(each, None)
            if heartbeat is not None:
                heartbeat.cancel()

    def _heartbeat(self, save_id: str, prefix: str, rank: int, *, is_late: bool) -> Heartbeat:
        return Heartbeat(
            self.heartbeat_store,
            prefix,
            save_id,
            rank,
            every_seconds=self._settings.heartbeat_seconds,
            is_late=is_late,
        )

    async def run(
        self, job: Job, memory: memoryview, progress: Callable[[int], None]
    ) -> SaveResult:
        """Upload and commit one save.

        Args:
            job: The save.
            memory: What is in its arena.
            progress: Called with the number of bytes of each piece that goes to the upload.

        Raises:
            AiofluxError: It is not committed, on any rank; what it wrote is removed as far as the
                service lets us.
        """
        heartbeat = self._announced.pop(job.save_id, None)
        if heartbeat is None and job.world_size > 1:
            prefix = job.prefix or step_prefix(job.step)
            is_late = job.attempt > 0
            heartbeat = self._heartbeat(job.save_id, prefix, job.rank, is_late=is_late)
        try:
            return await self._run(Save(self._store, self._settings, job, memory, progress))
        finally:
            if heartbeat is not None:
                await _to_its_end(heartbeat.end())

    async def _run(self, save: Save) -> SaveResult:
        if save.is_urgent:
            return await save.run()
        try:
            await self._turn.acquire()
        except BaseException as exc:  # cancelled while it waited
            await save.undo(exc)
            raise
        try:
            return await save.run()
        finally:
            self._turn.release()


class Save:
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
        self._prefix = job.prefix or step_prefix(job.step)
        self._uri = uri_below(store, self._prefix)
        self._is_alone = job.world_size == 1
        self._is_coordinator = job.rank == 0
        self._upload_seconds = 0.0
        self._num_retries = store.stats.num_retries
        self._num_bytes = 0
        self._is_told = False
        self._may_be_committed = job.attempt > 0
        self._manifests: dict[int, Manifest] = {}
        """What other ranks have told, on the coordinator."""
        self._watch = Watch(settings.heartbeat_seconds)
        self._gone: dict[int, float] = {}
        """Ranks that are gone, with the seconds for which nothing was heard of them."""

    @property
    def is_urgent(self) -> bool:
        """Whether it does not wait for the saves before it."""
        return self._job.is_urgent

    async def run(self) -> SaveResult:
        job = self._job
        try:
            if job.attempt and await self._was_committed():
                return self._result()
            told = await self._told_before() if job.attempt else None
            if job.failure:
                raise _StagingError(job.failure)  # noqa: TRY301  one way for all failures
            replaces: list[CommitObject] = []
            if self._is_coordinator:
                # Before anything is uploaded: without conditions, saves could replace each other.
                await self._store.check_conditions()
                replaces = await read_commits(self._store, self._prefix)
            if told is None or self._is_coordinator:
                told = await self._upload_watched()
            if self._is_coordinator:
                others = [] if self._is_alone else await self._collect()
                committing = self._commit([told, *others], replaces)
                await _to_its_end(committing)
            else:
                # From here on the coordinator may commit what this rank wrote, so that it stays.
                self._is_told = True
                is_there = await _to_its_end(self._tell_objects(told))
                await _to_its_end(self._await_outcome(is_there=is_there))
            await self._forget_attempts()
        except BaseException as exc:
            await self.undo(exc)
            if isinstance(exc, _FailedElsewhereError) and _is_asked_to_stop():
                raise asyncio.CancelledError from exc
            if isinstance(exc, _OutcomeError):  # a word among ourselves
                raise CheckpointError(str(exc)) from exc.__cause__
            raise
        return self._result()

    async def undo(self, error: BaseException) -> None:
        """Tell the others, and remove what was written; a failure of that is noted on the error."""
        error.add_note(f"while saving {self._uri} on rank {self._job.rank}")
        try:
            await _to_its_end(asyncio.wait_for(self._withdraw(error), _CLEANUP_SECONDS))
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
            seconds=time.time() - job.begun,
        )

    async def _is_committed(self) -> bool:
        """Tell whether the step is that of this save.

        No other save will do: by its name it may be later only because a clock was wrong.
        """
        try:
            found = await read_commit(self._store, self._prefix)
        except CheckpointError:
            return False
        return found.commit is not None and found.commit.save_id == self._job.save_id

    async def _was_committed(self) -> bool:
        """Tell whether an upload of this save that died had come to its end.

        Raises:
            CheckpointError: Nobody can tell.
        """
        try:
            self._may_be_committed = await self._is_committed()
        except AiofluxError as exc:
            raise _UnknownOutcomeError(
                f"{self._uri}: the process that uploaded it died, and whether it had committed it, "
                f"the next load tells ({exc})"
            ) from exc
        return self._may_be_committed

    async def _told_before(self) -> tuple[StoredObject, ...] | None:
        """Return what an upload of this save that died had told: others have gone by that.

        Raises:
            CheckpointError: It had told of a failure.
        """
        self._is_told = True  # so that nothing is removed as long as this is not known
        try:
            told = await self._read_manifest(self._job.rank)
        except NotFoundError:
            self._is_told = False
            return None
        if told.error:
            raise (_UnknownOutcomeError if told.is_unknown else _FailedElsewhereError)(told.error)
        return told.objects

    async def _upload_watched(self) -> tuple[StoredObject, ...]:
        """Upload, and look at each heartbeat whether the other ranks are still at it.

        Raises:
            CheckpointError: A rank failed or is gone.
        """
        seconds = self._settings.heartbeat_seconds
        if self._is_alone or math.isinf(seconds):
            return await self._upload()
        look = self._look_at_ranks if self._is_coordinator else self._look_at_coordinator
        # One rank looks twice as often, so that none is gone for over three heartbeats unnoticed.
        pause = seconds / 2 if self._is_coordinator else seconds
        uploading = asyncio.ensure_future(self._upload())
        try:
            while not (await asyncio.wait((uploading,), timeout=pause))[0]:
                await look()
            return await uploading
        finally:
            uploading.cancel()
            while not uploading.done():  # it reads memory that is about to be given back
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((uploading,))
            if not uploading.cancelled():
                uploading.exception()  # raised above, or a consequence of the cancellation

    async def _look_at_ranks(self) -> None:
        try:
            await self._collect_manifests()
        except TransientError as exc:  # decides nothing: the next look may be answered
            _log.warning("%s: the other ranks could not be looked at: %s", self._uri, exc)

    async def _look_at_coordinator(self) -> None:
        """Look whether the coordinator still goes for a save that this rank is yet to upload."""
        try:
            there = await self._look({0})
            if 0 in there:
                note = await self._read_manifest(0)
                raise (_UnknownOutcomeError if note.is_unknown else _FailedElsewhereError)(
                    note.error
                )
        except _OutcomeError:
            raise
        except AiofluxError as exc:  # decides nothing: the next look may be answered
            _log.warning("%s: the coordinator could not be looked at: %s", self._uri, exc)
            return
        if self._gone:
            raise _FailedElsewhereError(f"{self._uri} was not saved: {self._describe_gone()}")

    async def _upload(self) -> tuple[StoredObject, ...]:
        job = self._job
        if not job.items:
            return ()
        begun = time.monotonic()
        key = data_key(job.save_id, job.rank, job.attempt)
        items = list(job.items)
        if (compression := self._settings.compression) is None:
            stored = await self._write(key, staged_pieces(job, self._memory))
        else:
            items.clear()
            packing = compressed_pieces(job, self._memory, compression, items)
            async with aclosing(packing) as pieces:
                stored = await self._write(key, pieces)
        self._num_bytes = stored.size
        self._upload_seconds = time.monotonic() - begun
        return (replace(stored, key=key, items=tuple(items)),)

    async def _write(self, key: str, pieces: Any) -> StoredObject:
        return await write_object(
            self._store,
            self._prefix + key,
            pieces,
            rank=self._job.rank,
            size_hint=self._job.num_bytes,
            progress=self._progress,
        )

    async def _forget_attempts(self) -> None:
        """Remove what uploads that died had written, now that the save is committed without it.

        The commit says what that is: the coordinator may have gone by what one of them had told.
        """
        if not self._job.attempt:
            return
        with suppress(AiofluxError):  # `aioflux clean` finds it, too
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

    async def _tell(self, manifest: Manifest) -> None:
        key = self._prefix + manifest_key(self._job.save_id, manifest.rank)
        await self._store.put(key, _encoder.encode(manifest), content_type="application/json")

    async def _tell_objects(self, objects: tuple[StoredObject, ...]) -> bool:
        """Tell the coordinator what this rank wrote, and return whether it surely can read it."""
        try:
            await self._tell(Manifest(rank=self._job.rank, objects=objects))
        except TransientError as exc:
            _log.warning("%s: what the coordinator heard is not known: %s", self._uri, exc)
            return False
        except AiofluxError:
            self._is_told = False
            raise
        return True

    async def _read_manifest(self, rank: int) -> Manifest:
        key = self._prefix + manifest_key(self._job.save_id, rank)
        return _decoder.decode(await self._store.get(key))

    async def _collect(self) -> list[tuple[StoredObject, ...]]:
        """Wait for the manifests of the other ranks, and return what each uploaded.

        A look that fails for now decides nothing: the next one may be answered.

        Raises:
            CheckpointError: A rank failed or is gone, or did not tell anything in time.
        """
        job = self._job
        told = self._manifests
        async for seconds_left in _polls(self._settings.commit_seconds):
            failure: TransientError | None = None
            try:
                await self._collect_manifests()
            except TransientError as exc:
                failure = exc
            missing = set(range(1, job.world_size)) - told.keys()
            if not missing:
                return [told[rank].objects for rank in sorted(told)]
            if seconds_left <= 0:
                why = f" (the last look failed: {failure})" if failure is not None else ""
                raise CheckpointError(
                    f"{self._uri} was not saved: {_ranks(missing)} of {job.world_size} did not "
                    f"upload within {self._settings.commit_seconds:g} s after the coordinator, for "
                    f"example {self._prefix}{manifest_key(job.save_id, min(missing))}; the step "
                    f"that was saved before is still there{why}"
                ) from failure
        raise AssertionError("polls end by what is done in them")

    async def _collect_manifests(self) -> None:
        """Read the manifests that have come since.

        Raises:
            CheckpointError: One of them tells of a failure, or a rank is gone.
        """
        told = self._manifests
        missing = set(range(1, self._job.world_size)) - told.keys()
        for rank in await self._look(missing) & missing:
            manifest = await self._read_manifest(rank)
            if manifest.error:
                raise CheckpointError(f"{self._uri} was not saved: rank {rank}: {manifest.error}")
            told[rank] = manifest
        if self._gone:
            raise CheckpointError(
                f"{self._uri} was not saved: {self._describe_gone()}; the step that was saved "
                "before is still there"
            )

    async def _told_ranks(self) -> set[int]:
        return (await self._signs())[0]

    async def _signs(self) -> tuple[set[int], dict[int, Hashable]]:
        """Return the ranks that have told, and what each has in the bucket; in one listing."""
        start = f"{self._prefix}{self._job.save_id}/rank-"
        told: set[int] = set()
        signs: dict[int, set[tuple[str, str]]] = {}
        for meta in await self._store.list_all(start):
            rank = int(meta.key.removeprefix(start).partition(".")[0])
            signs.setdefault(rank, set()).add((meta.key, meta.generation or str(meta.updated)))
            if meta.key.endswith(".json"):
                told.add(rank)
        return told, {rank: frozenset(each) for rank, each in signs.items()}

    async def _look(self, awaited: set[int]) -> set[int]:
        """Return the ranks that have told, and note which of those that have not are gone."""
        told, signs = await self._signs()
        self._gone = self._watch.look(signs, awaited - told, time.monotonic())
        return told

    def _describe_gone(self) -> str:
        """Say which ranks are gone, and since when."""
        ranks = ", ".join(f"rank {rank} for {self._gone[rank]:.0f} s" for rank in self._gone)
        return (
            f"there is no sign of life of {ranks} (of {self._job.world_size} ranks); what uploads "
            "there was killed, cannot reach the bucket, or stands still as in a debugger"
        )

    async def _await_outcome(self, *, is_there: bool) -> None:
        """Wait until the coordinator has committed, or says why it has not.

        A look that fails decides nothing: the next one may be answered.

        Args:
            is_there: Whether the coordinator can read what this rank told.

        Raises:
            CheckpointError: It has not committed, is gone, or told nothing in time.
        """
        job = self._job
        seconds = self._settings.commit_seconds
        failure: AiofluxError | None = None
        num_looks = 0
        async for seconds_left in _polls(seconds):
            is_last = seconds_left <= 0
            num_looks += 1
            try:
                there = await self._look({0})
                is_last = is_last or bool(self._gone)
                is_there = is_there or job.rank in there
                if 0 in there:
                    note = await self._read_manifest(0)
                    raise (_UnknownOutcomeError if note.is_unknown else _FailedElsewhereError)(
                        note.error
                    )
                # The coordinator takes manifests away when the commit is there.
                if is_there and job.rank not in there:
                    await self._confirm()
                    return
                # A coordinator that may not delete leaves them.
                is_time = is_last or not is_there or num_looks % _LOOKS_PER_COMMIT == 0
                if is_time and await self._is_committed():
                    return
            except _OutcomeError:
                raise
            except AiofluxError as exc:
                failure = exc
            if is_last:
                why = f" (the last look failed: {failure})" if failure is not None else ""
                what = f"within {seconds:g} s the coordinator (rank 0) told neither"
                if self._gone:
                    what = f"the coordinator is gone: {self._describe_gone()}; it told neither"
                raise _UnknownOutcomeError(
                    f"{self._uri}: rank {job.rank} is done, and {what} of a commit nor of a "
                    f"failure; load the latest step to see which it was{why}"
                ) from failure

    async def _confirm(self) -> None:
        try:
            found = await read_commit(self._store, self._prefix)
        except CheckpointNotFoundError:
            return  # retention has removed the step
        if found.commit is None or found.commit.save_id < self._job.save_id:
            raise _UnknownOutcomeError(
                f"{self._uri}: the manifest of rank {self._job.rank} was removed, and the step was "
                "not committed; something else deletes objects there"
            )

    async def _commit(
        self,
        told: Sequence[tuple[StoredObject, ...]],
        replaces: Sequence[CommitObject],
    ) -> None:
        """Publish the commit object, and clear away what it made useless."""
        job = self._job
        assert job.whole is not None
        commit = Commit(
            save_id=job.save_id,
            uri=self._uri,
            created=time.time(),
            world_size=job.world_size,
            step=job.step,
            objects=tuple(stored for objects in told for stored in objects),
            metrics=dict(job.metrics),
            extra=dict(job.whole.extra),
        )
        data = encode_commit(self._describe(told), commit)
        key = self._prefix + COMMIT_KEY
        while True:
            try:
                await commit_object(self._store, key, data, commit, replaces=replaces)
            except (AiofluxError, OSError) as exc:
                found = await self._read_conflicting(exc, replaces)
                if any(each.commit and each.commit.save_id == commit.save_id for each in found):
                    await delete_replaced(self._store, key, commit, replaces)
                    break
                replaces = found
            else:
                break
        await self._after_commit(commit)

    def _describe(self, told: Sequence[tuple[StoredObject, ...]]) -> bytes:
        """Return the pickle of DCP's metadata."""
        assert self._job.whole is not None
        return _metadata(self._job.whole, told, self._settings.compression)

    async def _read_conflicting(
        self, error: Exception, replaces: Sequence[CommitObject]
    ) -> list[CommitObject]:
        """Return the commit objects after a commit that failed: its own, or those of earlier saves.

        An urgent save overtakes those under way: one of the same step may be committed meanwhile,
        and is replaced.

        Raises:
            CheckpointError: It is not committed, or that is unknown.
        """
        is_unknown = isinstance(error, TransientError)
        try:
            found = await read_commits(self._store, self._prefix)
        except AiofluxError:
            is_unknown = True
        else:
            is_unknown = is_unknown or any(each.problem is not None for each in found)
            mine = self._job.save_id
            theirs = [each.commit.save_id if each.commit else "" for each in found]
            is_new = _generations(found) != _generations(replaces)
            is_earlier = is_new and all("" < each < mine for each in theirs)
            if mine in theirs or (self._job.is_urgent and found and is_earlier):
                return found
        if is_unknown:
            raise _UnknownOutcomeError(
                f"{self._uri}: the commit was sent and not answered; whether it is there, the next "
                f"load tells ({error})"
            ) from error
        raise error

    async def _after_commit(self, commit: Commit) -> None:
        """Remove manifests and old steps, and note the save. The step is there in any case."""
        job = self._job
        keys = [self._prefix + manifest_key(job.save_id, rank) for rank in range(1, job.world_size)]
        try:
            if keys:
                await self._store.delete_many(keys)
            if self._settings.retention.has_rules:
                pruned = await prune(
                    self._store,
                    self._settings.retention,
                    now=time.time(),
                    protected={*job.protected, job.step},
                )
                for uri, error in pruned.errors.items():
                    _log.warning("%s could not be removed: %s", uri, error)
        except AiofluxError as exc:
            _log.warning(
                "%s is saved, and what it made useless could not be removed: %s", self._uri, exc
            )
        await self._note("committed", num_bytes=commit.num_bytes)

    async def _note(self, outcome: Outcome, *, num_bytes: int = 0, error: str = "") -> None:
        """Add the save to the history; only that is lost where it cannot be."""
        job = self._job
        record = SaveRecord(
            record_id=job.save_id,
            time=datetime.now(UTC),
            step=job.step,
            outcome=outcome,
            num_bytes=num_bytes,
            staged_seconds=job.staged_seconds,
            upload_seconds=max(0.0, time.time() - job.begun - job.staged_seconds),
            num_retries=self._store.stats.num_retries - self._num_retries,
            world_size=job.world_size,
            error=error,
        )
        try:
            await history.append(self._store, record)
        except AiofluxError as exc:
            _log.warning("the history of %s misses step %d: %s", self._store.uri, job.step, exc)

    async def _withdraw(self, error: BaseException) -> None:
        job = self._job
        is_unknown = isinstance(error, _UnknownOutcomeError) or self._may_be_committed
        text = "the save was cancelled" if _is_cancel(error) else str(error) or repr(error)
        if self._is_coordinator and not self._is_alone:
            if not isinstance(error, CheckpointError):
                text = f"{self._uri} was not saved: rank 0: {text}"
            await self._tell(Manifest(rank=0, error=text, is_unknown=is_unknown))
        if self._is_coordinator:
            await self._note("cancelled" if _is_cancel(error) else "failed", error=text)
        if is_unknown:
            return  # what it is made of must stay
        if not self._is_coordinator:
            if self._is_told and not isinstance(error, _FailedElsewhereError):
                return  # the coordinator may commit what this rank wrote
            await self._tell(Manifest(rank=job.rank, error=text))
        await self._store.delete_many(self._own_keys())
        if not self._is_alone:
            await self._forget_failure()

    async def _forget_failure(self) -> None:
        """Remove what the ranks told of a failure, once it was told by all.

        The coordinator waits a while for that, and until then its word stays for an uploader that
        takes over from one that died. After it the last rank to tell does it, so each looks when
        it has told.
        """
        everyone = set(range(self._job.world_size))
        manifests = [self._prefix + manifest_key(self._job.save_id, rank) for rank in everyone]
        failed: set[int] = set()
        async for seconds_left in _polls(_CLEANUP_SECONDS / 2 if self._is_coordinator else 0.0):
            for rank in await self._told_ranks() - failed:
                try:
                    manifest = await self._read_manifest(rank)
                except NotFoundError:
                    return  # another rank is at it
                if manifest.error:
                    failed.add(rank)
            if self._gone:
                return  # these do not tell, unless they only stood still: what was told stays
            if failed == everyone:
                if self._is_coordinator or await self._is_late(manifests):
                    await self._store.delete_many(manifests)
                return
            if seconds_left <= 0:
                return

    async def _is_late(self, manifests: Sequence[str]) -> bool:
        """Tell whether this rank told of a failure when the coordinator waited no more."""
        try:
            note = await self._store.head(manifests[0])
            mine = await self._store.head(manifests[self._job.rank])
        except NotFoundError:
            return False  # another rank is at it
        if note.updated is None or mine.updated is None:
            return False
        return (mine.updated - note.updated).total_seconds() > _CLEANUP_SECONDS


def _is_cancel(error: BaseException) -> bool:
    return isinstance(error, asyncio.CancelledError)


def _is_asked_to_stop() -> bool:
    """Tell whether this task was cancelled when it was too late to stop."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _StagingError(AiofluxError):
    """A state could not be copied."""


class _OutcomeError(CheckpointError):
    """What tells `undo` what to do."""


class _FailedElsewhereError(_OutcomeError):
    """The coordinator told that a save failed."""


class _UnknownOutcomeError(_OutcomeError):
    """Nobody told whether a step was committed."""


async def _polls(seconds: float) -> Any:
    """Yield the seconds that are left, at growing distances; the last time none are."""
    end = time.monotonic() + seconds
    pause = _FIRST_POLL_SECONDS
    while (left := end - time.monotonic()) > 0:
        yield left
        await asyncio.sleep(min(pause, max(left, 0)))
        pause = min(2 * pause, _LAST_POLL_SECONDS)
    yield 0.0


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await what must not stop half-way: a cancellation from here on comes too late."""
    task = asyncio.ensure_future(work)
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            if task.done():
                return task.result()


def _ranks(ranks: set[int]) -> str:
    first = ", ".join(map(str, sorted(ranks)[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {first}{', ...' if len(ranks) > 8 else ''}"


def _metadata(
    whole: Whole, told: Sequence[tuple[StoredObject, ...]], compression: Compression | None
) -> bytes:
    """Return the pickle of DCP's metadata, with where everything is stored.

    Raises:
        CheckpointError: A rank uploaded other things than it was to.
    """
    places: list[tuple[bytes, ItemLocation]] = []
    for rank, (order, objects) in enumerate(zip(whole.orders, told, strict=True)):
        items = [(stored.key, item) for stored in objects for item in stored.items]
        if len(items) != len(order):
            raise CheckpointError(
                f"rank {rank} uploaded {len(items)} items where its plan has {len(order)}"
            )
        for index, (key, item) in zip(order, items, strict=True):
            done = (compression.descriptor,) if compression and item.frame_size else ()
            places.append((index, ItemLocation(key, item.offset, item.length, done)))
    return add_storage_data(whole.metadata, places)


def _generations(found: Sequence[CommitObject]) -> set[tuple[str, str]]:
    return {(each.meta.key, each.meta.generation) for each in found}

"""Manifests and heartbeats: objects in the bucket by which the ranks of one save agree.

    <save id>/rank-00001.json   the objects that rank 1 uploaded, or its error
    <save id>/rank-00000.json   the error of the save; the coordinator writes no other manifest
    <save id>/rank-00001.beat   rewritten every `heartbeat_seconds`; the first heartbeat is written
                                after one interval, so that a short save writes none

No collectives are used, because uploads run during training, and possibly in the uploader process.

The ranks of a long save show by heartbeats that they are alive. Observers are the other ranks; they
poll the listing of manifests, which includes heartbeats. A rank is silent if an observer, by its
own monotonic clock, has seen no new generation for 2.5 intervals. Clocks of different machines are
never compared. With an interval of 10 s, and less than 120 ranks (see `plan_settings`):

    an observer that waits for manifests polls at least every 1 s, and notices a death within 26 s
    the coordinator polls every 5 s during its upload, and notices a death within 30 s
    another rank polls every 10 s during its upload, and notices a death within 40 s

A heartbeat that fails is retried after 0.3 intervals: the 25 s allow a failed heartbeat and four
retries. Of a time in which an observer could not poll, only one interval counts, so that an outage
of the service or a suspended observer does not make a rank silent. The heartbeats begin when the
ranks have agreed on the save, so that slow staging or a queue of earlier saves does not make a rank
silent either.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from aioflux.checkpoint._save.job import DELETES_PER_SECOND, Manifest, first_heartbeat_delay
from aioflux.checkpoint._store.steps import (
    UnknownOutcomeError,
    commit_of,
    read_commit,
    uri_below,
)
from aioflux.errors import (
    AiofluxError,
    CheckpointError,
    CheckpointNotFoundError,
    NotFoundError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import StoredObject
    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.store import Store

_log = logging.getLogger("aioflux")

_SILENT_INTERVALS: Final = 2.5
"""Intervals without a new heartbeat after which a rank is silent."""
_RETRY_INTERVALS: Final = 0.3
"""Intervals until a failed heartbeat is retried."""
_DELETE_SECONDS: Final = 5.0
"""Timeout of the delete of heartbeats at the end of a save."""

_FIRST_POLL_SECONDS: Final = 0.05
_MAX_POLL_SECONDS: Final = 1.0
"""Longest time between two polls of the coordinator."""
_POLLS_PER_COMMIT_READ: Final = 8
"""A rank that waits for the outcome reads the commit object after this number of polls."""
_MANY_RANKS: Final = 256
_jitter: Final = random.SystemRandom().random

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)


def heartbeat_key(save_id: str, rank: int, number: int = 0) -> str:
    """Return the key of a heartbeat below the checkpoint's prefix.

    `number` is above 0 if objects cannot be overwritten.
    """
    return f"{save_id}/rank-{rank:05d}{f'.{number}' if number else ''}.beat"


class Heartbeat:
    """Writer of the heartbeats of one rank in one save, on the running event loop.

    If objects cannot be overwritten, because of a retention policy or a role without the permission
    to delete, each heartbeat is written to a new key.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        save_id: str,
        rank: int,
        *,
        every_seconds: float,
        is_late: bool = False,
    ) -> None:
        """Start the heartbeats.

        The first heartbeat is written after `first_heartbeat_delay`. If `is_late`, it is written at
        once: an earlier uploader process of the save died, and its heartbeats have stopped.
        """
        self._store = store
        self._prefix = prefix
        self._save_id = save_id
        self._rank = rank
        self._every_seconds = every_seconds
        self._keys: list[str] = []
        """Keys that this writer may have written."""
        self._number = 0
        self._stopping = asyncio.Event()
        pause = 0.0 if is_late else first_heartbeat_delay(rank, every_seconds)
        self._task = asyncio.get_running_loop().create_task(self._run(pause))

    def cancel(self) -> None:
        """Stop without deleting the heartbeats, which `aioflux clean` deletes."""
        self._task.cancel()

    async def stop(self) -> None:
        """Stop, and delete the heartbeats; errors are logged."""
        self._stopping.set()
        _, running = await asyncio.wait((self._task,), timeout=_DELETE_SECONDS / 5)
        if running:
            self._task.cancel()
            await asyncio.wait(running)
        if not self._keys:
            return
        try:
            async with asyncio.timeout(_DELETE_SECONDS):
                result = await self._store.delete_many(self._keys)
        except (AiofluxError, OSError) as exc:
            _log.warning("heartbeats could not be deleted; `aioflux clean` deletes them: %r", exc)
        else:
            for error in result.errors.values():
                _log.warning(
                    "a heartbeat could not be deleted; `aioflux clean` deletes it: %s", error
                )

    async def _run(self, pause: float) -> None:
        count = 0
        while not await self._is_stopping_after(pause):
            count += 1
            is_written = await self._write(b"%d" % count)
            pause = self._every_seconds * (1.0 if is_written else _RETRY_INTERVALS)

    async def _is_stopping_after(self, seconds: float) -> bool:
        """Wait, and return whether `stop` was called meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _write(self, data: bytes) -> bool:
        """Write one heartbeat, and return whether the write succeeded."""
        key = self._prefix + heartbeat_key(self._save_id, self._rank, self._number)
        if key not in self._keys:
            self._keys.append(key)
        try:
            async with asyncio.timeout(self._every_seconds):
                await self._store.put(key, data)  # new data, so that the ETag changes, too
        except (AiofluxError, OSError) as exc:
            _log.warning("%s%s: a heartbeat could not be written: %r", self._store.uri, key, exc)
            if isinstance(exc, StorageError) and not isinstance(exc, TransientError):
                self._number += 1
            return False
        return True


class HeartbeatMonitor:
    """Detection of silent ranks by one observer, without I/O."""

    def __init__(self, every_seconds: float) -> None:
        self._every_seconds = every_seconds
        self._last_poll = float("-inf")
        self._ranks: dict[int, tuple[object, float]] = {}
        """Value of each watched rank, and the seconds since the value changed."""

    def observe(
        self, generations: Mapping[int, object], awaited: Collection[int], now: float
    ) -> dict[int, float]:
        """Record the result of a poll, and return the silent ranks with the seconds of silence.

        Args:
            generations: A value for each rank that changes with each heartbeat.
            awaited: The ranks to watch.
            now: Time of the poll, by a monotonic clock, in seconds.
        """
        # An observer polls once per interval. A longer time means that it was suspended, or could
        # not poll, and does not count.
        counted = min(now - self._last_poll, self._every_seconds) if self._ranks else 0.0
        self._last_poll = now
        last_ranks, self._ranks = self._ranks, {}
        for rank in awaited:
            current = generations.get(rank)
            last, seconds = last_ranks.get(rank, (current, -counted))
            self._ranks[rank] = (current, seconds + counted if current == last else 0.0)
        return {
            rank: seconds
            for rank, (_, seconds) in sorted(self._ranks.items())
            if seconds >= _SILENT_INTERVALS * self._every_seconds
        }


class FailedElsewhereError(CheckpointError):
    """A save that failed on another rank."""


class Manifests:
    """Access of one rank to the manifests and heartbeats of one save.

    Attributes:
        store: The store of all checkpoints of the run.
        prefix: Prefix of the checkpoint in the store.
        uri: Uri of the checkpoint.
        silent: Ranks whose heartbeats had stopped at the last poll, each with the seconds since
            its last heartbeat.
    """

    def __init__(self, store: Store, settings: UploadSettings, job: Job) -> None:
        self.store = store
        self.settings = settings
        self.job = job
        self.prefix = job.checkpoint_prefix
        self.uri = uri_below(store, self.prefix)
        self.silent: dict[int, float] = {}
        self._received: dict[int, Manifest] = {}
        self._monitor = HeartbeatMonitor(settings.heartbeat_seconds)

    def key(self, rank: int) -> str:
        return f"{self.prefix}{self.job.save_id}/rank-{rank:05d}.json"

    async def write(self, manifest: Manifest) -> None:
        data = _encoder.encode(manifest)
        await self.store.put(self.key(manifest.rank), data, content_type="application/json")

    async def read(self, rank: int) -> Manifest:
        return _decoder.decode(await self.store.get(self.key(rank)))

    async def read_all(self, ranks: Iterable[int]) -> list[Manifest]:
        """Return the manifests of ranks, read in parallel."""
        async with aclosing(self.store.get_many(map(self.key, ranks), ordered=False)) as objects:
            return [_decoder.decode(data) async for _, data in objects]

    async def poll(self, awaited: Collection[int], name: str = "") -> set[int]:
        """Return the ranks that have a manifest; set `silent` for awaited ranks without one."""
        ranks, generations = await self._list(name)
        missing = set(awaited) - ranks
        self.silent = self._monitor.observe(generations, missing, self.settings.clock())
        return ranks

    async def poll_coordinator(self) -> None:
        """Poll rank 0 alone: a listing of all ranks by every rank would be too many requests.

        Raises:
            FailedElsewhereError: The coordinator reported that the save failed.
            UnknownOutcomeError: The coordinator reported that the outcome is unknown.
        """
        if 0 in await self.poll({0}, "00000."):
            raise failure_of(await self.read(0))

    async def poll_coordinator_alive(self) -> None:
        """Poll rank 0; raise a FailedElsewhereError if its heartbeats have stopped, too."""
        await self.poll_coordinator()
        if self.silent:
            raise FailedElsewhereError(f"{self.uri} was not saved: {self.describe_silent()}")

    async def poll_ranks(self) -> None:
        """Read the manifests of the other ranks that were written since the last poll.

        Raises:
            CheckpointError: A rank reported a failure, or stopped its heartbeats.
        """
        missing = self._missing()
        for manifest in await self.read_all(await self.poll(missing) & missing):
            if manifest.error:
                raise CheckpointError(
                    f"{self.uri} was not saved: rank {manifest.rank}: {manifest.error}"
                )
            self._received[manifest.rank] = manifest
        if self.silent:
            raise CheckpointError(
                f"{self.uri} was not saved: {self.describe_silent()}; an earlier save of this "
                "step is unchanged"
            )

    def _missing(self) -> set[int]:
        return set(range(1, self.job.world_size)) - self._received.keys()

    async def collect(self) -> list[tuple[StoredObject, ...]]:
        """Wait for the manifests of the other ranks, and return the objects of each rank.

        Raises:
            CheckpointError: A rank failed, stopped its heartbeats, or wrote no manifest in time.
        """
        async for seconds_left in self.polls(self.settings.commit_seconds):
            failure: TransientError | None = None
            try:
                await self.poll_ranks()
            except TransientError as exc:  # ignored: the next poll may succeed
                failure = exc
            missing = self._missing()
            if not missing:
                break
            if seconds_left <= 0:
                raise self._late_error(missing, failure) from failure
        return [self._received[rank].objects for rank in sorted(self._received)]

    def _late_error(self, missing: set[int], failure: TransientError | None) -> CheckpointError:
        poll = f" (the last poll failed: {failure})" if failure is not None else ""
        numbers = ", ".join(map(str, sorted(missing)[:8])) + ", ..." * (len(missing) > 8)
        ranks = f"rank{'s' if len(missing) > 1 else ''} {numbers} of {self.job.world_size}"
        return CheckpointError(
            f"{self.uri} was not saved: {ranks} wrote no manifest, such as "
            f"{self.key(min(missing))}, within {self.settings.commit_seconds:g} s after the "
            f"upload of the coordinator; an earlier save of this step is unchanged{poll}"
        )

    async def await_outcome(self, *, is_written: bool) -> None:
        """Wait until the coordinator has committed, or reported a failure.

        `is_written` is whether the manifest of this rank is known to be written. An error of a poll
        is ignored, because the next poll may succeed.

        Raises:
            FailedElsewhereError: The coordinator reported a failure.
            UnknownOutcomeError: The coordinator stopped its heartbeats, did not commit in time, or
                reported that the outcome is unknown.
        """
        failure: AiofluxError | None = None
        num_polls = 0
        async for seconds_left in self.polls(self.settings.commit_seconds):
            is_last = seconds_left <= 0
            num_polls += 1
            try:
                await self.poll_coordinator()
                is_last = is_last or bool(self.silent)
                exists = await self._is_written()
                # The coordinator deletes the manifests after the commit.
                if is_written and not exists:
                    await self._confirm_commit()
                    return
                is_written = is_written or exists
                # A coordinator without the permission to delete objects does not delete manifests.
                is_read = is_last or not is_written or num_polls % _POLLS_PER_COMMIT_READ == 0
                if is_read and await commit_of(self.store, self.prefix, self.job.save_id):
                    return
            except (FailedElsewhereError, UnknownOutcomeError):
                raise
            except AiofluxError as exc:
                failure = exc
            if is_last:
                raise self._no_outcome_error(failure) from failure

    def _no_outcome_error(self, failure: AiofluxError | None) -> UnknownOutcomeError:
        seconds = self.settings.commit_seconds
        poll = f" (the last poll failed: {failure})" if failure is not None else ""
        reason = f": {self.describe_silent()}" if self.silent else f" within {seconds:g} s"
        return UnknownOutcomeError(
            f"{self.uri}: rank {self.job.rank} has uploaded its part, but the coordinator (rank "
            f"0) did not report the outcome{reason}; load the latest step to see whether the step "
            f"was committed{poll}"
        )

    async def _confirm_commit(self) -> None:
        """Raise an error if the manifest was deleted without a commit."""
        try:
            current = await read_commit(self.store, self.prefix)
        except CheckpointNotFoundError:
            return  # retention has removed the step
        if current.commit is None or current.commit.save_id < self.job.save_id:
            raise UnknownOutcomeError(
                f"{self.uri}: the manifest of rank {self.job.rank} was deleted, but the step was "
                "not committed; look for another program that deletes objects there"
            )

    async def _is_written(self) -> bool:
        """Return whether the manifest of this rank exists."""
        try:
            await self.store.head(self.key(self.job.rank))
        except NotFoundError:
            return False
        return True

    async def _list(self, name: str = "") -> tuple[set[int], Mapping[int, object]]:
        """Return the ranks that have a manifest, and keys and generations of each rank's objects.

        A new heartbeat changes the generations of its rank. Names begin with `rank-` and `name`.
        """
        start = f"{self.prefix}{self.job.save_id}/rank-"
        ranks: set[int] = set()
        generations: dict[int, set[tuple[str, str]]] = {}
        for meta in await self.store.list_all(start + name):
            rank = int(meta.key.removeprefix(start).partition(".")[0])
            generation = meta.generation or str(meta.updated)
            generations.setdefault(rank, set()).add((meta.key, generation))
            if meta.key.endswith(".json"):
                ranks.add(rank)
        return ranks, generations

    def describe_silent(self) -> str:
        """Return the silent ranks and the time since their last heartbeat, for an error."""
        ranks = ", ".join(f"rank {rank} for {self.silent[rank]:.0f} s" for rank in self.silent)
        return (
            f"no heartbeat of {ranks} (of {self.job.world_size} ranks); the process that uploads "
            "there was killed, cannot reach the bucket, or is suspended, for example by a debugger"
        )

    async def polls(self, seconds: float) -> AsyncIterator[float]:
        """Yield the remaining seconds at each time to poll, at growing intervals; 0 at the end."""
        clock = self.settings.clock
        end = clock() + seconds
        longest = self.settings.max_poll_seconds
        if self.job.rank == 0:
            longest = min(longest, _MAX_POLL_SECONDS)
        pause = max(_FIRST_POLL_SECONDS, longest / 16)
        while (remaining := end - clock()) > 0:
            yield remaining
            await asyncio.sleep(min(pause * (1 - _jitter() / 2), remaining))
            pause = min(2 * pause, longest)
        yield 0.0

    async def delete_after_failure(self) -> None:
        """Delete the manifests of a failed save, once the manifest of every rank has an error.

        Until then an uploader process that replaces a dead one may need to read the manifests. The
        coordinator waits for half of `cleanup_seconds`. If a rank reports its error later than
        `cleanup_seconds` after the coordinator, and as the last one, it deletes all manifests.
        """
        rank, cleanup_seconds = self.job.rank, self.settings.cleanup_seconds
        all_ranks = set(range(self.job.world_size))
        keys = [self.key(each) for each in all_ranks]
        failed: set[int] = set()
        if rank != 0 and (len(keys) > _MANY_RANKS or not await self._is_late(keys)):
            return  # every late rank would list all manifests; `aioflux clean` deletes them
        async for seconds_left in self.polls(cleanup_seconds / 2 if rank == 0 else 0.0):
            reporting = (await self._list())[0]
            if rank != 0 and reporting != all_ranks:
                return  # a later rank deletes the manifests, or `aioflux clean`
            try:
                manifests = await self.read_all(reporting - failed)
            except NotFoundError:
                return  # another rank deletes the manifests
            failed.update(manifest.rank for manifest in manifests if manifest.error)
            if self.silent:
                return  # a silent rank may be suspended, not dead, and need the manifests later
            if failed == all_ranks:
                await self.delete(keys)
                return
            if seconds_left <= 0:
                return

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete manifests, at most `DELETES_PER_SECOND`."""
        for start in range(0, len(keys), DELETES_PER_SECOND):
            page = keys[start : start + DELETES_PER_SECOND]
            pause = 1.0 if len(keys) > start + DELETES_PER_SECOND else 0.0
            await asyncio.gather(self.store.delete_many(page), asyncio.sleep(pause))

    async def _is_late(self, keys: Sequence[str]) -> bool:
        """Return whether this rank wrote its manifest long after the coordinator.

        After `cleanup_seconds` the coordinator certainly no longer waits.
        """
        try:
            coordinator_meta = await self.store.head(keys[0])
            own_meta = await self.store.head(keys[self.job.rank])
        except NotFoundError:
            return False  # another rank deletes the manifests
        if coordinator_meta.updated is None or own_meta.updated is None:
            return False
        delay = (own_meta.updated - coordinator_meta.updated).total_seconds()
        return delay > self.settings.cleanup_seconds


def failure_of(manifest: Manifest) -> CheckpointError:
    """Return the error that a manifest reports."""
    if manifest.is_unknown:
        return UnknownOutcomeError(manifest.error)
    return FailedElsewhereError(manifest.error)

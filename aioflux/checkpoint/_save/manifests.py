"""Manifests: objects in the bucket by which the ranks of one save agree on its outcome.

    <save id>/rank-00001.json     the objects that rank 1 uploaded, or its error
    <save id>/rank-00000.json     the error of the save; the coordinator writes no other manifest

No collectives are used, because uploads run during training, and possibly in the uploader process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec

from aioflux.checkpoint._save.heartbeat import HeartbeatMonitor
from aioflux.checkpoint._save.job import Manifest
from aioflux.checkpoint._save.request_rates import DELETES_PER_SECOND
from aioflux.checkpoint._store.steps import read_commit, uri_below
from aioflux.errors import CheckpointError, NotFoundError

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.store import Store

_FIRST_POLL_SECONDS: Final = 0.05
_MAX_POLL_SECONDS: Final = 1.0
"""Longest time between two polls of the coordinator."""
_MANY_RANKS: Final = 256
_jitter: Final = random.SystemRandom().random

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)


class OutcomeError(CheckpointError):
    """A save that failed on another rank, or whose outcome is unknown."""


class FailedElsewhereError(OutcomeError):
    """A save that failed on another rank."""


class UnknownOutcomeError(OutcomeError):
    """A save that may be committed, so that its objects must not be deleted."""


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
            OutcomeError: The coordinator reported that the save failed.
        """
        if 0 in await self.poll({0}, "00000."):
            raise failure_of(await self.read(0))

    async def is_written(self) -> bool:
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

    async def own_commit(self) -> Commit | None:
        """Return the commit of this save, or None if it has not committed the step.

        The commit of another save does not count, even if its save id is later: save ids contain
        the time of a clock that may be wrong.
        """
        try:
            current = await read_commit(self.store, self.prefix)
        except CheckpointError:
            return None
        is_own = current.commit is not None and current.commit.save_id == self.job.save_id
        return current.commit if is_own else None

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


def failure_of(manifest: Manifest) -> OutcomeError:
    """Return the error that a manifest reports."""
    if manifest.is_unknown:
        return UnknownOutcomeError(manifest.error)
    return FailedElsewhereError(manifest.error)

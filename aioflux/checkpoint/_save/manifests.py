"""Manifests: how the ranks of one save agree on its outcome, through the bucket.

    <save id>/rank-00001.json     the objects that a rank uploaded, or why it failed
    <save id>/rank-00000.json     only if the save failed: why, by the coordinator

There is no collective: uploads run during training, and in a process that outlives the trainer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from aioflux.checkpoint._save.heartbeat import HeartbeatMonitor
from aioflux.checkpoint._save.job import Manifest
from aioflux.checkpoint._store.commits import read_commit, uri_below
from aioflux.errors import CheckpointError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Hashable, Sequence

    from aioflux.checkpoint._save.job import Job, UploadSettings
    from aioflux.store import Store

__all__ = ["FailedElsewhereError", "Manifests", "OutcomeError", "UnknownOutcomeError", "failure_of"]

_FIRST_POLL_SECONDS = 0.05

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)


class OutcomeError(CheckpointError):
    """The outcome of a save, as another rank reported it or as far as it is known."""


class FailedElsewhereError(OutcomeError):
    """The coordinator reported that the save failed."""


class UnknownOutcomeError(OutcomeError):
    """The step may have been committed: nothing that the save wrote may be removed."""


class Manifests:
    """The manifests and heartbeats of one save, as one rank sees them.

    Attributes:
        store: The root of the checkpoints.
        prefix: Prefix of the checkpoint.
        uri: Uri of the checkpoint.
        gone: Ranks without a sign of life at the last poll, with the seconds of their silence.
    """

    def __init__(self, store: Store, settings: UploadSettings, job: Job) -> None:
        self.store = store
        self.settings = settings
        self.job = job
        self.prefix = job.checkpoint_prefix
        self.uri = uri_below(store, self.prefix)
        self.gone: dict[int, float] = {}
        self._monitor = HeartbeatMonitor(settings.heartbeat_seconds)

    def key(self, rank: int) -> str:
        """Return the key of a rank's manifest."""
        return f"{self.prefix}{self.job.save_id}/rank-{rank:05d}.json"

    async def write(self, manifest: Manifest) -> None:
        """Write the manifest of a rank."""
        data = _encoder.encode(manifest)
        await self.store.put(self.key(manifest.rank), data, content_type="application/json")

    async def read(self, rank: int) -> Manifest:
        """Read the manifest of a rank."""
        return _decoder.decode(await self.store.get(self.key(rank)))

    async def poll(self, awaited: Collection[int]) -> set[int]:
        """Return the ranks that have a manifest, and set `gone` of those that are awaited."""
        ranks, signs = await self._list()
        missing = set(awaited) - ranks
        self.gone = self._monitor.observe(signs, missing, self.settings.clock())
        return ranks

    async def poll_coordinator(self) -> set[int]:
        """Return the ranks that have a manifest.

        Raises:
            OutcomeError: The coordinator reported that the save failed.
        """
        ranks = await self.poll({0})
        if 0 in ranks:
            raise failure_of(await self.read(0))
        return ranks

    async def _list(self) -> tuple[set[int], dict[int, Hashable]]:
        """Return the ranks that have a manifest, and the generations of all that each wrote."""
        start = f"{self.prefix}{self.job.save_id}/rank-"
        ranks: set[int] = set()
        signs: dict[int, set[tuple[str, str]]] = {}
        for meta in await self.store.list_all(start):
            rank = int(meta.key.removeprefix(start).partition(".")[0])
            signs.setdefault(rank, set()).add((meta.key, meta.generation or str(meta.updated)))
            if meta.key.endswith(".json"):
                ranks.add(rank)
        return ranks, {rank: frozenset(each) for rank, each in signs.items()}

    def describe_gone(self) -> str:
        """Return which ranks are gone, and since when, for an error."""
        ranks = ", ".join(f"rank {rank} for {self.gone[rank]:.0f} s" for rank in self.gone)
        return (
            f"there is no sign of life of {ranks} (of {self.job.world_size} ranks); what uploads "
            "there was killed, cannot reach the bucket, or is paused, as in a debugger"
        )

    async def is_committed(self) -> bool:
        """Return whether the step is committed by this save.

        No other save will do: by its name it may be later only because a clock was wrong.
        """
        try:
            found = await read_commit(self.store, self.prefix)
        except CheckpointError:
            return False
        return found.commit is not None and found.commit.save_id == self.job.save_id

    async def polls(self, seconds: float) -> AsyncIterator[float]:
        """Yield the seconds that are left, at growing intervals; 0 at last."""
        clock = self.settings.clock
        end = clock() + seconds
        pause = _FIRST_POLL_SECONDS
        while (left := end - clock()) > 0:
            yield left
            await asyncio.sleep(min(pause, max(left, 0)))
            pause = min(2 * pause, self.settings.max_poll_seconds)
        yield 0.0

    async def delete_after_failure(self) -> None:
        """Delete the manifests of a save that failed, once all ranks have reported it.

        The coordinator waits a while for that: until then an uploader that takes over from one
        that died can read its manifest. After that the last rank to report deletes them all.
        """
        rank, cleanup_seconds = self.job.rank, self.settings.cleanup_seconds
        everyone = set(range(self.job.world_size))
        keys = [self.key(each) for each in everyone]
        failed: set[int] = set()
        async for seconds_left in self.polls(cleanup_seconds / 2 if rank == 0 else 0.0):
            for each in (await self._list())[0] - failed:
                try:
                    manifest = await self.read(each)
                except NotFoundError:
                    return  # another rank deletes them
                if manifest.error:
                    failed.add(each)
            if self.gone:
                return  # these may only have been suspended, and have to read them
            if failed == everyone:
                if rank == 0 or await self._is_late(keys):
                    await self.store.delete_many(keys)
                return
            if seconds_left <= 0:
                return

    async def _is_late(self, keys: Sequence[str]) -> bool:
        """Return whether this rank reported when the coordinator had stopped waiting."""
        try:
            first = await self.store.head(keys[0])
            mine = await self.store.head(keys[self.job.rank])
        except NotFoundError:
            return False  # another rank deletes them
        if first.updated is None or mine.updated is None:
            return False
        delay = (mine.updated - first.updated).total_seconds()
        return delay > self.settings.cleanup_seconds


def failure_of(manifest: Manifest) -> OutcomeError:
    """Return the failure that a manifest reports."""
    if manifest.is_unknown:
        return UnknownOutcomeError(manifest.error)
    return FailedElsewhereError(manifest.error)

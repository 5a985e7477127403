"""Coordinator: the rank that collects the manifests of all others, and commits."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aioflux.checkpoint._format.commit import COMMIT_KEY, Commit, encode_commit
from aioflux.checkpoint._format.dcp_metadata import ItemLocation, add_storage_data
from aioflux.checkpoint._maintain import history
from aioflux.checkpoint._maintain.history import SaveRecord
from aioflux.checkpoint._maintain.retention import prune
from aioflux.checkpoint._save.manifests import UnknownOutcomeError
from aioflux.checkpoint._store.commit import commit as commit_object
from aioflux.checkpoint._store.commit import delete_replaced
from aioflux.checkpoint._store.commits import read_commits
from aioflux.errors import AiofluxError, CheckpointError, TransientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.checkpoint._format.commit import StoredObject
    from aioflux.checkpoint._maintain.history import Outcome
    from aioflux.checkpoint._save.job import Compression, GlobalSavePlan, Manifest
    from aioflux.checkpoint._save.manifests import Manifests
    from aioflux.checkpoint._store.commits import CommitObject

__all__ = ["Coordinator", "encode_metadata"]

_log = logging.getLogger("aioflux")


class Coordinator:
    """The coordinator's part of one save, in addition to its own upload."""

    def __init__(self, manifests: Manifests) -> None:
        self._manifests = manifests
        self._store = manifests.store
        self._job = manifests.job
        self._settings = manifests.settings
        self._num_retries = self._store.stats.num_retries
        self._received: dict[int, Manifest] = {}

    async def read_replaced(self) -> list[CommitObject]:
        """Return the commit objects that this save replaces.

        Raises:
            UnsupportedError: The server ignores the condition of the commit.
        """
        await self._store.check_conditions()
        return await read_commits(self._store, self._manifests.prefix)

    async def poll_ranks(self) -> None:
        """Read the manifests that were written since the last poll.

        Raises:
            CheckpointError: A rank reported a failure, or is gone.
        """
        manifests = self._manifests
        missing = self._missing()
        for rank in await manifests.poll(missing) & missing:
            manifest = await manifests.read(rank)
            if manifest.error:
                raise CheckpointError(
                    f"{manifests.uri} was not saved: rank {rank}: {manifest.error}"
                )
            self._received[rank] = manifest
        if manifests.gone:
            raise CheckpointError(
                f"{manifests.uri} was not saved: {manifests.describe_gone()}; the step that was "
                "saved before is still there"
            )

    def _missing(self) -> set[int]:
        return set(range(1, self._job.world_size)) - self._received.keys()

    async def collect(self) -> list[tuple[StoredObject, ...]]:
        """Wait for the manifests of the other ranks, and return what each uploaded.

        Raises:
            CheckpointError: A rank failed, is gone, or wrote no manifest in time.
        """
        async for seconds_left in self._manifests.polls(self._settings.commit_seconds):
            failure: TransientError | None = None
            try:
                await self.poll_ranks()
            except TransientError as exc:  # decides nothing: the next poll may succeed
                failure = exc
            missing = self._missing()
            if not missing:
                break
            if seconds_left <= 0:
                raise self._late_error(missing, failure) from failure
        return [self._received[rank].objects for rank in sorted(self._received)]

    def _late_error(self, missing: set[int], failure: TransientError | None) -> CheckpointError:
        manifests = self._manifests
        why = f" (the last poll failed: {failure})" if failure is not None else ""
        first = ", ".join(map(str, sorted(missing)[:8]))
        ranks = f"rank{'s' if len(missing) > 1 else ''} {first}{', ...' * (len(missing) > 8)}"
        return CheckpointError(
            f"{manifests.uri} was not saved: {ranks} of {self._job.world_size} did not upload "
            f"within {self._settings.commit_seconds:g} s after the coordinator, for example "
            f"{manifests.key(min(missing))}; the step that was saved before is still there{why}"
        )

    async def commit(
        self, objects: Sequence[StoredObject], metadata: bytes, replaces: Sequence[CommitObject]
    ) -> int:
        """Commit the objects of all ranks with DCP's pickled metadata, and return their bytes."""
        job = self._job
        assert job.global_plan is not None
        new = Commit(
            save_id=job.save_id,
            uri=self._manifests.uri,
            created=time.time(),
            world_size=job.world_size,
            step=job.step,
            objects=tuple(objects),
            metrics=dict(job.metrics),
            extra=dict(job.global_plan.extra),
        )
        data = encode_commit(metadata, new)
        key = self._manifests.prefix + COMMIT_KEY
        while True:
            try:
                await commit_object(self._store, key, data, new, replaces=replaces)
            except (AiofluxError, OSError) as exc:
                found = await self._read_conflicting(exc, replaces)
                if any(each.commit and each.commit.save_id == new.save_id for each in found):
                    await delete_replaced(self._store, key, new, replaces)
                    break
                replaces = found
            else:
                break
        await self._after_commit()
        return new.num_bytes

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
            found = await read_commits(self._store, self._manifests.prefix)
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
            raise UnknownOutcomeError(
                f"{self._manifests.uri}: the commit was sent and not answered; whether it is "
                f"there, the next load shows ({error})"
            ) from error
        raise error

    async def _after_commit(self) -> None:
        """Delete manifests and steps beyond retention; log errors, since the step is committed."""
        job, manifests = self._job, self._manifests
        keys = [manifests.key(rank) for rank in range(1, job.world_size)]
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
                "%s is saved, and what it made useless could not be removed: %s",
                manifests.uri,
                exc,
            )

    async def record(self, outcome: Outcome, *, num_bytes: int, error: str) -> None:
        """Add the save to the history; log an error."""
        job = self._job
        record = SaveRecord(
            record_id=job.save_id,
            time=datetime.now(UTC),
            step=job.step,
            outcome=outcome,
            num_bytes=num_bytes,
            staged_seconds=job.staged_seconds,
            upload_seconds=max(0.0, time.time() - job.started - job.staged_seconds),
            num_retries=self._store.stats.num_retries - self._num_retries,
            world_size=job.world_size,
            error=error,
        )
        try:
            await history.append(self._store, record)
        except AiofluxError as exc:
            _log.warning("the history of %s misses step %d: %s", self._store.uri, job.step, exc)


def _generations(found: Sequence[CommitObject]) -> set[tuple[str, str]]:
    return {(each.meta.key, each.meta.generation) for each in found}


def encode_metadata(
    plan: GlobalSavePlan,
    uploaded: Sequence[tuple[StoredObject, ...]],
    compression: Compression | None,
) -> bytes:
    """Return the pickle of DCP's metadata with the location of each item.

    Raises:
        CheckpointError: A rank uploaded other items than planned.
    """
    locations: list[tuple[bytes, ItemLocation]] = []
    for rank, (order, objects) in enumerate(zip(plan.orders, uploaded, strict=True)):
        items = [(stored.key, item) for stored in objects for item in stored.items]
        if len(items) != len(order):
            raise CheckpointError(
                f"rank {rank} uploaded {len(items)} items where its plan has {len(order)}"
            )
        for index, (key, item) in zip(order, items, strict=True):
            transforms = (compression.descriptor,) if compression and item.frame_size else ()
            locations.append((index, ItemLocation(key, item.offset, item.length, transforms)))
    return add_storage_data(plan.metadata, locations)

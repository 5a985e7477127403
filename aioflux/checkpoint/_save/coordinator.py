"""Coordinator: the collection of the other ranks' manifests and the commit, on rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from aioflux.checkpoint._format.commit import COMMIT_KEY, Commit, encode_commit
from aioflux.checkpoint._format.dcp_metadata import ItemLocation, add_storage_data
from aioflux.checkpoint._save.manifests import UnknownOutcomeError
from aioflux.checkpoint._store.history import SaveRecord
from aioflux.checkpoint._store.retention import prune
from aioflux.checkpoint._store.steps import finish_commit, read_commits, write_commit
from aioflux.errors import AiofluxError, CheckpointError, TransientError

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import StoredObject
    from aioflux.checkpoint._save.job import Compression, GlobalSavePlan, Manifest
    from aioflux.checkpoint._save.manifests import Manifests
    from aioflux.checkpoint._store.history import Outcome
    from aioflux.checkpoint._store.steps import CommitObject

_log = logging.getLogger("aioflux")


class Coordinator:
    """The tasks of the coordinator in a save, except the upload of its own objects."""

    def __init__(self, manifests: Manifests) -> None:
        self._manifests = manifests
        self._store = manifests.store
        self._job = manifests.job
        self._settings = manifests.settings
        self._num_retries = self._store.stats.num_retries
        self._received: dict[int, Manifest] = {}

    async def poll_ranks(self) -> None:
        """Read the manifests that were written since the last poll.

        Raises:
            CheckpointError: A rank reported a failure, or stopped its heartbeats.
        """
        manifests = self._manifests
        missing = self._missing()
        for manifest in await manifests.read_all(await manifests.poll(missing) & missing):
            if manifest.error:
                raise CheckpointError(
                    f"{manifests.uri} was not saved: rank {manifest.rank}: {manifest.error}"
                )
            self._received[manifest.rank] = manifest
        if manifests.silent:
            raise CheckpointError(
                f"{manifests.uri} was not saved: {manifests.describe_silent()}; an earlier save "
                "of this step is unchanged"
            )

    def _missing(self) -> set[int]:
        return set(range(1, self._job.world_size)) - self._received.keys()

    async def collect(self) -> list[tuple[StoredObject, ...]]:
        """Wait for the manifests of the other ranks, and return the objects of each rank.

        Raises:
            CheckpointError: A rank failed, stopped its heartbeats, or wrote no manifest in time.
        """
        async for seconds_left in self._manifests.polls(self._settings.commit_seconds):
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
        manifests = self._manifests
        poll = f" (the last poll failed: {failure})" if failure is not None else ""
        numbers = ", ".join(map(str, sorted(missing)[:8])) + ", ..." * (len(missing) > 8)
        ranks = f"rank{'s' if len(missing) > 1 else ''} {numbers} of {self._job.world_size}"
        return CheckpointError(
            f"{manifests.uri} was not saved: {ranks} wrote no manifest, such as "
            f"{manifests.key(min(missing))}, within {self._settings.commit_seconds:g} s after the "
            f"upload of the coordinator; an earlier save of this step is unchanged{poll}"
        )

    async def commit(
        self, objects: Sequence[StoredObject], metadata: bytes, replaces: Sequence[CommitObject]
    ) -> int:
        """Commit the objects of all ranks with DCP's pickled metadata; return their total size."""
        job = self._job
        assert job.global_plan is not None
        facts = {**msgspec.structs.asdict(job.facts), "uri": self._manifests.uri}
        new = Commit(
            **facts | {"created": time.time()},
            objects=tuple(objects),
            extra=dict(job.global_plan.extra),
        )
        data = encode_commit(metadata, new)
        key = self._manifests.prefix + COMMIT_KEY
        started = time.monotonic()
        while True:
            try:
                await write_commit(self._store, key, data, new, replaces=replaces)
            except (AiofluxError, OSError) as exc:
                current = await self._read_conflicting(exc, replaces)
                if any(old.commit and old.commit.save_id == new.save_id for old in current):
                    seconds = time.monotonic() - started
                    await finish_commit(self._store, key, new, replaces=replaces, seconds=seconds)
                    break
                replaces = current
            else:
                break
        await self._after_commit()
        return new.num_bytes

    async def _read_conflicting(
        self, error: Exception, replaces: Sequence[CommitObject]
    ) -> list[CommitObject]:
        """Read the commit objects after a failed commit; raise if the save cannot continue.

        The save continues in two cases. If only the response was lost, its commit object exists. If
        the save is urgent, it may replace the commit of an earlier save of the same step, which it
        did not wait for.

        Raises:
            UnknownOutcomeError: The save may be committed.
            Exception: `error`, if the save is not committed.
        """
        is_unknown = isinstance(error, TransientError)
        try:
            current = await read_commits(self._store, self._manifests.prefix)
        except AiofluxError:
            is_unknown = True
        else:
            is_unknown = is_unknown or any(each.problem is not None for each in current)
            own_id = self._job.save_id
            current_ids = [each.commit.save_id if each.commit else "" for each in current]
            has_changed = _generations(current) != _generations(replaces)
            is_earlier = has_changed and all("" < current_id < own_id for current_id in current_ids)
            if own_id in current_ids or (self._job.is_urgent and current and is_earlier):
                return current
        if is_unknown:
            raise UnknownOutcomeError(
                f"{self._manifests.uri}: it is unknown whether the step was committed ({error}); "
                "load the latest step to see"
            ) from error
        raise error

    async def _after_commit(self) -> None:
        """Delete manifests and old steps; only log errors, because the step is committed."""
        job, manifests = self._job, self._manifests
        keys = [manifests.key(rank) for rank in range(1, job.world_size)]
        try:
            await manifests.delete(keys)
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
                "%s is saved, but its manifests or older steps could not be deleted: %s",
                manifests.uri,
                exc,
            )

    def record(self, outcome: Outcome, *, num_bytes: int, error: str) -> SaveRecord:
        """Return the record of the save for the history."""
        job = self._job
        return SaveRecord(
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


def _generations(commits: Sequence[CommitObject]) -> set[tuple[str, str]]:
    return {(commit.meta.key, commit.meta.generation) for commit in commits}


def encode_metadata(
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

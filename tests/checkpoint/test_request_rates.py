"""The requests of a save with many ranks: rates, intervals and sizes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import TransferOptions
from aioflux._services.memory import MemoryService
from aioflux._values.uri import parse_uri
from aioflux.checkpoint._format.commit import SaveFacts, StoredItem, plan_block_size
from aioflux.checkpoint._save.job import (
    DELETES_PER_SECOND,
    GlobalSavePlan,
    Job,
    UploadSettings,
    first_heartbeat_delay,
    plan_blocks_for,
    plan_settings,
    plan_transfer,
    start_delay,
)
from aioflux.checkpoint._save.manifests import Manifests
from aioflux.checkpoint._save.save import Save
from aioflux.options import RetryPolicy, Timeouts
from aioflux.store import Store
from aioflux.testing.faults import FlakyService

if TYPE_CHECKING:
    from aioflux._services.base import Service

SAVE_ID = "20261123T120000.000Z-0a1b2c3d"
RANKS = st.integers(1, 20_000)


@given(RANKS, st.booleans())
def test_uploads_and_manifests_stay_below_the_writes_of_a_new_bucket(
    world_size: int, is_multipart: bool
) -> None:
    """1,000 a second, with the heartbeats. Each start is the write of an object and a manifest, and
    of a multipart upload that begins and ends."""
    ranks = range(world_size)
    starts = [start_delay(rank, world_size, is_multipart=is_multipart) for rank in ranks]
    settings = plan_settings(UploadSettings(heartbeat_seconds=10), world_size)
    heartbeats = world_size / settings.heartbeat_seconds
    most = max(sum(now <= start < now + 1 for start in starts) for now in {int(s) for s in starts})
    num_writes = 3 if is_multipart else 2
    assert num_writes * most + heartbeats <= 1000


@given(RANKS)
def test_heartbeats_are_spread_over_their_interval(world_size: int) -> None:
    every = plan_settings(UploadSettings(heartbeat_seconds=10), world_size).heartbeat_seconds
    firsts = [first_heartbeat_delay(rank, every) for rank in range(world_size)]
    assert all(0 <= first <= every for first in firsts)
    assert (
        max(sum(int(first) == second for first in firsts) for second in set(map(int, firsts)))
        <= 151
    )


def test_few_ranks_are_not_slowed_down() -> None:
    settings = UploadSettings(heartbeat_seconds=10)
    for world_size in (1, 8, 64, 120):
        assert start_delay(world_size - 1, world_size, is_multipart=False) == 0
        assert plan_settings(settings, world_size) == settings
    assert plan_transfer(1) == plan_transfer(42) == TransferOptions()
    assert plan_blocks_for(1 << 30, 1) == 1 << 30


def test_parts_grow_with_the_number_of_ranks() -> None:
    sizes = [plan_transfer(world_size).part_size_bytes for world_size in (42, 256, 1000, 8000)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 16 << 20
    assert sizes[-1] == 2 << 30


@pytest.mark.parametrize("world_size", [8, 1000, 8000])
def test_a_commit_stays_small(world_size: int) -> None:
    """The checksums of the blocks of all ranks, 4 bytes each, for states of 2 GiB a rank."""
    block = plan_block_size(plan_blocks_for(2 << 30, world_size))
    assert (2 << 30) / block * 4 * world_size <= 32 << 20


@given(RANKS, st.integers(1, 1 << 42))
def test_blocks_are_not_larger_than_a_commit_may_have(world_size: int, num_bytes: int) -> None:
    """`decode_commit` rejects larger ones, after the save."""
    assert plan_block_size(plan_blocks_for(num_bytes, world_size)) <= 256 << 20


class Ranks:
    """Ranks that save in one process, and the requests of each."""

    def __init__(self, world_size: int, bucket: str) -> None:
        self.world_size = world_size
        self.services: list[FlakyService] = []
        self._bucket = bucket

    def store(self) -> Store:
        service = FlakyService(MemoryService(self._bucket, "run/"))
        self.services.append(service)

        class Recorded(Store):
            def _open_service(self, config: Any) -> Service:
                return service

        return Recorded(
            parse_uri(f"memory://{self._bucket}/run"),
            transfer=TransferOptions(),
            retry=RetryPolicy(),
            timeouts=Timeouts(),
        )

    def job(self, rank: int) -> Job:
        plan = GlobalSavePlan(b"", ((b"",),) * self.world_size) if rank == 0 else None
        return Job(
            facts=SaveFacts(step=1, save_id=SAVE_ID, world_size=self.world_size),
            rank=rank,
            arena=1,
            arena_bytes=8,
            items=(StoredItem(0, 8),),
            global_plan=plan,
            started=0.0,
            staged_seconds=0.0,
        )

    async def save(self) -> None:
        await asyncio.gather(
            *(
                Save(
                    self.store(),
                    UploadSettings(),
                    self.job(rank),
                    memoryview(bytes(8)),
                    lambda _: None,
                ).run()
                for rank in range(self.world_size)
            )
        )


async def test_a_rank_that_waits_lists_only_what_the_coordinator_wrote() -> None:
    """Otherwise the ranks of a save list the square of their number."""
    ranks = Ranks(3, "waits")
    await ranks.save()
    for service in ranks.services[1:]:
        listed = {key for operation, key in service.calls if operation == "list_page"}
        assert listed == {f"step-00000001/{SAVE_ID}/rank-00000."}


async def test_manifests_are_deleted_a_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pages a second passes, so that the deletes stay below the writes of a bucket."""
    ranks, pauses, deleted = Ranks(2, "pages"), [], []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    store = ranks.store()

    async def delete_many(keys: list[str]) -> None:
        deleted.append(len(keys))

    monkeypatch.setattr(asyncio, "sleep", record)
    monkeypatch.setattr(store, "delete_many", delete_many)
    keys = [str(number) for number in range(2 * DELETES_PER_SECOND + 1)]
    await Manifests(store, UploadSettings(), ranks.job(0)).delete(keys)
    assert deleted == [DELETES_PER_SECOND, DELETES_PER_SECOND, 1]
    assert pauses == [1, 1, 0]

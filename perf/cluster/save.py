"""A checkpoint of many ranks: the commit protocol of every rank, with slow and dead ranks.

Each rank runs `SaveQueue.run`: heartbeats, upload, manifest, outcome; rank 0 coordinates and
commits. One byte represents one MiB of a tensor. Staging and the plan of DCP need torch and send no
requests, so they are left out.
"""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

from aioflux.checkpoint._format.commit import SaveFacts, StoredItem, decode_commit
from aioflux.checkpoint._save.job import (
    GlobalSavePlan,
    Job,
    UploadSettings,
    plan_settings,
    plan_transfer,
)
from aioflux.checkpoint._save.loop_uploader import SaveQueue
from aioflux.checkpoint._store import steps
from aioflux.errors import AiofluxError
from aioflux.options import TransferOptions
from perf.cluster.bucket import GCS, Bucket, Link, Profile
from perf.cluster.clock import run
from perf.cluster.stores import SimulatedStore

if TYPE_CHECKING:
    from aioflux.options import RetryPolicy

__all__ = ["MIB", "Save", "SaveReport", "job_of", "simulate_save"]

MIB: Final = 1024 * 1024
SAVE_ID: Final = "20261123T120000.000Z-0a1b2c3d"


@dataclass(frozen=True, kw_only=True)
class Save:
    """Parameters of one save."""

    num_ranks: int = 8_000
    ranks_per_node: int = 8
    node_bytes_per_second: float = 1.25e9
    """10 Gbit/s."""
    rank_mib: int = 2_048
    """State of one rank, in MiB."""
    max_in_flight: int = 8
    """Requests of one rank in flight: 64 of a node with eight ranks."""
    slow_rank: int | None = None
    slow_factor: float = 4.0
    """Bandwidth of a rank, its share of a node, divided by that of the slow rank."""
    dead_rank: int | None = None
    dead_at_seconds: float = 5.0
    """Time at which the dead rank stops to send requests."""
    heartbeat_seconds: float = 10.0
    part_size_mib: int | None = None
    """Size of a part, in MiB; None for the plan of the Checkpointer."""
    profile: Profile = GCS
    max_seconds: float = 1_500.0
    """End of the simulation."""


@dataclass(kw_only=True)
class SaveReport:
    """Times and errors of one simulated save."""

    save: Save
    bucket: Bucket
    ended: dict[int, float] = field(default_factory=dict)
    """Time at which the save ended on each rank, with or without an error."""
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def committed_at(self) -> float | None:
        """Time at which the commit object was written; None if the save failed."""
        return self.bucket.written_at.get("run/step-00000100/.metadata")

    @property
    def uploaded_at(self) -> list[float]:
        """Times at which the data objects were written, sorted."""
        written = self.bucket.written_at.items()
        return sorted(time for name, time in written if name.endswith(".distcp"))


def job_of(rank: int, num_ranks: int, num_bytes: int) -> Job:
    """Return the job of a rank whose state is one tensor."""
    plan = GlobalSavePlan(metadata=b"", orders=((b"",),) * num_ranks) if rank == 0 else None
    return Job(
        facts=SaveFacts(step=100, save_id=SAVE_ID, world_size=num_ranks),
        rank=rank,
        arena=1,
        arena_bytes=num_bytes,
        items=(StoredItem(0, num_bytes),),
        global_plan=plan,
        started=0.0,
        staged_seconds=0.0,
    )


def _scale(key: str) -> float:
    return MIB if key.endswith(".distcp") else 1.0


def simulate_save(save: Save, retry: RetryPolicy | None = None) -> SaveReport:
    """Run one save of all ranks."""
    bucket = Bucket(profile=save.profile, scale_of=_scale)
    report = SaveReport(save=save, bucket=bucket)
    gc.collect()
    gc.disable()  # 8,000 ranks are some millions of objects, which live until the end
    # Every rank reads the same commit object: it is decoded once, or the ranks of a save would
    # decode the square of their number of entries.
    decode = lru_cache(maxsize=4)(decode_commit)
    try:
        world_size = {"WORLD_SIZE": str(save.num_ranks)}
        with patch.object(steps, "decode_commit", decode), patch.dict(os.environ, world_size):
            run(_save_all(save, bucket, report, retry))
    finally:
        gc.enable()
    return report


async def _save_all(
    save: Save, bucket: Bucket, report: SaveReport, retry: RetryPolicy | None
) -> None:
    loop = asyncio.get_running_loop()
    memory = memoryview(bytes(save.rank_mib))
    transfer = plan_transfer(save.num_ranks)
    if save.part_size_mib is not None:
        size = save.part_size_mib * MIB
        transfer = TransferOptions(part_size_bytes=size, max_buffered_bytes=4 * size)
    transfer = replace(transfer, max_in_flight=save.max_in_flight)
    num_nodes = -(-save.num_ranks // save.ranks_per_node)
    nodes = [Link(save.node_bytes_per_second) for _ in range(num_nodes)]
    # A slow or dead rank has its share of a node to itself.
    share = save.node_bytes_per_second / save.ranks_per_node
    links = {rank: nodes[rank // save.ranks_per_node] for rank in range(save.num_ranks)}
    if save.slow_rank is not None:
        links[save.slow_rank] = Link(share / save.slow_factor)
    if save.dead_rank is not None:
        links[save.dead_rank] = Link(share)
        loop.call_later(save.dead_at_seconds, setattr, links[save.dead_rank], "is_dead", True)
    settings = UploadSettings(heartbeat_seconds=save.heartbeat_seconds, clock=loop.time)
    settings = plan_settings(settings, save.num_ranks)

    async def save_rank(rank: int) -> None:
        store = SimulatedStore(
            bucket, links[rank], "run/", transfer=transfer, retry=retry, bytes_per_byte=MIB
        )
        job = job_of(rank, save.num_ranks, save.rank_mib * MIB)
        try:
            await SaveQueue(store, settings).run(job, memory, lambda _: None)
        except AiofluxError as exc:
            report.errors[rank] = str(exc)
        report.ended[rank] = loop.time()

    tasks = [loop.create_task(save_rank(rank)) for rank in range(save.num_ranks)]
    alive = [task for rank, task in enumerate(tasks) if rank != save.dead_rank]
    await asyncio.wait(alive, timeout=save.max_seconds)
    for task in alive:
        if task.done():
            task.result()

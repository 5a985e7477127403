"""Reads of a dataset by many ranks: the start of an epoch, and the recovery after an outage.

Each rank lists, or receives the listing of rank 0, and reads its share (`shard`) with
`Store.get_many`, while its consumer trains with one object after another. An object is one byte,
which represents `object_bytes`.
"""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal
from unittest.mock import patch

from aioflux._services.base import Page
from aioflux._values.listing import Listing
from aioflux._values.meta import ObjectMeta
from aioflux.data._job_listing import Sharing, fits_store, poll_seconds
from aioflux.data._sharding import Reader, shard
from aioflux.data._shuffle import permutation
from aioflux.errors import TransientError
from aioflux.options import RetryPolicy, TransferOptions
from perf.cluster.bucket import GCS, Bucket, Link, Profile, Stored
from perf.cluster.clock import run
from perf.cluster.stores import ROOT, SimulatedStore, scaled_transfer

if TYPE_CHECKING:
    from aioflux._services.base import ListRequest

__all__ = ["Dataset", "Reads", "ReadsReport", "simulate_reads"]

MIB: Final = 1024 * 1024
_DATA: Final = b"\0"
_CRC32C: Final = 0x527D5351
_PREFIX: Final = "train/"
_DIGITS: Final = 9
_LISTED_BYTES: Final = 22
"""Compressed size of one object in a shared listing: 22 MB for a million objects."""


@dataclass(kw_only=True, eq=False)
class Dataset(Bucket):
    """A bucket with objects `train/000000000`, `train/000000001`, ..., which take no memory."""

    num_objects: int
    pages: dict[ListRequest, Page] = field(default_factory=dict)
    """Pages that were listed before."""

    def meta(self, index: int) -> ObjectMeta:
        """Return the metadata of an object, with its key relative to `train/`."""
        key = f"{index:0{_DIGITS}}"
        uri = f"{ROOT}{_PREFIX}{key}"
        return ObjectMeta(key=key, uri=uri, size=1, generation="1", crc32c=_CRC32C)

    def find(self, name: str) -> Stored | None:
        """See base class."""
        text = name.removeprefix(_PREFIX)
        if text.isdecimal() and int(text) < self.num_objects:
            return Stored(_DATA, self.meta(int(text)))
        return super().find(name)

    def page(self, request: ListRequest, limit: int) -> Page | None:
        """Return a page of the store `train/`."""
        if request not in self.pages:
            start = max(request.start_offset, request.page_token)
            first, end = self._index(start), self.num_objects
            if request.end_offset:
                end = self._index(request.end_offset)
            last = min(end, first + limit)
            listing = Listing(self.meta(index) for index in range(first, last))
            token = f"{last:0{_DIGITS}}" if last < end else ""
            self.pages[request] = Page(listing, [], token)
        return self.pages[request]

    def _index(self, key: str) -> int:
        """Return the index of the first object whose key is not below `key`."""
        low, high = 0, self.num_objects
        while low < high:
            middle = (low + high) // 2
            if f"{middle:0{_DIGITS}}" < key:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Parameters of an epoch."""

    num_ranks: int = 8_000
    ranks_per_node: int = 8
    node_bytes_per_second: float = 1.25e9
    num_objects: int = 1_000_000
    object_bytes: int = 4 * MIB
    seconds_per_object: float = 2.0
    """Time that a rank trains with one object."""
    listing: Literal["once", "every", "known"] = "known"
    """Rank 0 lists, and the others read its listing from an object; every rank lists; or none."""
    max_in_flight: int = 8
    max_requests_per_second: float | None = None
    """Limit of each rank; None for no limit."""
    outage: tuple[float, float] | None = None
    max_attempts: int = 8
    end_seconds: float = 30.0
    """End of the simulation."""
    profile: Profile = GCS

    @property
    def steady_rate(self) -> float:
        """Reads per second of all ranks that train without waiting."""
        return self.num_ranks / self.seconds_per_object


@dataclass(kw_only=True)
class ReadsReport:
    """Times and errors of one simulated epoch."""

    reads: Reads
    bucket: Dataset
    listed_at: dict[int, float] = field(default_factory=dict)
    """Time at which each rank had the listing."""
    first_at: dict[int, float] = field(default_factory=dict)
    """Time at which each rank had its first object."""
    waited: dict[int, float] = field(default_factory=dict)
    """Seconds for which the consumer of each rank waited for objects after the first one."""
    num_read: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    """Ranks whose reads failed after all attempts, with the error."""

    def peak(self, start: int, end: int) -> int:
        """Return the largest number of requests in a second of `[start, end)`."""
        sent = self.bucket.sent["reads"]
        return max((sent[second] for second in range(start, end)), default=0)


def simulate_reads(reads: Reads) -> ReadsReport:
    """Run the ranks until `end_seconds`."""
    bucket = Dataset(
        profile=reads.profile,
        num_objects=reads.num_objects,
        outages=(reads.outage,) if reads.outage else (),
        scale_of=lambda key: MIB if key.startswith("listing") else reads.object_bytes,
    )
    report = ReadsReport(reads=reads, bucket=bucket)
    gc.collect()
    gc.disable()
    try:
        with patch.dict(os.environ, WORLD_SIZE=str(reads.num_ranks)):
            run(_read_all(reads, bucket, report))
    finally:
        gc.enable()
    return report


async def _read_all(reads: Reads, bucket: Dataset, report: ReadsReport) -> None:
    loop = asyncio.get_running_loop()
    nodes = [
        Link(reads.node_bytes_per_second)
        for _ in range(-(-reads.num_ranks // reads.ranks_per_node))
    ]
    options = TransferOptions(max_in_flight=reads.max_in_flight)
    if reads.max_requests_per_second is not None:
        options = replace(options, max_requests_per_second=reads.max_requests_per_second)
    # The byte budget counts objects of one byte.
    transfer = scaled_transfer(options, reads.object_bytes)
    retry = RetryPolicy(max_attempts=reads.max_attempts)
    order = permutation(reads.num_objects, seed=0, epoch=0)
    is_published = asyncio.Event()

    async def obtain_listing(rank: int, store: SimulatedStore) -> None:
        if reads.listing == "every":
            await store.list_all()
        if reads.listing != "once":
            return
        sharing = Sharing(place="memory://bucket", is_same_on_all_ranks=True)
        num_mib = max(1, reads.num_objects * _LISTED_BYTES // MIB)
        by_object = not fits_store(num_mib * MIB, reads.num_ranks, sharing.max_store_bytes)
        link = nodes[rank // reads.ranks_per_node]
        place = SimulatedStore(bucket, link, transfer=scaled_transfer(options, MIB))
        if rank == 0:
            # `open_source` leaves out the limit of the rate for the rank that lists alone.
            await SimulatedStore(bucket, link, _PREFIX).list_all()
            if by_object:
                await place.put("listing", bytes(num_mib))
            is_published.set()
        num_polls = 0
        while not is_published.is_set():
            await asyncio.sleep(poll_seconds(num_polls, reads.num_ranks))
            num_polls += 1
        if rank and by_object:
            await place.get("listing")

    async def train(rank: int) -> None:
        link = nodes[rank // reads.ranks_per_node]
        store = SimulatedStore(bucket, link, _PREFIX, transfer=transfer, retry=retry)
        await obtain_listing(rank, store)
        report.listed_at[rank] = loop.time()
        share = shard(reads.num_objects, Reader(rank, reads.num_ranks), tail="drop")
        metas = map(bucket.meta, order[share].tolist())
        async with aclosing(store.get_many(metas)) as objects:
            asked = loop.time()
            async for _ in objects:
                report.num_read += 1
                now = loop.time()
                if report.first_at.setdefault(rank, now) < now:
                    report.waited[rank] = report.waited.get(rank, 0.0) + now - asked
                await asyncio.sleep(reads.seconds_per_object)
                asked = loop.time()

    async def train_or_fail(rank: int) -> None:
        try:
            await train(rank)
        except TransientError as exc:
            report.failed[rank] = str(exc)

    tasks = [loop.create_task(train_or_fail(rank)) for rank in range(reads.num_ranks)]
    await asyncio.wait(tasks, timeout=reads.end_seconds)
    for task in tasks:
        if task.done():
            task.result()

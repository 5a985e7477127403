"""The datasets with the old names through DataLoader: in the process itself and in workers.

The parent has used the dataset before the workers start, so that a forked one inherits a running
loop, its lock and its sockets.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from google.oauth2.credentials import Credentials
from torch.utils.data import DataLoader, Sampler

import aioflux
from aioflux.compat.dataflux.dataflux_iterable_dataset import DataFluxIterableDataset
from aioflux.compat.dataflux.dataflux_mapstyle_dataset import DataFluxMapStyleDataset
from tests.compat.formats import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.compat.conftest import Bucket

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

KINDS = [DataFluxMapStyleDataset, DataFluxIterableDataset]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["map", "iterable"])


def kind_config(kind: type) -> Any:
    """Return a config by which every object is read by itself."""
    return sys.modules[kind.__module__].Config(disable_compose=True)


@contextmanager
def reading(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """Iterate, and end the workers also where that fails: torch waits 5 s for each otherwise."""
    batches = iter(loader)
    try:
        yield batches
    finally:
        if loader.num_workers:
            batches._shutdown_workers()


@pytest.mark.parametrize("start", [None, "fork"])
@each_kind
def test_workers_read_each_object_once(server: Bucket, kind: type, start: str | None) -> None:
    """With a client, whose endpoint the workers know from nowhere else."""
    texts = [f"data of {key}" for key in server.fill(20)]
    dataset = kind("project", "bucket", data_format_fn=text_of, storage_client=server.client())
    assert next(iter(dataset)) == texts[0]
    loader = DataLoader(
        dataset, batch_size=3, num_workers=2 if start else 0, multiprocessing_context=start
    )
    read = [text for batch in loader for text in batch]
    if kind is DataFluxMapStyleDataset or not start:
        assert read == texts
    assert sorted(read) == texts
    assert next(iter(dataset)) == texts[0]


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (DataFluxMapStyleDataset, "fork"),
        (DataFluxIterableDataset, "forkserver"),
    ],
    ids=["fork", "forkserver"],
)
def test_workers_have_the_credentials_of_the_client(
    guarded: Bucket, kind: type, start: str
) -> None:
    """The old class came up with the default ones, and with another endpoint."""
    texts = [f"data of {key}" for key in guarded.fill(8)]
    client = guarded.client(Credentials("secret"))
    dataset = kind("project", "bucket", data_format_fn=text_of, storage_client=client)
    # One worker: the others would import PyTorch, too.
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=start)
    assert list(loader) == [texts[:4], texts[4:]]


def test_each_worker_reads_one_run(bucket: Bucket) -> None:
    texts = [f"data of {key}" for key in bucket.fill(9)]
    dataset = DataFluxIterableDataset("project", "bucket", data_format_fn=text_of)
    loader = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context="fork")
    assert list(loader) == [texts[:4], texts[4:]]


@each_kind
def test_a_missing_object_fails_its_batch_and_is_named(bucket: Bucket, kind: type) -> None:
    """The old class went on with a batch that was short or empty."""
    bucket.fill(8)
    dataset = kind("project", "bucket", data_format_fn=text_of)
    bucket.put("train/005", b"other")
    loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="fork")
    with (
        reading(loader) as batches,
        pytest.raises(aioflux.NotFoundError, match="gs://bucket/train/005"),
    ):
        list(batches)


class Share(Sampler[int]):
    """What torch's DistributedSampler deals out without padding."""

    def __init__(self, num_objects: int, rank: int, world_size: int) -> None:
        self.indices = range(rank, num_objects, world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def test_ranks_that_list_by_themselves_read_each_object_once(bucket: Bucket) -> None:
    """The old class listed in an order of each process: of 1,000 objects 307 were never read."""
    texts = [f"data of {key}" for key in bucket.fill(50)]
    read: list[str] = []
    for rank in range(4):
        dataset = DataFluxMapStyleDataset("project", "bucket", data_format_fn=text_of)
        loader = DataLoader(dataset, batch_size=5, sampler=Share(len(dataset), rank, 4))
        read += [text for batch in loader for text in batch]
    assert sorted(read) == texts


def test_workers_of_a_share_read_that_share(bucket: Bucket) -> None:
    texts = [f"data of {key}" for key in bucket.fill(20)]
    dataset = DataFluxIterableDataset("project", "bucket", data_format_fn=text_of)
    dataset.objects = dataset.objects[1::2]
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(loader) == texts[1::2]


@each_kind
def test_it_reads_in_a_thread_and_below_a_running_loop(bucket: Bucket, kind: type) -> None:
    """The old iterable class set a signal handler, which only the main thread may."""
    texts = [f"data of {key}" for key in bucket.fill(5)]
    before = signal.getsignal(signal.SIGINT)

    def read() -> list[str]:
        dataset = kind("project", "bucket", data_format_fn=text_of)
        return [text for batch in DataLoader(dataset, batch_size=2) for text in batch]

    async def read_in_a_loop() -> list[str]:
        return read()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(read).result() == texts
    assert asyncio.run(read_in_a_loop()) == texts
    assert signal.getsignal(signal.SIGINT) is before


@each_kind
def test_an_iteration_that_is_abandoned_reads_no_more(bucket: Bucket, kind: type) -> None:
    """Nor does it hold up the next one."""
    texts = [f"data of {key}" for key in bucket.fill(300)]
    dataset = kind("project", "bucket", kind_config(kind), text_of)
    items = iter(dataset)
    assert next(items) == texts[0]
    items.close()
    assert bucket.server.stats.operation("objects.get").requests < 300
    assert list(dataset) == texts

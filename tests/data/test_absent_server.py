"""A server that is away between two epochs, or when the first one begins."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux.data import IterableDataset, loader
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_OBJECTS = 20
FEW = aioflux.RetryPolicy(max_attempts=2, initial_seconds=0.1, multiplier=1.0)
"""Attempts without a connection do not count as attempts."""


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        for number in range(NUM_OBJECTS):
            running.put("bucket", f"{number:02}", b"data")
        yield running


def restart_after(server: GCSServer, seconds: float) -> threading.Timer:
    """Stop a server now, and start it again later on the same port."""
    server.stop()
    timer = threading.Timer(seconds, server.start)
    timer.start()
    return timer


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("first_absence", [0, 1], ids=["first epoch", "second epoch"])
def test_an_epoch_that_begins_without_a_server_waits_for_it(
    server: GCSServer, num_workers: int, first_absence: int
) -> None:
    dataset = IterableDataset("gs://bucket", endpoint_url=server.url, retry=FEW)
    batches = loader(dataset, batch_size=5, num_workers=num_workers)
    if first_absence:
        assert sum(map(len, batches)) == NUM_OBJECTS
    timer = restart_after(server, 1.5)
    try:
        assert sum(map(len, batches)) == NUM_OBJECTS
    finally:
        timer.join()

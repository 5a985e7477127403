"""Large objects as files: they prefetch what is read in order, and seek as files do."""

from __future__ import annotations

import io
import math
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import NotFoundError
from aioflux.compat.s3_datapipes import IterableWrapper
from aioflux.sync import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.compat.s3_datapipes.conftest import Bucket

KIB = 1024


def files_of(bucket: Bucket, data: bytes, buffer_size: int) -> Iterator[tuple[str, Any]]:
    """Iterate over one object, whose request has not been sent."""
    bucket.put("a", data)
    urls = list(IterableWrapper(["gs://bucket/a"]).list_files_by_s3())
    bucket.server.stats.reset()
    return iter(IterableWrapper(urls).load_files_by_s3(buffer_size=buffer_size))


@pytest.mark.parametrize("buffer_size", [1, 1000, 64 * KIB])
def test_a_buffer_may_have_any_size(bucket: Bucket, buffer_size: int) -> None:
    data = bytes(range(256)) * (1 if buffer_size == 1 else 1000)
    [(_, file)] = files_of(bucket, data, buffer_size)
    assert file.read() == data


def test_a_stream_in_order_costs_its_bytes_and_few_requests(bucket: Bucket) -> None:
    data = bytes(1_000_000)
    [(_, file)] = files_of(bucket, data, 512 * KIB)
    while file.read(1000):
        pass
    seen = bucket.server.stats.operation("objects.get")
    assert seen.bytes_out == len(data)
    assert seen.requests == math.ceil(len(data) / (256 * KIB))


def test_no_more_than_the_buffer_is_prefetched(bucket: Bucket) -> None:
    data = bytes(2_000_000)
    [(_, file)] = files_of(bucket, data, 128 * KIB)
    with closing(file):
        file.read(1)
    assert bucket.server.stats.operation("objects.get").bytes_out <= 3 * 128 * KIB


def test_ranges_arrive_while_an_earlier_one_is_read(bucket: Bucket) -> None:
    [(_, file)] = files_of(bucket, bytes(2_000_000), 400_000)
    with closing(file):
        file.read(1)
        until = time.monotonic() + 100
        while bucket.num_reads() < 2:  # it has left, and may arrive
            assert time.monotonic() < until
            time.sleep(0.001)
        # Ten in all; a third is in flight if the first one was received already.
        assert bucket.num_reads() <= 3


def test_a_stream_reads_seeks_and_tells_as_a_file_does(bucket: Bucket) -> None:
    data = bytes(range(256)) * 40
    [(_, file)] = files_of(bucket, data, 1000)
    assert file.read(10) == data[:10]
    assert file.tell() == 10
    assert file.seek(-5, io.SEEK_END) == len(data) - 5
    assert file.read() == data[-5:]
    assert file.read(1) == b""
    file.seek(100)
    assert file.read(100) == data[100:200]
    with pytest.raises(ValueError, match="cannot seek to byte -1 of gs://bucket/a"):
        file.raw.seek(-1)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_a_stream_of_an_object_that_was_replaced_is_an_error(bucket: Bucket) -> None:
    files = files_of(bucket, bytes(5000), 1000)
    bucket.put("a", bytes(5000))
    [(_, file)] = files
    with pytest.raises(NotFoundError, match="gs://bucket/a"):
        file.read()


def test_a_file_may_be_collected_on_the_event_loop(bucket: Bucket) -> None:
    """Garbage collection runs on any thread, and must not wait for the loop."""
    [(_, file)] = files_of(bucket, bytes(5000), 1000)
    file.read(1)
    files = [file]
    del file

    # The store calls the hook on the event loop.
    with open_store("gs://bucket", progress=lambda _: files.clear()) as store:
        store.get("a")
    assert not files

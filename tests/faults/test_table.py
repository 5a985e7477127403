"""One fault in one read, for every read call: the right bytes or a typed error, in time.

A read that waits for anything but the limit on a stall waits for longer than a test may take.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.testing import GCSServer
from perf.faults import BUCKET, FAULTS, STALL, Overwriter, contents, order
from perf.faulty_reads import MIB, OURS, Read
from tests.loops import OTHER_LOOPS, assert_spread

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 8 * MIB
TRANSFER = aioflux.TransferOptions(range_size_bytes=2 * MIB, verify_ranges=True)
"""As many ranges as an object of 64 MiB has by default."""
OLD, NEW = contents(SIZE)
PROGRESS_SECONDS = 0.3
FAR_SECONDS = 1000.0


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=(BUCKET,), md5=False) as server:
        # Imports on first use, torch above all, are not part of the time of the read.
        for name in OURS:
            outcome(new_read(server, name))
        yield server


@pytest.fixture(scope="module")
def overwriter(server: GCSServer) -> Overwriter:
    return Overwriter(server)


def new_read(server: GCSServer, name: str) -> Read:
    """Write an object for one read, and replace all faults."""
    server.faults.clear()
    read = Read(
        library="aioflux",
        call=name,
        url=server.url,
        bucket=BUCKET,
        prefix=uuid.uuid4().hex,
        size_bytes=SIZE,
    )
    server.put(BUCKET, read.key, OLD)
    return read


def outcome(read: Read, **options: Any) -> bytes | aioflux.StorageError:
    """Return the result of a read, or its error."""
    try:
        return bytes(OURS[read.call].read(read, **options))
    except aioflux.StorageError as exc:
        return exc


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OURS)
def test_a_read_gives_the_right_bytes_or_a_typed_error(
    server: GCSServer,
    overwriter: Overwriter,
    name: str,
    fault: str,
    num_loops: int,
    body_threads: list[str],
) -> None:
    read, call = new_read(server, name), OURS[name]
    order(server, overwriter, read, call, fault, NEW)
    is_stalled = fault == STALL
    timeouts = aioflux.Timeouts(
        connect_seconds=FAR_SECONDS,
        progress_seconds=PROGRESS_SECONDS if is_stalled else FAR_SECONDS,
        idle_seconds=FAR_SECONDS,
    )
    transfer = replace(TRANSFER, num_loops=num_loops)
    begun = time.monotonic()
    result = outcome(read, transfer=transfer, timeouts=timeouts)
    seconds = time.monotonic() - begun
    is_overwritten = fault == "overwritten mid-read"
    if isinstance(result, aioflux.StorageError):
        assert read.key in str(result)
        kind = aioflux.NotFoundError if is_overwritten else aioflux.ChecksumError
        assert isinstance(result, kind)
        assert fault in {"overwritten mid-read", "one flipped byte"}
    else:
        expected = {OLD, NEW} if is_overwritten else {OLD}
        is_right = result in {whole[call.start :] for whole in expected}
        assert is_right, "other bytes than any generation had"
    if is_overwritten:
        assert server.get(BUCKET, read.key) == NEW
    elif fault != "none":
        assert server.faults.injected.total() == 1
    if is_stalled:
        assert seconds >= PROGRESS_SECONDS - 0.01
    if is_overwritten:
        # The first error of a range ends the others, of which one may not have begun.
        assert bool(OTHER_LOOPS.intersection(body_threads)) == (num_loops == 3)
    else:
        assert_spread(body_threads, num_loops)


def test_a_stall_costs_under_ten_seconds_by_default() -> None:
    """The limit, as the read above keeps to it, and a wait before the next attempt."""
    limits, retry = aioflux.Timeouts(), aioflux.RetryPolicy()
    assert limits.progress_seconds + retry.initial_seconds < 10

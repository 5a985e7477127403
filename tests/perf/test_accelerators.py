"""The largest number of emulated accelerators that a loader feeds."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from perf._samples import Pair, Result, Sample, judge_accelerators
from perf.peers._accelerators import emulate, largest
from perf.peers._loading import RecordSplitter
from perf.scenarios import SCENARIOS
from perf.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORK = Work(
    peer="memory_data",
    operation="load",
    url="",
    size_bytes=10,
    num_objects=1,
    step_seconds=0.02,
    utilization=0.5,
)


def limited(capacity: float) -> tuple[Callable[[float], float], list[float]]:
    """Return the utilization with a loader that feeds so many accelerators, and its calls."""
    calls: list[float] = []

    def utilization_of(number: float) -> float:
        calls.append(number)
        return min(1.0, capacity / number)

    return utilization_of, calls


@pytest.mark.parametrize("capacity", [0.02, 0.3, 0.95, 1.0, 1.7, 6.4, 50.0])
def test_search_finds_the_largest_number(capacity: float) -> None:
    utilization_of, calls = limited(capacity)
    found = largest(utilization_of, 0.9, lambda: True)
    assert capacity / 0.9 / 1.1 <= found <= capacity / 0.9
    assert calls[0] == 1
    assert len(calls) <= 12


def test_search_ends_with_its_time() -> None:
    utilization_of, calls = limited(10)
    assert largest(utilization_of, 0.9, lambda: len(calls) < 3) == 4
    utilization_of, calls = limited(0.5)
    assert largest(utilization_of, 0.9, lambda: False) == 0
    assert calls == [1]


def paused(seconds: float) -> Callable[[Any, Work], Iterator[Any]]:
    def load(dataset: Any, work: Work) -> Iterator[Any]:
        for _ in dataset:
            time.sleep(seconds)
            yield work.prefetch_batches

    return load


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_utilization_is_the_share_of_the_steps() -> None:
    moved = emulate(range(1000), replace(WORK, utilization=0.99), paused(0.02))
    assert moved.figures is not None
    assert 0 < moved.figures["utilization"] <= 0.5  # a step of 0.02 s after each pause of 0.02 s
    assert moved.figures["accelerators"] == 0
    assert moved.figures["num_objects"] == 3
    moved = emulate(range(1000), replace(WORK, utilization=0.01), paused(0))
    assert moved.figures is not None
    assert moved.figures["accelerators"] == 1
    assert 0.01 <= moved.figures["utilization"] <= 1


def test_toy_training_has_one_rival_and_our_own_workers() -> None:
    names = [match.name for match in SCENARIOS["mlperf-cosmoflow"].toy().matches()]
    assert names == ["gcsfs", "DataLoader"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="1 accelerators: RuntimeError: the dataset ended"):
        emulate(range(4), WORK, paused(0))


def test_records_become_constant_items_of_their_own_size() -> None:
    split = RecordSplitter(replace(WORK, record_bytes=5, item_bytes=3))
    assert [len(item) for item in split(io.BytesIO(bytes(10)))] == [3, 3]
    short = io.BytesIO(bytes(10))
    short.read = lambda size=-1: io.BytesIO.read(short, min(size, 4))  # type: ignore[method-assign, assignment]
    assert [len(item) for item in split(short)] == [3, 3]
    with pytest.raises(ValueError, match="a sample of 2 bytes, not 5"):
        list(split(io.BytesIO(bytes(7))))


@pytest.mark.parametrize(
    ("name", "bytes_per_second"),
    [("mlperf-unet3d", 3.177e9), ("mlperf-resnet50", 0.2047e9), ("mlperf-cosmoflow", 0.808e9)],
)
def test_an_accelerator_reads_as_fast_as_an_h100(name: str, bytes_per_second: float) -> None:
    matches = SCENARIOS[name].played()
    assert [match.name for match in matches] == [
        *("gcsfs", "obstore", "dataflux", "s3torchconnector", "DataLoader")
    ]
    assert len({match.ours.server for match in matches}) == 1
    for match in matches:
        for work in (match.ours.work, match.theirs.work):
            size_bytes = work.record_bytes or work.size_bytes
            found = size_bytes * work.batch_size / work.step_seconds
            assert found == pytest.approx(bytes_per_second, rel=1e-3)


def test_row_has_both_numbers_and_the_utilization_of_one() -> None:
    match = SCENARIOS["mlperf-unet3d"].matches()[0]
    common = {"seconds": 1, "cpu_seconds": 1, "server_cpu_seconds": 1, "num_objects": 1}
    common |= {"num_bytes": 1, "idle_bytes": 1, "peak_bytes": 1}
    ours, theirs = (
        Sample(work=WORK, result=Result(**common, accelerators=number, utilization=share))
        for number, share in ((2.5, 1.0), (0.25, 0.3))
    )
    pair = Pair(index=0, is_warm_up=False, ours=ours, theirs=theirs)
    row = judge_accelerators("name", match, [pair])
    assert row is not None
    assert (row.case, row.peer) == ("accelerators at 90%", "gcsfs")
    assert row.figure == "2.5 / 0.25 (1: 100% / 30%)"
    assert judge_accelerators("name", match, [replace(pair, is_warm_up=True)]) is None
    other = SCENARIOS["get-1KiB"].matches()[0]
    assert judge_accelerators("name", other, [pair]) is None

"""The simulation of a cluster: its clock, its bucket, and what it finds at small sizes."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from aioflux import TransferOptions, TransientError
from aioflux.options import RetryPolicy
from perf.__main__ import main
from perf.cluster.__main__ import CASES, run_case
from perf.cluster.bucket import GCS, S3, Bucket, Link, longest_excess
from perf.cluster.check import Check, compare
from perf.cluster.clock import run
from perf.cluster.reads import Reads, simulate_reads
from perf.cluster.save import Save, simulate_save
from perf.cluster.stores import SimulatedStore

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024 * 1024


def test_the_clock_jumps_to_the_next_timer() -> None:
    async def sleep() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(86_400 * 10))
        return [*times, loop.time()]

    assert run(sleep()) == [0.0, pytest.approx(864_000)]


@pytest.mark.parametrize("wait", ["thread", "nothing"])
def test_what_the_clock_cannot_simulate_is_an_error(wait: str) -> None:
    async def hang() -> None:
        if wait == "thread":
            await asyncio.to_thread(int)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="thread"):
        run(hang())


def test_bodies_share_the_link_of_their_node() -> None:
    """Two of 1 and 3 MB on a link of 1 MB/s: the first has half the link until it ends."""

    async def both() -> list[float]:
        link, loop = Link(1e6), asyncio.get_running_loop()

        async def send(num_bytes: float) -> float:
            await link.transfer(num_bytes)
            return loop.time()

        return list(await asyncio.gather(send(1e6), send(3e6)))

    assert run(both()) == [pytest.approx(2), pytest.approx(4)]


@pytest.mark.parametrize(("profile", "status"), [(GCS, 429), (S3, 503)], ids=["gcs", "s3"])
def test_requests_above_the_rate_are_rejected(profile: object, status: int) -> None:
    async def burst() -> tuple[int, set[int | None]]:
        bucket, link = Bucket(profile=profile), Link(1e9)  # type: ignore[arg-type]
        requests = [bucket.exchange("put", "uri", link) for _ in range(10_000)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        errors = [result for result in results if isinstance(result, TransientError)]
        return len(errors), {error.status for error in errors}

    num_rejected, statuses = run(burst())
    assert num_rejected == 10_000 - bucket_rate(profile)
    assert statuses == {status}


def bucket_rate(profile: object) -> int:
    return int(profile.writes_per_second)  # type: ignore[attr-defined]


def test_the_rate_of_a_bucket_doubles() -> None:
    assert longest_excess({0: 1500, 1: 1500, 2: 900, 1300: 1500}, 1000, 1200) == 2
    assert longest_excess({0: 1500, 2: 1500}, 1000, 1200) == 1
    assert longest_excess({}, 1000, 1200) == 0


@pytest.mark.parametrize("outages", [(), ((5.0, 15.0),)], ids=["no-outage", "outage"])
def test_a_store_sends_no_more_than_its_rate(outages: tuple[tuple[float, float], ...]) -> None:
    """Retries included, from the first second on; and reads by `get_many` take no token twice."""
    bucket = Bucket(profile=GCS, outages=outages)

    async def read() -> float:
        writer, loop = SimulatedStore(bucket, Link(1e9)), asyncio.get_running_loop()
        await writer.put_many((f"{number:03}", b"data") for number in range(400))
        bucket.sent["reads"].clear()
        begun = loop.time()
        store = SimulatedStore(
            bucket,
            Link(1e9),
            transfer=TransferOptions(max_requests_per_second=20.0),
            retry=RetryPolicy(max_attempts=100),
        )
        keys = [key async for key, _ in store.get_many(f"{number:03}" for number in range(400))]
        assert len(keys) == 400
        return loop.time() - begun

    seconds = run(read())
    # 20 a second, with the 2 of the bucket of tokens.
    assert max(bucket.sent["reads"].values()) <= 22
    assert bool(bucket.rejected["get"]) == bool(outages)
    if not outages:
        assert seconds == pytest.approx(20, abs=0.5)


def test_a_save_of_many_ranks_is_committed_within_the_rate() -> None:
    report = simulate_save(Save(num_ranks=300, rank_mib=64))
    assert len(report.ended) == len(report.uploaded_at) == 300
    assert not report.errors
    assert report.committed_at is not None
    assert report.committed_at <= 2 * report.uploaded_at[-1]
    assert not report.bucket.rejected
    assert max(report.bucket.excess_seconds().values()) <= 1
    assert not [key for key in report.bucket.keys if "/rank-" in key]


def test_a_dead_rank_fails_the_save_on_all_others() -> None:
    report = simulate_save(Save(num_ranks=24, rank_mib=64, dead_rank=7, dead_at_seconds=0.01))
    assert report.committed_at is None
    assert report.errors.keys() == set(range(24)) - {7}
    assert "rank 7" in report.errors[0]
    assert not [key for key in report.bucket.keys if key.endswith(".distcp")]


def test_a_slow_rank_delays_the_commit_by_no_more_than_its_upload() -> None:
    report = simulate_save(Save(num_ranks=24, rank_mib=512, slow_rank=5))
    assert report.uploaded_at[-1] > 3 * report.uploaded_at[-2]
    assert report.committed_at is not None
    assert report.committed_at < report.uploaded_at[-1] + 2


def test_requests_after_an_outage_stay_below_twice_the_steady_rate() -> None:
    reads = Reads(
        num_ranks=64,
        num_objects=64_000,
        max_requests_per_second=0.625,
        outage=(20.0, 80.0),
        end_seconds=120.0,
        max_attempts=16,
    )
    report = simulate_reads(reads)
    assert not report.failed
    mean = sum(report.bucket.sent["reads"][second] for second in range(80, 90)) / 10
    assert mean < 2 * reads.steady_rate
    assert report.num_read > 0.5 * 60 * reads.steady_rate


def test_one_rank_lists() -> None:
    listed = {
        listing: simulate_reads(
            Reads(num_ranks=16, num_objects=20_000, listing=listing, end_seconds=10)
        ).bucket.requests["list"]
        for listing in ("once", "every")
    }
    assert listed["every"] == pytest.approx(16 * listed["once"], rel=0.5)


@pytest.mark.parametrize("scheme", ["GCS", "S3"])
def test_requests_have_their_price(scheme: str) -> None:
    profile = {"GCS": GCS, "S3": S3}[scheme]
    assert profile.dollars({"put": 1000, "get": 1000, "delete": 1000}) == pytest.approx(0.0054)


def test_the_command_prints_a_row_for_each_case(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["cluster", "--toy", "save", "save-slow-rank", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| `save") == 2
    assert not logging.root.manager.disable
    with pytest.raises(SystemExit):
        main(["cluster", "unknown"])


@pytest.mark.more
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_runs_at_toy_size(case: object) -> None:
    result = run_case(case, 80)  # type: ignore[arg-type]
    assert result.requests > 0


@pytest.mark.more
def test_processes_send_as_many_requests_as_the_simulation() -> None:
    """The times are compared by `python -m perf.cluster.check`, on a machine without other work."""
    check = Check(num_ranks=4, requests_per_second=100, request_burst=100)
    for row in compare(["reads", "save"], check):
        simulated, real, ratio = row["requests"]
        # A save polls for as long as it takes, which is longer on a busy machine.
        tolerance = {"reads": 0.15, "save": 0.4}[row["scenario"]]
        assert ratio == pytest.approx(1, abs=tolerance), (row["scenario"], simulated, real)

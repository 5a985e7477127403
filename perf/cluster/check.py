"""Check of the model: the same scenarios in processes against the embedded server.

Each process is one rank with a store of its own. The processes start at the same time, when all are
ready; the server has the latency and the rate limit of the model. Requests, retries and the time
until the last rank has ended are compared with the simulation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from aioflux.checkpoint._save.job import UploadSettings
from aioflux.checkpoint._save.loop_uploader import SaveQueue
from aioflux.errors import NotFoundError
from aioflux.options import TransferOptions
from aioflux.store import open_store
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Network
from perf.cluster.bucket import GCS, Bucket, Link
from perf.cluster.clock import run
from perf.cluster.save import job_of
from perf.cluster.stores import SimulatedStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aioflux.store import Store

__all__ = ["SCENARIOS", "Check", "Outcome", "compare", "main"]

BUCKET: Final = "bucket"
_OBJECT: Final = bytes(1024)


@dataclass(frozen=True, kw_only=True)
class Check:
    """Parameters of a check."""

    num_ranks: int = 16
    objects_per_rank: int = 100
    latency_seconds: float = 0.05
    """Longer than of real services, so that the CPU time of the processes matters less."""
    requests_per_second: float = 200.0
    request_burst: int = 200
    state_bytes: int = 64 * 1024
    heartbeat_seconds: float = 0.5
    max_in_flight: int = 4


@dataclass(frozen=True)
class Outcome:
    """Requests, retries and duration of one run of a scenario."""

    requests: int
    """Number of requests, rejected ones included."""
    retries: int
    seconds: float
    """Time from the start until the last rank has ended."""


async def read_share(store: Store, rank: int, check: Check) -> None:
    """List the dataset, and read the share of a rank."""
    listing = await store.list_all("train/")
    async for _ in store.get_many(listing[rank :: check.num_ranks]):
        pass


async def save(store: Store, rank: int, check: Check) -> None:
    """Save the state of a rank."""
    settings = UploadSettings(
        heartbeat_seconds=check.heartbeat_seconds, clock=asyncio.get_running_loop().time
    )
    memory = memoryview(bytes(check.state_bytes))
    job = job_of(rank, check.num_ranks, check.state_bytes)
    await SaveQueue(store, settings).run(job, memory, lambda _: None)


SCENARIOS: Final[dict[str, Callable[[Store, int, Check], Awaitable[None]]]] = {
    "reads": read_share,
    "save": save,
}


def _transfer(check: Check) -> TransferOptions:
    return TransferOptions(max_in_flight=check.max_in_flight, verify_ranges=False)


def _keys(check: Check) -> list[str]:
    return [f"train/{index:06d}" for index in range(check.num_ranks * check.objects_per_rank)]


def simulate(name: str, check: Check) -> Outcome:
    """Run a scenario in the simulation."""
    bucket = Bucket(
        profile=replace(GCS, status=429),
        latency_seconds=check.latency_seconds,
        latency_spread=0.0,
        rate=check.requests_per_second,
        burst_seconds=check.request_burst / check.requests_per_second,
        retry_after=True,
    )
    link = Link(1e9)
    stores = [
        SimulatedStore(bucket, link, transfer=_transfer(check)) for _ in range(check.num_ranks)
    ]

    async def all_ranks() -> float:
        bucket.has_limits = False
        await stores[0].put_many((key, _OBJECT) for key in _keys(check))
        bucket.has_limits = True
        bucket.requests.clear()
        begun = asyncio.get_running_loop().time()
        scenario = SCENARIOS[name]
        await asyncio.gather(*(scenario(store, rank, check) for rank, store in enumerate(stores)))
        return asyncio.get_running_loop().time() - begun

    seconds = run(all_ranks())
    return Outcome(sum(bucket.requests.values()), sum(bucket.rejected.values()), seconds)


def measure(name: str, check: Check) -> Outcome:
    """Run a scenario in processes, against the embedded server."""
    with GCSServer(buckets=(BUCKET,)) as server, ExitStack() as stack:
        for key in _keys(check):
            server.put(BUCKET, key, _OBJECT)
        ranks = [
            stack.enter_context(_start_rank(name, rank, server.url, check))
            for rank in range(check.num_ranks)
        ]
        for process in ranks:
            stack.callback(process.kill)
        for process in ranks:
            _read_line(process)
        server.network = Network(
            latency_seconds=check.latency_seconds,
            requests_per_second=check.requests_per_second,
            request_burst=check.request_burst,
        )
        before = _counted(server)
        begun = time.time()
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        ended = [float(_read_line(process)) for process in ranks]
        after = _counted(server)
    return Outcome(after[0] - before[0], after[1] - before[1], max(ended) - begun)


def _start_rank(name: str, rank: int, url: str, check: Check) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perf.cluster.check", "--rank", str(rank)]
    return subprocess.Popen(  # noqa: S603  our own command
        [*command, "--scenario", name, "--url", url, "--check", json.dumps(asdict(check))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended with status {process.wait()}; its errors are above")
    return line


def _counted(server: GCSServer) -> tuple[int, int]:
    total = server.stats.total
    return total.requests, total.statuses[429]


async def _rank(name: str, rank: int, url: str, check: Check) -> None:
    """Run one rank in this process: open connections, wait for the start, and run."""
    async with open_store(f"gs://{BUCKET}", endpoint_url=url, transfer=_transfer(check)) as store:
        # The first requests import modules and open connections.
        await asyncio.gather(*(_warm_up(store, rank) for _ in range(check.max_in_flight)))
        print("ready", flush=True)
        sys.stdin.readline()
        await SCENARIOS[name](store, rank, check)
        print(time.time(), flush=True)


async def _warm_up(store: Store, rank: int) -> None:
    await store.list_all("warm/")
    key = f"warm-{rank}"
    await store.put(key, b"data")
    await store.get(key)
    await store.delete_many([key])
    with suppress(NotFoundError):
        await store.head("missing")


def compare(names: Sequence[str], check: Check, *, pairs: int = 1) -> list[dict[str, Any]]:
    """Run scenarios in processes and in the simulation, and return a row for each."""
    rows = []
    for name in names:
        real = [measure(name, check) for _ in range(pairs)]
        simulated = [simulate(name, check) for _ in range(max(pairs, 5))]
        row: dict[str, Any] = {"scenario": name}
        for field in ("requests", "retries", "seconds"):
            ours, theirs = _median(simulated, field), _median(real, field)
            row[field] = (ours, theirs, ours / theirs if theirs else float(ours == theirs))
        rows.append(row)
    return rows


def _median(outcomes: Sequence[Outcome], name: str) -> float:
    values = sorted(getattr(outcome, name) for outcome in outcomes)
    return float(values[len(values) // 2])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank (with `--rank`), or the whole check.

    Returns:
        1 if a figure of the simulation differs by more than 15 % from the processes.
    """
    parser = argparse.ArgumentParser(prog="perf.cluster.check", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--check", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank is not None:
        logging.disable(logging.CRITICAL)
        asyncio.run(_rank(args.scenario[0], args.rank, args.url, Check(**args.check)))
        return 0
    is_close = True
    for row in compare(
        args.scenario or list(SCENARIOS), Check(num_ranks=args.ranks), pairs=args.pairs
    ):
        texts = [row["scenario"]]
        for field in ("requests", "retries", "seconds"):
            ours, theirs, ratio = row[field]
            texts.append(f"{field}: simulated {ours:.4g}, real {theirs:.4g}, ratio {ratio:.2f}")
            is_close &= 0.85 <= ratio <= 1.15
        print("; ".join(texts), flush=True)
    return int(not is_close)


if __name__ == "__main__":
    sys.exit(main())

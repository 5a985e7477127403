"""`python -m perf`: reads and writes of small objects, aioflux beside its peers, pair by pair.

The server is the embedded one, in a process of its own and without MD5, which would be most of an
upload's time. Every contender runs in a process of its own, aioflux and one peer in turn (A B A B),
so that both see the same noise. A ratio is the median over the pairs of our rate by the peer's.
Every sample is kept as a JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aioflux import sync
from aioflux.testing import GCSServerProcess
from perf.work import Work

PEERS = ("obstore", "gcloud_aio", "google")
SCENARIOS = {
    # operation, size of each object in bytes, requests
    "get-1KiB": ("get_many", 1024, 20_000),
    "get-100KiB": ("get_many", 100 * 1024, 10_000),
    "get-1MiB": ("get_many", 1024 * 1024, 1_500),
    "put-100KiB": ("put_many", 100 * 1024, 4_000),
}


def sample(work: Work) -> dict[str, Any]:
    """Run one contender in a process of its own."""
    command = [sys.executable, "-m", "perf.work", json.dumps(asdict(work))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    return dict(json.loads(done.stdout))


def rate(row: dict[str, Any]) -> float:
    """Return objects per second."""
    return float(row["num_objects"] / row["seconds"])


def run(name: str, url: str, args: argparse.Namespace, lines: list[str]) -> None:
    """Run one scenario against every peer and print its rows."""
    operation, size, count = SCENARIOS[name]
    count = max(64, int(count * args.scale))
    for peer in args.peers:
        works = [
            Work(
                peer=who,
                operation=operation,
                url=url,
                size_bytes=size,
                # The slow do less of the same: their rate is as steady, and the run stays short.
                num_objects=count // 5 if who == "google" else count,
            )
            for who in ("aioflux", peer)
        ]
        rows: list[tuple[dict[str, Any], ...]] = []
        for pair in range(args.pairs + 1):
            both = tuple(sample(work) for work in works)
            lines.extend(json.dumps({"scenario": name, "pair": pair, **row}) for row in both)
            if pair:  # the first pair warms up
                rows.append(both)
        report(name, peer, rows)


def report(name: str, peer: str, rows: list[tuple[dict[str, Any], ...]]) -> None:
    """Print the medians of one scenario and peer."""
    ours, theirs = (statistics.median(rate(row[at]) for row in rows) for at in (0, 1))
    ratio = statistics.median(rate(a) / rate(b) for a, b in rows)
    cpu = [
        statistics.median(1e6 * row[at]["cpu_seconds"] / row[at]["num_objects"] for row in rows)
        for at in (0, 1)
    ]
    print(
        f"{name:<12} {peer:<12} {ours:>10,.0f} {theirs:>10,.0f} {ratio:>6.2f}x "
        f"{cpu[0]:>10,.0f} {cpu[1]:>10,.0f}",
        flush=True,
    )


def main() -> None:
    """Parse the command line, run the scenarios, and write every sample."""
    parser = argparse.ArgumentParser(prog="perf", description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", metavar="scenario", help=", ".join(SCENARIOS))
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the requests")
    parser.add_argument("--out", type=Path, default=Path("perf/out"))
    args = parser.parse_args()
    names = args.scenarios or list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        parser.error(f"unknown scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    lines: list[str] = []
    print(f"{platform.machine()}, Python {platform.python_version()}, median of {args.pairs} pairs")
    print(
        f"{'scenario':<12} {'peer':<12} {'ours/s':>10} {'peer/s':>10} {'ratio':>7} "
        f"{'our us CPU':>10} {'peer us CPU':>10}"
    )
    with GCSServerProcess(buckets=("perf",), arguments=("--no-md5",)) as server:
        with sync.open_store("gs://perf", endpoint_url=server.url) as store:
            for size in {SCENARIOS[name][1] for name in names}:
                for _ in store.put_many((f"{size}/{at}", bytes(size)) for at in range(64)):
                    pass
        for name in names:
            run(name, server.url, args, lines)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"small-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    print(f"every sample: {path}")


if __name__ == "__main__":
    main()

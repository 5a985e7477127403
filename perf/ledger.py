"""`python -m perf.ledger`: CPU time of each step of a GET, and how the cost of GETs grows.

Prints tables in Markdown. The first table has the CPU time of the client for each step of a GET of
100 KiB; see `perf._ledger_steps`. The others have CPU time, rate and memory of `get_many` by size
of the objects, by requests in flight, and by number of objects, where memory must stay constant.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from perf._ledger_steps import STEPS, Reads, added, measure
from perf.servers import BUCKET, ServerSpec, open_server
from perf.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perf.servers import Server

__all__ = ["FULL", "TOY", "Plan", "growth", "steps_table"]

KIB = 1024
MIB = 1024 * KIB
NUM_KEYS = 64
SIZE_BYTES = 100 * KIB
"""Size of the objects, except in the table by size and the table by number."""
SMALL_BYTES = KIB
"""Size of the objects in the table by number."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Parameters of all measurements."""

    num_objects: int
    """Objects of each variant in each round of the steps."""
    num_rounds: int
    """Rounds of the steps."""
    in_flight: int
    """Requests in flight, except in the table by requests in flight."""
    sizes: tuple[int, ...]
    """Sizes of objects, in bytes."""
    in_flights: tuple[int, ...]
    """Requests in flight."""
    totals: tuple[int, ...]
    """Numbers of objects of 1 KiB."""
    num_samples: int
    """Samples of each row; the largest totals have one."""
    max_objects: int
    """Maximum number of objects of a row by size or by requests in flight."""
    max_bytes: int
    """Maximum number of bytes of such a row."""


FULL = Plan(
    num_objects=1500,
    num_rounds=9,
    in_flight=64,
    sizes=(KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    in_flights=(1, 4, 16, 64, 256, 1024),
    totals=(1000, 10_000, 100_000, 1_000_000),
    num_samples=3,
    max_objects=10_000,
    max_bytes=1024 * MIB,
)
TOY = Plan(
    num_objects=20,
    num_rounds=1,
    in_flight=4,
    sizes=(KIB,),
    in_flights=(2,),
    totals=(50,),
    num_samples=1,
    max_objects=20,
    max_bytes=MIB,
)
PARTS = ("steps", "size", "in-flight", "total")


# --- steps ---------------------------------------------------------------------------------------


def steps_table(taken: dict[str, list[float]]) -> str:
    """Return the table of the steps."""
    more = added(taken)
    rows = [
        (
            name,
            STEPS[name],
            f"{more[name] * 1e6:.1f}" if name in more else "",
            f"{statistics.median(values) * 1e6:.1f}",
        )
        for name, values in taken.items()
    ]
    return table(("step", "what it adds", "us", "us in all"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; of four columns the first two are text, else only the first."""
    words = 2 if len(head) == 4 else 1
    lines = [" | ".join(head), " | ".join(["---"] * words + ["---:"] * (len(head) - words))]
    return "\n".join(f"| {line} |" for line in (*lines, *(" | ".join(row) for row in rows)))


# --- growth --------------------------------------------------------------------------------------


def sample(work: Work) -> dict[str, Any]:
    """Do one work in a separate process.

    Raises:
        RuntimeError: The process failed; the message contains its output.
    """
    command = [sys.executable, "-m", "perf.work", json.dumps(asdict(work))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"the work failed: {done.stderr.strip()}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def works(part: str, plan: Plan, server: Server) -> list[Work]:
    """Return the works of one table, one for each row."""

    def work(size: int, in_flight: int, num_objects: int) -> Work:
        return Work(
            peer="aioflux",
            operation="get_many",
            url=server.url,
            size_bytes=size,
            num_objects=num_objects,
            num_keys=num_keys(size, plan),
            in_flight=in_flight,
            server_pids=server.pids,
        )

    if part == "size":
        points = [(size, plan.in_flight) for size in plan.sizes]
    elif part == "in-flight":
        points = [(SIZE_BYTES, in_flight) for in_flight in plan.in_flights]
    else:
        return [work(SMALL_BYTES, plan.in_flight, total) for total in plan.totals]
    return [
        work(size, in_flight, max(1, min(plan.max_objects, plan.max_bytes // size)))
        for size, in_flight in points
    ]


def num_keys(size: int, plan: Plan) -> int:
    """Return the number of different objects of a size; large sizes have fewer."""
    return max(1, min(NUM_KEYS, plan.max_bytes // (4 * size)))


def growth(part: str, rows: list[list[dict[str, Any]]]) -> str:
    """Return a table by size, requests in flight or number; `rows` has the samples of each row."""
    names = {"size": "object", "in-flight": "in flight", "total": "objects of 1 KiB"}

    def middle(samples: list[dict[str, Any]], key: str) -> float:
        return float(statistics.median(row[key] for row in samples))

    lines = []
    for samples in rows:
        work, count = samples[0]["work"], samples[0]["num_objects"]
        point = {
            "size": name_of(work["size_bytes"]),
            "in-flight": f"{work['in_flight']:,}",
            "total": f"{count:,}",
        }[part]
        seconds, cpu = middle(samples, "seconds"), middle(samples, "cpu_seconds")
        peak, idle = middle(samples, "peak_bytes"), middle(samples, "idle_bytes")
        lines.append(
            (
                point,
                f"{cpu / count * 1e6:,.1f}",
                f"{middle(samples, 'server_cpu_seconds') / count * 1e6:,.1f}",
                f"{count / seconds:,.0f}",
                f"{samples[0]['num_bytes'] / seconds / 1e9:.2f}",
                f"{peak / MIB:,.0f}",
                f"{(peak - idle) / MIB:,.0f}",
            )
        )
    head = (names[part], "us", "server us", "objects/s", "GB/s", "peak MiB", "above idle")
    return table(head, lines)


def name_of(size: int) -> str:
    """Return a size with its unit."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


# --- the command ---------------------------------------------------------------------------------


def run(parts: Sequence[str], plan: Plan) -> list[dict[str, Any]]:
    """Measure and print; return every sample."""
    sizes = sorted({*plan.sizes, SIZE_BYTES, SMALL_BYTES})
    objects = tuple((size, num_keys(size, plan)) for size in sizes)
    # The warm-up reads an object of 1 MiB instead of larger ones.
    objects += () if MIB in sizes else ((MIB, 1),)
    samples: list[dict[str, Any]] = []
    with open_server(ServerSpec(objects=objects)) as server:
        print("\n".join([f"Server: {server.kind}.", *server.notes]), flush=True)
        for part in parts:
            if part == "steps":
                reads = Reads(
                    url=server.url,
                    bucket=BUCKET,
                    size_bytes=SIZE_BYTES,
                    num_objects=plan.num_objects,
                    num_keys=num_keys(SIZE_BYTES, plan),
                    in_flight=plan.in_flight,
                    num_rounds=plan.num_rounds,
                )
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    taken = runner.run(measure(reads))
                samples.append({"part": part, "reads": asdict(reads), "cpu_seconds": taken})
                print(f"\n{steps_table(taken)}", flush=True)
                continue
            rows = []
            for work in works(part, plan, server):
                # A long sample has little noise, so that one is enough.
                count = 1 if work.num_objects >= 10 * plan.max_objects else plan.num_samples
                rows.append([sample(work) for _ in range(count)])
                samples += [{"part": part, **row} for row in rows[-1]]
            print(f"\n{growth(part, rows)}", flush=True)
    return samples


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="perf.ledger", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to test the command")
    parser.add_argument("--out", type=Path, help="write all samples to this file, as JSON lines")
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    samples = run(args.parts or PARTS, TOY if args.toy else FULL)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in samples))


if __name__ == "__main__":
    main()

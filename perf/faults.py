"""`python -m perf.faults`: reads with one fault, for each read call of aioflux and of its peers.

Prints a table in Markdown: whether the call returned the correct bytes, wrong bytes, or an error.
Each read runs in a separate process, with its own object. The embedded server injects the fault
into one request, over plain HTTP. If a call sends several requests, the fault is in the second,
because the first requests the size.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Hook
from perf import _machine
from perf.faulty_reads import MIB, OURS, PEERS, WARM_UP, WARM_UP_BYTES, Call, Read

if TYPE_CHECKING:
    from aioflux.testing.gcs_server import Request, Response

__all__ = ["FAULTS", "Overwriter", "contents", "order"]

BUCKET = "faults"
FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "overwritten mid-read": {"overwrite": True},
    "one flipped byte": {"flip_at": 1_000_000},
    "reset": {"truncate_at": 1_000_000, "reset": True},
    "short body": {"truncate_at": 1_000_000},
    "503": {"status": 503},
    "endless stall": {"stall_at": 1_000_000},
}
"""Options of each fault."""
STALL = "endless stall"
NUM_AT_ONCE = 6
"""Number of reads that run at the same time."""


class Overwriter(Hook):
    """Replaces an object by another of the same size after a number of requests have read it."""

    def __init__(self, server: GCSServer) -> None:
        self._server = server
        self._pending: dict[str, tuple[str, int, bytes]] = {}
        server.app.hooks = (*server.app.hooks, self)

    def add(self, bucket: str, key: str, data: bytes, *, after: int) -> None:
        """Replace an object after it was read `after` times."""
        self._pending[key] = (bucket, after, data)

    def after(self, request: Request, response: Response) -> Response:
        """See base class."""
        key = request.params.get("object", "")
        is_read = request.method == "GET" and response.status in {200, 206}
        is_media = not request.match.url.is_json or request.query.get("alt") == "media"
        if is_read and is_media and key in self._pending:
            bucket, num_reads, data = self._pending.pop(key)
            if num_reads > 1:
                self._pending[key] = (bucket, num_reads - 1, data)
            else:
                self._server.put(bucket, key, data)
        return response


def contents(size_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes of the object, and the bytes of its replacement."""
    rng = random.Random(0)  # noqa: S311  no secret
    return rng.randbytes(size_bytes), rng.randbytes(size_bytes)


def order(
    server: GCSServer, overwriter: Overwriter, read: Read, call: Call, fault: str, new: bytes
) -> None:
    """Inject a fault into one request of a read."""
    options = dict(FAULTS[fault])
    skip = 0 if call.is_one_request else 1
    if options.pop("overwrite", False):
        overwriter.add(read.bucket, read.key, new, after=skip + 1)
    elif options:
        server.faults.add("objects.media", key=read.key, skip=skip, times=1, **options)


@dataclass(frozen=True)
class Cell:
    """Result of one read."""

    error: str | None
    digest: str | None
    seconds: float


def outcome(cell: Cell, *, fault: str, usual: float, old: str, new: str) -> str:
    """Return the text of a cell of the table."""
    if cell.error == "killed":
        return f"**NO END** (killed after {cell.seconds:.0f} s)"
    late = cell.seconds - usual
    cost = f", +{late:.1f} s" if late >= 0.25 else ""
    if cell.error is not None:
        return f"error {cell.error}{cost}"
    if cell.digest == old:
        return f"ok{cost}"
    if cell.digest == new and fault == "overwritten mid-read":
        return f"ok, the new object{cost}"
    return "**SILENT MIX**" if fault == "overwritten mid-read" else "**SILENT CORRUPT**"


def run(read: Read, limit_seconds: float) -> Cell:
    """Do one read in a separate process, with a time limit."""
    command = [sys.executable, "-m", "perf.faulty_reads", json.dumps(asdict(read))]
    begun = time.perf_counter()
    try:
        done = subprocess.run(  # noqa: S603  our own command
            command, capture_output=True, text=True, timeout=limit_seconds, check=True
        )
    except subprocess.TimeoutExpired:
        return Cell("killed", None, time.perf_counter() - begun)
    row = json.loads(done.stdout.strip().splitlines()[-1])
    return Cell(row["error"], row["digest"], row["seconds"])


def measure(
    size_bytes: int, calls: dict[str, tuple[str, Call]], limit_seconds: float
) -> dict[tuple[str, str], str]:
    """Run every call with every fault, and return the texts of the cells by call and fault."""
    old, new = contents(size_bytes)
    cells: dict[tuple[str, str], Cell] = {}
    with GCSServer(buckets=(BUCKET,), md5=False) as server:
        overwriter = Overwriter(server)
        server.put(BUCKET, f"{WARM_UP}/object", bytes(WARM_UP_BYTES))

        def one(name: str, fault: str) -> None:
            library, call = calls[name]
            number = list(calls).index(name) * len(FAULTS) + list(FAULTS).index(fault)
            read = Read(
                library=library,
                call=name,
                url=server.url,
                bucket=BUCKET,
                prefix=f"{number:03}",
                size_bytes=size_bytes,
            )
            server.put(BUCKET, read.key, old)
            order(server, overwriter, read, call, fault, new)
            cells[name, fault] = cell = run(read, limit_seconds)
            result = cell.error or (cell.digest or "")[:8]
            print(f"{name}, {fault}: {result} {cell.seconds:.1f} s", file=sys.stderr, flush=True)

        # Start the stalls of peers, which take a minute, first; other reads run at the same time.
        todo = [(name, fault) for name in calls for fault in FAULTS]
        todo.sort(key=lambda cell: (cell[1] != STALL, calls[cell[0]][0] == "aioflux"))
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            list(threads.map(lambda cell: one(*cell), todo))
    return _words(cells, calls, old, new)


def _words(
    cells: dict[tuple[str, str], Cell], calls: dict[str, tuple[str, Call]], old: bytes, new: bytes
) -> dict[tuple[str, str], str]:
    table: dict[tuple[str, str], str] = {}
    for (name, fault), cell in cells.items():
        call = calls[name][1]
        before, after = (hashlib.sha256(data[call.start :]).hexdigest() for data in (old, new))
        usual = cells[name, "none"].seconds
        words = outcome(cell, fault=fault, usual=usual, old=before, new=after)
        if fault == "overwritten mid-read" and call.is_one_request and cell.digest == before:
            words = "ok (one request)"
        table[name, fault] = words
    return table


def _markdown(table: dict[tuple[str, str], str], calls: dict[str, tuple[str, Call]]) -> str:
    faults = [fault for fault in FAULTS if fault != "none"]
    lines = [f"| | {' | '.join(faults)} |", f"| --- |{' --- |' * len(faults)}"]
    for name, (library, _) in calls.items():
        title = f"**aioflux `{name}`**" if library == "aioflux" else name
        if (undisturbed := table[name, "none"]) != "ok":
            title += f" (undisturbed: {undisturbed})"
        lines.append(f"| {title} | {' | '.join(table[name, fault] for fault in faults)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, run the reads and print the table."""
    parser = argparse.ArgumentParser(prog="perf.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="size of the object")
    parser.add_argument("--limit-seconds", type=float, default=75.0, help="time limit of one read")
    args = parser.parse_args()
    calls = {name: ("aioflux", call) for name, call in OURS.items()}
    calls |= {name: ("peers", call) for name, call in PEERS.items()}
    print(_markdown(measure(args.mib * MIB, calls, args.limit_seconds), calls))
    print(f"\n{args.mib} MiB; {_machine.summary(_machine.describe())}")


if __name__ == "__main__":
    main()

"""`python -m perf.memory`: peak memory of single calls, compared with limits.

Each call runs in a separate process; the embedded server runs in another process. The figure is the
maximum resident memory (VmHWM) minus the resident memory before the call. Before it, all modules
are imported, and one small object was written and read. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aioflux
from aioflux import sync
from aioflux.testing import GCSServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CALLS", "Growth", "Scenario", "measure"]

MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One call, the bytes that it moves, and the limit of its peak memory."""

    call: str
    """Function of this module; one of `CALLS`."""
    size_bytes: int
    """Bytes that the call reads or writes."""
    limit_bytes: int
    """Limit of the peak minus the memory before the call."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Memory and time of one scenario."""

    idle_bytes: int
    peak_bytes: int
    seconds: float

    @property
    def grown_bytes(self) -> int:
        """Peak minus the memory before the call."""
        return self.peak_bytes - self.idle_bytes


SCENARIOS = (
    Scenario(call="get", size_bytes=GIB, limit_bytes=GIB * 11 // 10 + 64 * MIB),
    Scenario(call="sync_get", size_bytes=GIB, limit_bytes=GIB * 11 // 10 + 64 * MIB),
    Scenario(call="open_reader", size_bytes=GIB, limit_bytes=256 * MIB),
    Scenario(call="get_many", size_bytes=GIB, limit_bytes=384 * MIB),
    Scenario(call="open_writer", size_bytes=4 * GIB, limit_bytes=256 * MIB),
    Scenario(call="sync_open_writer", size_bytes=4 * GIB, limit_bytes=256 * MIB),
)
"""All scenarios. `get` returns the whole object, so its limit is above the size of the object."""


async def get(store: aioflux.Store, size_bytes: int) -> int:
    """Read one object with one call."""
    return len(await store.get("object"))


async def open_reader(store: aioflux.Store, size_bytes: int) -> int:
    """Read one object piece by piece."""
    count = 0
    async with store.open_reader("object") as reader:
        while piece := await reader.read(MIB):
            count += len(piece)
    return count


async def get_many(store: aioflux.Store, size_bytes: int) -> int:
    """Read one object of 1 MiB repeatedly, `size_bytes` in all."""
    keys = ["small"] * (size_bytes // MIB)
    return sum([len(data) async for _, data in store.get_many(keys)])


async def open_writer(store: aioflux.Store, size_bytes: int) -> int:
    """Write one object piece by piece."""
    piece = bytes(MIB)
    async with store.open_writer("written") as writer:
        for _ in range(size_bytes // MIB):
            await writer.write(piece)
    return writer.meta.size


def sync_get(store: sync.Store, size_bytes: int) -> int:
    """Read one object with one blocking call."""
    return len(store.get("object"))


def sync_open_writer(store: sync.Store, size_bytes: int) -> int:
    """Write one object piece by piece, blocking."""
    piece = bytes(MIB)
    with store.open_writer("written") as writer:
        for _ in range(size_bytes // MIB):
            writer.write(piece)
    return writer.meta.size


CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (get, open_reader, get_many, open_writer, sync_get, sync_open_writer)
}


def _resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def _run_async(scenario: Scenario, url: str) -> Growth:
    async with aioflux.open_store("gs://bucket", endpoint_url=url) as store:
        await store.put("idle", b"1")
        await store.get("idle")
        idle, begun = _resident("VmRSS"), time.monotonic()
        count = await CALLS[scenario.call](store, scenario.size_bytes)
    return _growth(scenario, count, idle, begun)


def _run_sync(scenario: Scenario, url: str) -> Growth:
    with sync.open_store("gs://bucket", endpoint_url=url) as store:
        store.put("idle", b"1")
        store.get("idle")
        idle, begun = _resident("VmRSS"), time.monotonic()
        count = CALLS[scenario.call](store, scenario.size_bytes)
    return _growth(scenario, count, idle, begun)


def _growth(scenario: Scenario, count: int, idle: int, begun: float) -> Growth:
    if count != scenario.size_bytes:
        raise RuntimeError(f"{scenario.call} moved {count} bytes, not {scenario.size_bytes}")
    seconds = time.monotonic() - begun
    return Growth(idle_bytes=idle, peak_bytes=_resident("VmHWM"), seconds=seconds)


def measure(scenario: Scenario) -> Growth:
    """Run one scenario in a separate process, and the server in another."""
    with (
        tempfile.TemporaryDirectory(prefix="aioflux-memory-") as root,
        # On disk, because an object of 4 GiB may not fit into memory.
        GCSServerProcess(buckets=("bucket",), root=root, arguments=("--no-md5",)) as server,
    ):
        if "writer" not in scenario.call:
            _fill(server.url, scenario)
        command = [sys.executable, "-m", "perf.memory", "--one", json.dumps(asdict(scenario))]
        done = subprocess.run(  # noqa: S603  our own command
            [*command, server.url], capture_output=True, text=True, check=True
        )
    return Growth(**json.loads(done.stdout))


def _fill(url: str, scenario: Scenario) -> None:
    with sync.open_store("gs://bucket", endpoint_url=url) as store:
        if scenario.call == "get_many":
            store.put("small", bytes(MIB))
            return
        with store.open_writer("object") as writer:
            for _ in range(scenario.size_bytes // MIB):
                writer.write(bytes(MIB))


def main() -> None:
    """Parse the command line, run the scenarios and print their peaks."""
    parser = argparse.ArgumentParser(prog="perf.memory", description=__doc__.splitlines()[0])
    parser.add_argument("calls", nargs="*", metavar="call", help=", ".join(CALLS))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        scenario, url = Scenario(**json.loads(args.one[0])), args.one[1]
        is_sync = scenario.call.startswith("sync")
        growth = _run_sync(scenario, url) if is_sync else asyncio.run(_run_async(scenario, url))
        print(json.dumps(asdict(growth)))
        return
    print(f"{'call':<18} {'moves':>9} {'idle':>9} {'peak':>9} {'above':>9} {'limit':>9}")
    failed = False
    for scenario in SCENARIOS:
        if args.calls and scenario.call not in args.calls:
            continue
        growth = measure(scenario)
        numbers = (scenario.size_bytes, growth.idle_bytes, growth.peak_bytes, growth.grown_bytes)
        row = " ".join(f"{number / MIB:>5,.0f} MiB" for number in (*numbers, scenario.limit_bytes))
        is_over = growth.grown_bytes > scenario.limit_bytes
        failed |= is_over
        verdict = "OVER" if is_over else "ok"
        print(f"{scenario.call:<18} {row} {verdict:>5} in {growth.seconds:.1f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()

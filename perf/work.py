"""What each contender is asked to do, and the process that does it.

`python -m perf.work '<json>'` does one piece of work and prints one JSON line of what it took.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import uvloop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measurement of one contender."""

    peer: str
    """Module below `perf.peers`."""
    operation: str
    """Its function: `get_many` or `put_many`."""
    url: str
    """The server."""
    bucket: str = "perf"
    """The bucket on it."""
    size_bytes: int
    """Size of each object, in bytes."""
    num_objects: int
    """Requests to make."""
    num_keys: int = 64
    """Different objects; their keys come round again and again."""
    in_flight: int = 64
    """Requests under way at once."""

    def each_key(self) -> Iterator[str]:
        """Yield the key of each request."""
        return (f"{self.size_bytes}/{index % self.num_keys}" for index in range(self.num_objects))

    def body(self) -> bytes:
        """Return the bytes of one object."""
        return bytes(self.size_bytes)


async def bounded(one: Callable[[str], Awaitable[int]], work: Work) -> int:
    """Sum `await one(key)` over the keys, with `in_flight` under way at once."""
    keys = work.each_key()

    async def worker() -> int:
        total = 0
        for key in keys:
            total += await one(key)
        return total

    return sum(await asyncio.gather(*(worker() for _ in range(work.in_flight))))


def measure(work: Work) -> dict[str, float]:
    """Do the work and return seconds, CPU seconds, bytes and peak memory.

    A few requests go before, so that imports and the first look at things are not measured.
    """
    operation = getattr(importlib.import_module(f"perf.peers.{work.peer}"), work.operation)
    loop_factory = None if work.peer == "google" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(operation(replace(work, num_objects=work.in_flight)))
        begun, cpu_begun = time.perf_counter(), time.process_time()
        num_bytes = runner.run(operation(work))
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    if num_bytes != work.size_bytes * work.num_objects:
        raise RuntimeError(f"{work.peer} moved {num_bytes} bytes: {work}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "num_bytes": num_bytes,
        "peak_bytes": peak,
    }


def main() -> None:
    """Do the work that the first argument describes."""
    work = Work(**json.loads(sys.argv[1]))
    print(json.dumps({**asdict(work), **measure(work)}))


if __name__ == "__main__":
    main()

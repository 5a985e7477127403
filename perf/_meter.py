"""Figures of the measured part of a work: wall and CPU time, page faults, requests and memory.

An operation that opens a client passes its transfers to `steady`, so that only these are measured.
Otherwise the whole operation is measured. Linux only.
"""

from __future__ import annotations

import os
import re
import resource
import time
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from perf.work import Work

__all__ = ["METER", "Figures", "cpu_seconds_of", "resident_bytes", "steady"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Counters of this process and of the server; differences are the figures of a part."""

    seconds: float
    cpu_seconds: float
    """CPU time of this process, and of its children that have exited."""
    server_cpu_seconds: float
    num_faults: int
    """Page faults of this process without I/O."""
    num_requests: int
    """Requests that the server received; 0 if it does not count them."""


class Meter:
    """The beginning and the end of the measured part in this process."""

    def __init__(self) -> None:
        self._begun: Figures | None = None
        self._ended: Figures | None = None
        self._peak_bytes = 0

    def begin(self, work: Work) -> None:
        """Begin the measured part; an earlier beginning and end have no effect any more."""
        # Reset VmHWM, the maximum resident size. ru_maxrss of getrusage cannot be reset, and starts
        # with the value of the parent process.
        Path("/proc/self/clear_refs").write_text("5")
        self._ended = None
        self._begun = _figures(work, num_requests=_num_requests(work))

    def end(self, work: Work) -> None:
        """End the measured part, unless it has ended."""
        if self._ended is None:
            seconds = time.perf_counter()
            figures = _figures(work, num_requests=0)
            self._peak_bytes = resident_bytes("VmHWM")
            self._ended = replace(figures, seconds=seconds, num_requests=_num_requests(work))

    def figures(self) -> tuple[Figures, int]:
        """Return the figures of the measured part, and its maximum of the resident memory."""
        assert self._begun is not None
        assert self._ended is not None
        begun, ended = asdict(self._begun), asdict(self._ended)
        figures = {name: ended[name] - begun[name] for name in begun}
        # The second request for the counter is counted, too.
        figures["num_requests"] = max(0, figures["num_requests"] - 1)
        return Figures(**figures), self._peak_bytes


METER = Meter()
"""The meter of this process. Not in `perf.work`, which is `__main__` in a contender's process."""


async def steady(move: Callable[[Work], Awaitable[int]], work: Work) -> int:
    """Return the bytes of `await move(work)`, which is the measured part.

    Before it, the objects of `work.opening()` are moved, so that connections are open.
    """
    if work.has_opening:
        return await move(work)
    await move(work.opening())
    METER.begin(work)
    num_bytes = await move(work)
    METER.end(work)
    return num_bytes


def resident_bytes(field: str, pid: int | str = "self") -> int:
    """Return VmRSS or VmHWM of a process, by default of this one."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _figures(work: Work, *, num_requests: int) -> Figures:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Figures(
        server_cpu_seconds=cpu_seconds_of(work.server_pids),
        num_requests=num_requests,
        num_faults=own.ru_minflt,
        cpu_seconds=time.process_time() + children.ru_utime + children.ru_stime,
        seconds=time.perf_counter(),
    )


def cpu_seconds_of(pids: tuple[int, ...]) -> float:
    """Return the CPU time of other processes, from /proc, with a resolution of 0.01 s."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def _num_requests(work: Work) -> int:
    """Return the number of requests that the server received, with this one; 0 if unknown."""
    if not work.counter:
        return 0
    with urllib.request.urlopen(work.counter) as answer:  # noqa: S310  http to our own server
        found = re.search(rb"requests\s+\d+ \d+ (\d+)", answer.read())
    assert found is not None
    return int(found[1])

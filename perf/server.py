"""`python -m perf.server`: speed of the embedded server, to check that it is not the bottleneck.

Runs `wrk` with one thread against a server in a separate process. Prints the rate, and the CPU time
of the server for each request, which depends less on other load of the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from aioflux.testing import GCSServerProcess

PUT = 'wrk.method = "PUT"\nwrk.body = string.rep("x", {size})\n'
COMPLETED = re.compile(r"(\d+) requests in ([\d.]+)(ms|s|m),")
ERRORS = re.compile(r"Socket errors: .*|Non-2xx.*")
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row of the table."""

    method: str
    size_bytes: int
    connections: int = 16
    arguments: tuple[str, ...] = ()
    """Arguments of the server."""

    @property
    def name(self) -> str:
        """Label of the row."""
        kib = self.size_bytes >> 10
        size = f"{kib >> 10} MiB" if kib >= 1024 else f"{kib} KiB"
        return " ".join((self.method, size, *self.arguments))


SCENARIOS = (
    Scenario(method="GET", size_bytes=1 << 10),
    Scenario(method="GET", size_bytes=100 << 10),
    Scenario(method="GET", size_bytes=1 << 20),
    Scenario(method="GET", size_bytes=8 << 20),
    Scenario(method="PUT", size_bytes=100 << 10),
    Scenario(method="PUT", size_bytes=8 << 20, connections=4),
    Scenario(method="PUT", size_bytes=8 << 20, connections=4, arguments=("--no-md5",)),
    Scenario(method="PUT", size_bytes=32 << 20, connections=4, arguments=("--no-md5",)),
)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(scenario: Scenario, seconds: float) -> str:
    """Run one scenario and return its row."""
    with (
        GCSServerProcess(buckets=("perf",), arguments=scenario.arguments) as server,
        tempfile.NamedTemporaryFile("w", suffix=".lua") as script,
    ):
        url = f"{server.url}/perf/k"
        request = urllib.request.Request(url, bytes(scenario.size_bytes), method="PUT")  # noqa: S310
        urllib.request.urlopen(request).close()  # noqa: S310
        command = ["wrk", "-t1", f"-c{scenario.connections}", f"-d{seconds:g}s", "--timeout", "30"]
        if scenario.method == "PUT":
            script.write(PUT.format(size=scenario.size_bytes))
            script.flush()
            command += ["-s", script.name]
        before = cpu_seconds(server.pid)
        done = subprocess.run(  # noqa: S603
            [*command, url], capture_output=True, text=True, check=True
        )
        spent = cpu_seconds(server.pid) - before
    completed = COMPLETED.search(done.stdout)
    if completed is None:
        raise RuntimeError(f"wrk printed no total:\n{done.stdout}")
    count = int(completed[1])
    rate = count / (float(completed[2]) * UNITS[completed[3]])
    errors = "  ".join(ERRORS.findall(done.stdout))
    return (
        f"{scenario.name:<22} {rate:>9,.0f} {rate * scenario.size_bytes / 1e9:>7.2f} "
        f"{1e6 * spent / max(1, count):>9,.0f}  {errors}"
    ).rstrip()


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(prog="perf.server", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each scenario")
    parser.add_argument("--only", default="", help="run scenarios whose name contains this text")
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("perf.server: wrk is missing (apt install wrk)")
    print(f"{'scenario':<22} {'requests/s':>9} {'GB/s':>7} {'us CPU':>9}")
    for scenario in SCENARIOS:
        if args.only in scenario.name:
            print(measure(scenario, args.seconds), flush=True)


if __name__ == "__main__":
    main()

"""Python scripts that run in separate processes and use a test server."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server import Hook

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer
    from aioflux.testing.gcs_server import Request

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 1000 if "AIOFLUX_TEST_ROUNDS" in os.environ else 250

IGNORE_FORK_WARNING = "ignore:This process:DeprecationWarning"
"""Python's option `-W` for a script that forks although it has threads (Python 3.12 and later)."""

PRELUDE = """
import os, sys, threading, warnings
warnings.simplefilter("error")
import aioflux, aioflux.sync
from tests.bridge.patience import PATIENT
num_loops = int(os.environ.get("AIOFLUX_TEST_NUM_LOOPS", "1"))
options = aioflux.TransferOptions(
    range_size_bytes=2 << 20,
    part_size_bytes=5 << 20,
    max_buffered_bytes=10 << 20,
    num_loops=num_loops,
)
def assert_spread():
    # These threads start with the first body that is sent or received on another loop.
    names = {thread.name for thread in threading.enumerate()}
    assert ("aioflux-loop-3" in names) == (num_loops == 3), names
def give_token():
    return "token"  # with https, requests need credentials
settings = {"endpoint_url": sys.argv[1], "timeouts": PATIENT}
if sys.argv[1].startswith("https"):
    settings["credentials"] = give_token
store = aioflux.sync.open_store("gs://bucket/p", transfer=options, **settings)
def say(*words):
    print(*words, flush=True)
"""


@contextmanager
def running(script: str, server: GCSServer, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script with the server's url, in a separate process group."""
    trust = {"SSL_CERT_FILE": str(server.ca_file)} if server.url.startswith("https") else {}
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + script, server.url, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **trust, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(process: subprocess.Popen[str], *, status: int = 0) -> list[str]:
    """Wait for the exit of a script, check status and stderr, and return its remaining output."""
    try:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler prints the stack of each thread
        out, err = process.communicate()
    assert (process.returncode, err) == (status, ""), out + err
    return out.splitlines()


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a script prints.

    Raises:
        AssertionError: The script has ended.
    """
    assert process.stdout is not None
    if not (text := process.stdout.readline()):
        raise AssertionError(process.communicate(timeout=LIMIT_SECONDS)[1])
    return text.strip()


def tell(process: subprocess.Popen[str], words: str = "") -> None:
    """Send a line to the standard input of a script."""
    assert process.stdin is not None
    process.stdin.write(f"{words}\n")
    process.stdin.flush()


def wait_until_idle(server: GCSServer) -> None:
    """Wait until the server has finished the requests of killed processes."""
    until = time.monotonic() + LIMIT_SECONDS
    while server.stats.connections_open or server.stats.total.in_flight:
        assert time.monotonic() < until
        time.sleep(0.002)


class Watch(Hook):
    """Waits for requests to arrive at a server."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

    def before(self, request: Request) -> None:
        self._arrived.put((request.match.operation, request.target))

    def forget(self) -> None:
        """Ignore the requests that have arrived so far."""
        with suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()

    def wait_for(self, pattern: str, word: str = "") -> None:
        """Wait for a request whose operation matches a pattern and whose target contains a word.

        Raises:
            TimeoutError: No such request arrives.
        """
        until = time.monotonic() + LIMIT_SECONDS
        while True:
            try:
                operation, target = self._arrived.get(timeout=until - time.monotonic())
            except (queue.Empty, ValueError):
                raise TimeoutError(f"no {pattern} of {word!r}") from None
            if fnmatchcase(operation, pattern) and word.encode() in target:
                return

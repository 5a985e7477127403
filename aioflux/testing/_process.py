"""GCS server in a separate process, which runs the command `aioflux serve`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Self

import uvloop

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing.gcs_server import GCSServer

_READY_PREFIX = "Serving on "
_STOP_SECONDS = 60.0
_EXIT_STATUSES = {signal.SIGTERM: 0, signal.SIGINT: 128 + signal.SIGINT}


class GCSServerProcess:
    """GCS server in a separate process, for benchmarks and for tests that kill the server.

    The process exits at the end of the `with` block, or when its parent process exits.

    Args:
        buckets: Buckets to create when the server starts.
        root: Directory in which objects survive a restart; None keeps objects in memory.
        port: Port to listen on; 0 chooses a free port.
        arguments: More command-line options for `aioflux serve`.
        start_seconds: Time after which `start` fails if the server is not listening yet.
    """

    def __init__(
        self,
        *,
        buckets: Iterable[str] = (),
        root: str | Path | None = None,
        port: int = 0,
        arguments: Sequence[str] = (),
        start_seconds: float = 120.0,
    ) -> None:
        self.url = ""
        """Root url of the server; empty until the server has started."""
        self._command = [sys.executable, "-m", "aioflux", "serve", "--until-stdin-closes"]
        self._command += ["--port", str(port), *arguments]
        for bucket in buckets:
            self._command += ["--bucket", bucket]
        if root is not None:
            self._command += ["--root", str(root)]
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server.

        Raises:
            RuntimeError: The server is not running.
        """
        return self._running().pid

    def start(self) -> None:
        """Start the process, and wait until the server accepts connections.

        Raises:
            RuntimeError: The server is already running, or it exited or was not ready in time.
        """
        if self._process is not None:
            raise RuntimeError("the server is already running")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_close`
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        line = self._first_line(self._process)
        if not line.startswith(_READY_PREFIX):
            self._process.kill()
            status = self._process.wait()
            self._errors.seek(0)
            errors = self._errors.read().decode(errors="replace").strip()
            self._close()
            raise RuntimeError(f"the server did not start (status {status}): {errors or line!r}")
        self.url = line.removeprefix(_READY_PREFIX).strip()

    def stop(self) -> int:
        """Terminate the process, and return its exit status; 0 if it is not running."""
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            status = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._close()
        return status

    def signal(self, number: int) -> int:
        """Send a signal that ends the process (SIGKILL, SIGINT), and return the exit status.

        Raises:
            RuntimeError: The server is not running.
        """
        process = self._running()
        process.send_signal(number)
        status = process.wait(_STOP_SECONDS)
        self._close()
        return status

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process

    def _first_line(self, process: subprocess.Popen[bytes]) -> str:
        """Read the first line of output; kill the process if none arrives in time."""
        assert process.stdout is not None
        timer = threading.Timer(self._start_seconds, process.kill)
        timer.start()
        try:
            return process.stdout.readline().decode()
        finally:
            timer.cancel()

    def _close(self) -> None:
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        pipes = () if process is None else (process.stdin, process.stdout)
        for stream in (*pipes, errors):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(server: GCSServer, ready: Callable[[], None], *, until_stdin_closes: bool = False) -> int:
    """Serve from the main thread until the process receives SIGINT or SIGTERM.

    Args:
        server: Server to run.
        ready: Called once the server accepts connections.
        until_stdin_closes: Also stop at the end of standard input. If standard input is a pipe from
            the parent process, it ends when the parent process exits.

    Returns:
        The exit status: 0 after SIGTERM or the end of standard input, 130 after Ctrl-C.

    Raises:
        OSError: The address cannot be bound.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server, ready, until_stdin_closes=until_stdin_closes))


async def _serve(server: GCSServer, ready: Callable[[], None], *, until_stdin_closes: bool) -> int:
    loop = asyncio.get_running_loop()
    exit_status: asyncio.Future[int] = loop.create_future()

    def stop(status: int) -> None:
        if not exit_status.done():
            exit_status.set_result(status)

    def read_stdin() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin)
            stop(0)

    for number, status in _EXIT_STATUSES.items():
        loop.add_signal_handler(number, stop, status)
    async with server:
        if until_stdin_closes:
            loop.add_reader(sys.stdin, read_stdin)
        ready()
        return await exit_status

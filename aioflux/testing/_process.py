"""The GCS server in its own process: `GCSServerProcess` runs `aioflux serve`, which is `serve`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import IO, TYPE_CHECKING, Self

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from aioflux.testing.gcs_server import GCSServer

_READY = "Serving on "
_STOP_SECONDS = 60.0
_EXIT_STATUSES = {signal.SIGTERM: 0, signal.SIGINT: 128 + signal.SIGINT}


class GCSServerProcess:
    """A server in its own process, for benchmarks and for tests that kill it.

    The process ends with the `with` block, or with its parent.

    Args:
        buckets: Buckets to create at the start.
        root: Directory that keeps objects between runs; None keeps them in memory.
        port: Port to listen on; 0 chooses a free one.
        arguments: Further options of `aioflux serve`.
        start_seconds: Time until it has to listen.
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
        """Root url of the server, once it runs."""
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
        """Id of the process.

        Raises:
            RuntimeError: It is not running.
        """
        return self._running().pid

    def start(self) -> None:
        """Start the process; returns when it listens.

        Raises:
            RuntimeError: It is running, has ended at once or did not listen in time.
        """
        if self._process is not None:
            raise RuntimeError("the server is running")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_close`
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        line = self._first_line(self._process)
        if not line.startswith(_READY):
            self._process.kill()
            status = self._process.wait()
            self._errors.seek(0)
            errors = self._errors.read().decode(errors="replace").strip()
            self._close()
            raise RuntimeError(f"the server did not start (status {status}): {errors or line!r}")
        self.url = line.removeprefix(_READY).strip()

    def stop(self) -> int:
        """Terminate the process, if it runs; return its exit status."""
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
        """Send a signal that ends the process (SIGKILL, SIGINT, ...); return its exit status.

        Raises:
            RuntimeError: It is not running.
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
        """Read a line, or a part of it if the process ends; it is killed if the time does."""
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
    """Serve from the main thread until SIGINT or SIGTERM.

    Args:
        server: Server to run.
        ready: Called once the socket listens.
        until_stdin_closes: Stop at the end of standard input, too: when the parent process ends.

    Returns:
        The exit status: 0 after SIGTERM or the end of standard input, 130 after Ctrl-C.

    Raises:
        OSError: The address cannot be bound.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server, ready, until_stdin_closes=until_stdin_closes))


async def _serve(server: GCSServer, ready: Callable[[], None], *, until_stdin_closes: bool) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin)
            end(0)

    for number, status in _EXIT_STATUSES.items():
        loop.add_signal_handler(number, end, status)
    async with server:
        if until_stdin_closes:
            loop.add_reader(sys.stdin, read)
        ready()
        return await ended

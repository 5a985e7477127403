"""Servers of other projects, as processes that exit when their parent exits."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from perf.servers._ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

__all__ = ["ServerProcess", "find_program", "free_ports", "own_host"]

_START_SECONDS = 200.0
_PR_SET_PDEATHSIG = 1


def find_program(name: str) -> str:
    """Return the path of a program that this environment installs, or skip the test."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"the program {name} is missing; the `test` extra installs it")
    return found


def own_host() -> str:
    """Return an address of this machine on which only this process listens.

    On 127.0.0.1 a port may be used by another process as soon as it is closed.
    """
    if sys.platform != "linux":  # other systems have only 127.0.0.1
        return "127.0.0.1"
    pid = os.getpid()
    return f"127.{64 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerProcess:
    """One server with its own directory, for the length of a `with` block.

    Attributes:
        url: Root url.
        directory: Directory for its files, removed at its end.
        closing: Resources that are closed at its end.
    """

    url: str

    def __init__(
        self,
        command: Callable[[Path], Sequence[str]],
        url: str,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Configure a server.

        Args:
            command: Returns program and arguments for a directory.
            url: Root url.
            env: Environment of the process; that of this process by default.
        """
        self.url = url
        self._command = command
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self.closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="aioflux-server-"))
        try:
            with (self.directory / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    list(self._command(self.directory)),
                    cwd=self.directory,
                    env=None if self._env is None else dict(self._env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                )
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process and remove its directory."""
        self.closing.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection to the server that is not open yet."""
        return http.client.HTTPConnection(self.url.partition("://")[2], timeout=30)

    def is_ready(self, response: http.client.HTTPResponse) -> bool:
        """Return whether a response to `GET /` is one of a server that is ready."""
        return response.status < 500

    def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            connection = self.connection()
            with contextlib.closing(connection), contextlib.suppress(OSError):
                connection.request("GET", "/")
                with connection.getresponse() as response:
                    if self.is_ready(response):
                        return
            time.sleep(0.05)
        tail = (self.directory / "log").read_bytes()[-2000:].decode(errors="replace")
        raise RuntimeError(f"{self.url} did not start: {tail}")

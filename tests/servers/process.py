"""Servers of other projects, as processes that end with whoever started them."""

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

from perf.servers._kept import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

__all__ = ["ServerProcess", "find_program", "free_ports", "own_host"]

_START_SECONDS = 200.0
_PR_SET_PDEATHSIG = 1


def find_program(name: str) -> str:
    """Return the path of a program that a package of this environment brings, or skip the test."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"the program {name} is missing; the `test` extra brings it")
    return found


def own_host() -> str:
    """Return an address of this machine on which this process alone listens.

    Elsewhere a port that was closed may be given to another process at any moment.
    """
    if sys.platform != "linux":  # where 127.0.0.1 is the only one
        return "127.0.0.1"
    pid = os.getpid()
    return f"127.{64 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerProcess:
    """One server, with a directory of its own, from `with` to its end.

    Attributes:
        url: Where it is asked.
        directory: What it may write in; gone at its end.
        closing: What is closed when it ends.
    """

    url: str

    def __init__(
        self,
        command: Callable[[Path], Sequence[str]],
        url: str,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Take what starts it; start nothing.

        Args:
            command: Returns program and arguments for a directory.
            url: Where it answers.
            env: Its environment; this process's own by default.
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
        """Return a connection to it that is not open yet."""
        return http.client.HTTPConnection(self.url.partition("://")[2], timeout=30)

    def is_ready(self, answer: http.client.HTTPResponse) -> bool:
        """Tell whether an answer to `GET /` is that of a server that works."""
        return answer.status < 500

    def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            connection = self.connection()
            with contextlib.closing(connection), contextlib.suppress(OSError):
                connection.request("GET", "/")
                with connection.getresponse() as answer:
                    if self.is_ready(answer):
                        return
            time.sleep(0.05)
        tail = (self.directory / "log").read_bytes()[-2000:].decode(errors="replace")
        raise RuntimeError(f"{self.url} did not begin to answer: {tail}")

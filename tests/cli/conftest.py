"""Fixtures that run the command `aioflux`, in this process or in a separate one, with a server."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import pytest

from aioflux.testing import GCSServer
from tests.command import run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROGRAM = [sys.executable, "-m", "aioflux"]
FAR_SECONDS = 120.0
"""Longer than any process takes, also on a busy machine."""


class Bucket:
    """A bucket of one test, with direct access to its objects."""

    def __init__(self, server: GCSServer) -> None:
        self.server = server
        self.name = f"test-{uuid.uuid4().hex}"
        self.uri = f"gs://{self.name}"
        server.create_bucket(self.name)

    def put(self, key: str, data: bytes = b"data") -> None:
        self.server.put(self.name, key, data)

    def get(self, key: str) -> bytes:
        return self.server.get(self.name, key)

    def keys(self) -> list[str]:
        return self.server.keys(self.name)

    def contents(self) -> dict[str, bytes]:
        return {key: self.get(key) for key in self.keys()}

    def num_uploads(self) -> int:
        uploads = self.server.state.multipart_uploads.values()
        return sum(upload.bucket == self.name for upload in uploads)


@pytest.fixture(scope="session")
def cli_server() -> Iterator[GCSServer]:
    with GCSServer() as server:
        yield server


@pytest.fixture
def bucket(cli_server: GCSServer) -> Bucket:
    return Bucket(cli_server)


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@pytest.fixture
def aioflux(cli_server: GCSServer, capfd, monkeypatch, tmp_path) -> Callable[..., Ended]:
    """Run the command in this process, in an empty directory."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cli_server.url)
    monkeypatch.setenv("AIOFLUX_DEBUG", "0")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments: object) -> Ended:
        capfd.readouterr()
        status = run_command([str(each) for each in arguments])
        for stream in (sys.stdout, sys.stderr):  # the command set `errors`, also for reading
            stream.reconfigure(errors="backslashreplace")
        captured = capfd.readouterr()
        return Ended(status, captured.out, captured.err)

    return run


@pytest.fixture
def give_input(tmp_path: Path) -> Iterator[Callable[[bytes], None]]:
    """Set the standard input of the next command in this process."""
    before = os.dup(0)

    def give(data: bytes) -> None:
        path = tmp_path / "input"
        path.write_bytes(data)
        with path.open("rb") as file:
            os.dup2(file.fileno(), 0)

    yield give
    os.dup2(before, 0)
    os.close(before)


@pytest.fixture
def environment(cli_server: GCSServer) -> dict[str, str]:
    """The environment of a process that uses the server."""
    return {**os.environ, "STORAGE_EMULATOR_HOST": cli_server.url}


@pytest.fixture
def command(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run the command in a separate process."""

    def run(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*PROGRAM, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            env=environment,
            timeout=FAR_SECONDS,
            check=False,
        )

    return run


class Screen:
    """Makes a pseudo-terminal the stderr of commands in this process, and records its text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.text = ""

    def __enter__(self) -> Self:
        ours, theirs = pty.openpty()
        self._stream = open(theirs, "w", encoding="utf-8")
        self._reading = threading.Thread(target=self._read, args=(ours,))
        self._reading.start()
        for name, value in (("TERM", "xterm"), ("COLUMNS", "100")):
            self._monkeypatch.setenv(name, value)
        self._stderr, sys.stderr = sys.stderr, self._stream
        return self

    def _read(self, fd: int) -> None:
        data = b""
        with suppress(OSError):  # the other end is closed
            while piece := os.read(fd, 65536):
                data += piece
        os.close(fd)
        self.text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))

    def __exit__(self, *_: object) -> None:
        sys.stderr = self._stderr
        self._stream.close()
        self._reading.join()


def write_files(root: Path, contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def read_files(root: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory, including temporary files."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }

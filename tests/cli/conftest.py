"""The command, run here or in a process of its own, against one server."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROGRAM = [sys.executable, "-m", "aioflux"]
FAR_SECONDS = 120.0
"""By when a process has long done what is waited for, on a machine that stands still, too."""


class Bucket:
    """A bucket of one test, with a back door."""

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
    from aioflux.cli._app import run_app

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cli_server.url)
    monkeypatch.setenv("AIOFLUX_DEBUG", "0")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments: object) -> Ended:
        capfd.readouterr()
        status = run_app([str(each) for each in arguments])
        for stream in (sys.stdout, sys.stderr):  # run_app set them up to write, and these are read
            stream.reconfigure(errors="backslashreplace")
        captured = capfd.readouterr()
        return Ended(status, captured.out, captured.err)

    return run


@pytest.fixture
def environment(cli_server: GCSServer) -> dict[str, str]:
    """What a process needs to ask the server."""
    return {**os.environ, "STORAGE_EMULATOR_HOST": cli_server.url}


@pytest.fixture
def command(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run the command in a process of its own, as a shell does."""

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


def write_files(root: Path, contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def read_files(root: Path) -> dict[str, bytes]:
    """Every file below a directory, temporary ones too."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }

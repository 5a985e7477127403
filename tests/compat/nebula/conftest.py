"""Nebula on the embedded server, with node daemons that exit with the test."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from aioflux.compat import nebula as nm
from aioflux.errors import AiofluxError
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator

LINGER_SECONDS = 600
"""Longer than any test takes: the tests stop the daemons."""
VARIABLES = (
    "NEBULA_PERSISTENT_STORAGE_PATH",
    "NEBULA_PERSISTENT_TIME_INTERVAL",
    "NEBULA_MEMORY_BUFFER_SIZE",
    "NEBULA_LOCAL_STORAGE_PATH",
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the daemon's socket, for this test alone."""
    directory = Path(tempfile.mkdtemp(prefix="nm-"))
    monkeypatch.setenv("AIOFLUX_NEBULA_DIR", str(directory))
    monkeypatch.setenv("AIOFLUX_NEBULA_LINGER_SECONDS", str(LINGER_SECONDS))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    yield directory
    with suppress(AiofluxError):
        nm.shutdown()
    deadline = time.monotonic() + 120
    while list(directory.rglob("*.sock")):
        assert time.monotonic() < deadline, "a node daemon did not exit"
        time.sleep(0.02)
    while directory.exists():
        with suppress(FileNotFoundError):  # a daemon removes its lock last
            shutil.rmtree(directory)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server


@pytest.fixture
def inside(node: Path) -> str:
    """A storage with a node daemon in this process."""
    return f"memory://{node.name}/run"

"""Servers, and the settings of Ray for its tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioflux import sync
from aioflux.testing import GCSServer

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


@pytest.fixture
def bucket(server: GCSServer) -> Iterator[sync.Store]:
    with sync.open_store("gs://bucket", endpoint_url=server.url) as store:
        yield store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Ray warn: of its own settings, and of files that its processes have open."""
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.filterwarnings("ignore"))

"""Fixtures: a bucket on the embedded server, and a filesystem for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux.integrations.fsspec import GSFileSystem
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def shared() -> Iterator[GCSServer]:
    """A server for all tests of a module; each test has its own bucket."""
    with GCSServer() as server:
        yield server


@pytest.fixture
def bucket(shared: GCSServer, request: pytest.FixtureRequest) -> str:
    """A bucket for one test."""
    name = f"bucket-{len(shared.state.buckets)}"
    shared.create_bucket(name)
    return name


@pytest.fixture
def fs(shared: GCSServer) -> GSFileSystem:
    return GSFileSystem(endpoint_url=shared.url)

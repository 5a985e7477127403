"""Fixtures for pytest: `gcs_server`, `store` and `async_store`. pytest finds them by itself.

    def test_upload(store):  # `aioflux.sync.Store` of an empty bucket
        upload(store.uri)
        assert store.get("result.bin") == b"..."

    async def test_read(async_store):  # `aioflux.Store` of the same bucket
        async with async_store as store: ...

During a test with one of the stores, STORAGE_EMULATOR_HOST names the server: all `gs://` uris lead
to it. `-p no:aioflux` turns the fixtures off.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux import sync
    from aioflux.store import Store
    from aioflux.testing import GCSServer

_numbers: Final = count(1)


@pytest.fixture(scope="session", name="gcs_server")
def _gcs_server() -> Iterator[GCSServer]:
    """A server with the API of Google Cloud Storage; one for the session."""
    from aioflux.testing import GCSServer

    with GCSServer() as server:
        yield server


@pytest.fixture(name="_aioflux_bucket")
def _bucket(gcs_server: GCSServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a new bucket, whose objects stay in memory until the session ends."""
    name = f"test-{next(_numbers)}"
    gcs_server.create_bucket(name)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.url)
    yield name
    gcs_server.faults.clear()
    gcs_server.state.denied_permissions.clear()


@pytest.fixture(name="store")
def _store(_aioflux_bucket: str) -> Iterator[sync.Store]:
    """A blocking store of an empty bucket; closed after the test."""
    from aioflux.sync import open_store

    with open_store(f"gs://{_aioflux_bucket}") as store:
        yield store


@pytest.fixture(name="async_store")
def _async_store(_aioflux_bucket: str) -> Store:
    """An asynchronous store of the bucket of `store`, which `async with` opens and closes."""
    from aioflux.store import open_store

    return open_store(f"gs://{_aioflux_bucket}")

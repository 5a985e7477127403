"""Fixtures: one server of each kind for a module. Each test has its own prefix.

The objects are deleted with the server of a module; otherwise they would use more than 1 GiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.gateway import Gateway
from tests.quick_collection import quick_collection
from tests.store.places import OTHER_BUCKET, OTHER_URL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer


@pytest.fixture(scope="module")
def gcs_server() -> Iterator[GCSServer]:
    from aioflux.testing import GCSServer

    with GCSServer(buckets=("bucket",)) as server:
        yield server


@pytest.fixture(scope="module")
def gcs_server_tls() -> Iterator[GCSServer]:
    from aioflux.testing import GCSServer

    with GCSServer(buckets=("bucket",), tls=True) as server:
        yield server


@pytest.fixture(scope="session")
def other_server() -> Iterator[str]:
    """Url of a server that is not in this process."""
    from aioflux.testing import GCSServerProcess

    if OTHER_URL:
        yield OTHER_URL
        return
    with GCSServerProcess(buckets=(OTHER_BUCKET,)) as server:
        yield server.url


@pytest.fixture(scope="session")
def forward_proxy() -> Iterator[Gateway]:
    with Gateway() as gateway:
        yield gateway


@pytest.fixture
def by_proxy(forward_proxy: Gateway, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """Send all requests through a proxy."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name.lower(), raising=False)
        monkeypatch.setenv(name, forward_proxy.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    return forward_proxy


__all__ = ["quick_collection"]

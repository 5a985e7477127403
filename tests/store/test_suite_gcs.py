"""The store's contract on `gs://`, on the embedded server.

All of it with and without a proxy. Over TLS and through the blocking face, and
through all three at once, what differs there: reads and writes of bytes. The blocking face has all
of it on `memory://` and `file://`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux.testing.store_suite import (
    ManyContract,
    ReadContract,
    SuiteCapabilities,
    WriteContract,
    WriterContract,
)
from tests.store.places import GCSPlace, tls_place
from tests.store.suite import OnPlace, PlaceSuite

if TYPE_CHECKING:
    from aioflux.testing import GCSServer
    from tests.faults.gateway import Gateway


class TestGCS(PlaceSuite):
    can = SuiteCapabilities(other_storage_class="NEARLINE")

    @pytest.fixture(autouse=True)
    def set_place(self, gcs_server: GCSServer) -> None:
        self.place = GCSPlace(gcs_server)


class TestGCSBlocking(OnPlace, ManyContract, WriterContract):
    face = "sync"

    @pytest.fixture(autouse=True)
    def set_place(self, gcs_server: GCSServer) -> None:
        self.place = GCSPlace(gcs_server)


class TestTLS(OnPlace, ReadContract, WriteContract, WriterContract):
    @pytest.fixture(autouse=True)
    def set_place(self, gcs_server_tls: GCSServer) -> None:
        self.place = tls_place(gcs_server_tls)


class TestProxy(PlaceSuite):
    @pytest.fixture(autouse=True)
    def set_place(self, gcs_server: GCSServer, by_proxy: Gateway) -> None:
        self.place = GCSPlace(gcs_server)


class TestProxyTLSBlocking(OnPlace, ReadContract, WriterContract):
    face = "sync"

    @pytest.fixture(autouse=True)
    def set_place(self, gcs_server_tls: GCSServer, by_proxy: Gateway) -> None:
        self.place = tls_place(gcs_server_tls)


async def test_the_proxy_is_used(gcs_server: GCSServer, by_proxy: Gateway) -> None:
    """Else the tests above would be those of the data plane."""
    place = GCSPlace(gcs_server)
    before = by_proxy.num_requests["absolute"]
    async with place.open() as store:
        await store.put("a", b"1")
        assert await store.get("a") == b"1"
        assert await store.head("a")
    assert by_proxy.num_requests["absolute"] >= before + 3


async def test_the_proxy_is_used_for_tls(gcs_server_tls: GCSServer, by_proxy: Gateway) -> None:
    place = tls_place(gcs_server_tls)
    before = by_proxy.num_requests["connect"]
    async with place.open() as store:
        await store.put("a", b"1")
        assert await store.get("a") == b"1"
    assert by_proxy.num_requests["connect"] > before

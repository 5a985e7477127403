"""The store's contract on `az://`, on azurite: signed by an account key, and by a SAS token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux._values.uri import parse_uri
from aioflux.testing.store_suite import (
    ReadContract,
    ServerSideContract,
    SuiteCapabilities,
    WriteContract,
    WriterContract,
)
from tests.store.azure_place import AzurePlace, account_sas
from tests.store.places import FlakyPlace
from tests.store.suite import OnPlace, PlaceSuite
from tests.store.test_machine import StoreMachine, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux._services.base import Service
    from tests.servers.azurite import Azurite
    from tests.store.places import Place

AZURE = SuiteCapabilities(
    composes=False,
    has_checksums=False,
    keeps_uploads_apart=False,
    takes_dots=False,
    takes_backslashes=False,
    other_storage_class="Cool",
    page_size=1000,
)


class SmallPagesStore(aioflux.Store):
    """Emulators take 3 ms to write an object, and a page of 5,000 fills slowly."""

    def _open_service(self, config: Any) -> Service:
        service = super()._open_service(config)
        service.capabilities = replace(service.capabilities, page_size=AZURE.page_size)
        return service


class SmallPagesPlace(AzurePlace):
    def open(self, **settings: Any) -> aioflux.Store:
        plain = super().open(**settings)
        return SmallPagesStore(
            parse_uri(plain.uri),
            transfer=plain.transfer,
            retry=plain.retry,
            timeouts=aioflux.Timeouts(),
            endpoint_url=self.endpoint_url,
            credentials=self.credentials,
        )


class TestAzure(PlaceSuite):
    can = AZURE

    @pytest.fixture(autouse=True)
    def set_place(self, azurite: Azurite) -> Iterator[None]:
        self.place = place = SmallPagesPlace(azurite)
        yield
        place.close()


class TestAzureBySAS(OnPlace, ReadContract, ServerSideContract):
    can = AZURE

    @pytest.fixture(autouse=True)
    def set_place(self, azurite: Azurite) -> Iterator[None]:
        self.place = place = AzurePlace(azurite, credentials=account_sas(azurite))
        yield
        place.close()


class TestFlakyAzure(OnPlace, WriteContract, WriterContract, ServerSideContract):
    """One request in ten fails, or its answer is lost, also of writes: what they did is found."""

    can = AZURE

    @pytest.fixture(autouse=True)
    def set_place(
        self,
        azurite: Azurite,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[None]:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", azurite.account)
        monkeypatch.setenv("AZURE_STORAGE_KEY", azurite.key)
        place = AzurePlace(azurite)
        self.place = FlakyPlace(place, seed=request.node.name)
        yield
        place.close()


class TestAzureBlocking(OnPlace, WriterContract):
    can = AZURE
    face = "sync"

    @pytest.fixture(autouse=True)
    def set_place(self, azurite: Azurite) -> Iterator[None]:
        self.place = place = AzurePlace(azurite)
        yield
        place.close()


def test_azure_is_like_a_dict(azurite: Azurite) -> None:
    class AzureMachine(StoreMachine):
        def new_place(self) -> Place:
            place = AzurePlace(azurite)
            self.exit.callback(place.close)
            return place

        def composes(self) -> bool:
            return False

    check(AzureMachine, 4)

"""The store's contract on `memory://`."""

from __future__ import annotations

import pytest

from aioflux.testing.store_suite import SuiteCapabilities
from tests.store.places import MemoryPlace
from tests.store.suite import PlaceSuite


class TestMemory(PlaceSuite):
    can = SuiteCapabilities(other_storage_class="ARCHIVE")

    @pytest.fixture(autouse=True)
    def set_place(self) -> None:
        self.place = MemoryPlace()


class TestMemoryBlocking(TestMemory):
    face = "sync"


class TestMemoryBelowPrefix(PlaceSuite):
    @pytest.fixture(autouse=True)
    def set_place(self) -> None:
        self.place = MemoryPlace("pre fix/é/")

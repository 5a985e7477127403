"""The store's contract where one request in ten fails: nothing of it changes.

All of it on `memory://`; on the others what talks to the service in ways of its own.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux.testing.faults import FlakyStore, random_faults
from aioflux.testing.store_suite import (
    ManyContract,
    ReadContract,
    ServerSideContract,
    WriteContract,
    WriterContract,
)
from tests.store.places import FlakyPlace, GCSPlace, LocalPlace, MemoryPlace
from tests.store.suite import OnPlace, PlaceSuite
from tests.store.test_suite_local import LOCAL

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer


class TestFlakyMemory(PlaceSuite):
    @pytest.fixture(autouse=True)
    def set_place(self, request: pytest.FixtureRequest) -> None:
        self.place = FlakyPlace(MemoryPlace(), seed=request.node.name)


class TestFlakyMemoryBlocking(OnPlace, ReadContract, WriteContract):
    face = "sync"

    @pytest.fixture(autouse=True)
    def set_place(self, request: pytest.FixtureRequest) -> None:
        self.place = FlakyPlace(MemoryPlace(), seed=request.node.name)


class TestFlakyGCS(OnPlace, ManyContract, WriteContract, ServerSideContract):
    @pytest.fixture(autouse=True)
    def set_place(self, gcs_server: GCSServer, request: pytest.FixtureRequest) -> None:
        self.place = FlakyPlace(GCSPlace(gcs_server), seed=request.node.name)


class TestFlakyLocal(OnPlace, ReadContract, WriterContract, ServerSideContract):
    can = LOCAL

    @pytest.fixture(autouse=True)
    def set_place(self, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        self.place = FlakyPlace(LocalPlace(tmp_path / "objects"), seed=request.node.name)


async def test_faults_are_met() -> None:
    """Else the tests above would be those of the places."""
    async with FlakyPlace(MemoryPlace(), seed=0).open() as store:
        for at in range(100):
            await store.put(f"{at}", b"1")
        [service] = store.services
        assert service.num_faults > 5


async def test_the_defaults_are_those_of_open_store() -> None:
    async with FlakyStore("memory://defaults", draw=random_faults(Random(0), share=0)) as store:
        plain = aioflux.open_store("memory://defaults")
        assert (store.transfer, store.retry) == (plain.transfer, plain.retry)
        await plain.aclose()

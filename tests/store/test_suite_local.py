"""The store's contract on `file://`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux.testing.store_suite import SuiteCapabilities
from tests.store.places import LocalPlace
from tests.store.suite import PlaceSuite

if TYPE_CHECKING:
    from pathlib import Path


LOCAL = SuiteCapabilities(
    page_size=1000,
    keeps_metadata=False,
    has_checksums=False,
    takes_any_key=False,
    max_compose_sources=1_000_000,
)


class TestLocal(PlaceSuite):
    can = LOCAL

    @pytest.fixture(autouse=True)
    def set_place(self, tmp_path: Path) -> None:
        self.place = LocalPlace(tmp_path / "objects")


class TestLocalBlocking(TestLocal):
    face = "sync"

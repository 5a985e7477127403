"""The store's contract on a server of another process; `tests.store.places` says which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux.testing.store_suite import SuiteCapabilities
from tests.store.places import OTHER_BUCKET, OTHER_LACKS, RemotePlace
from tests.store.suite import PlaceSuite

if TYPE_CHECKING:
    from collections.abc import Iterator


class TestOtherServer(PlaceSuite):
    can = SuiteCapabilities(**dict.fromkeys(OTHER_LACKS, False))  # type: ignore[arg-type]

    @pytest.fixture(autouse=True)
    def set_place(self, other_server: str) -> Iterator[None]:
        self.place = place = RemotePlace(other_server, OTHER_BUCKET)
        yield
        place.close()

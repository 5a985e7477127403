"""The store's contract on `gs://`, on the embedded server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.store.places import GCSPlace
from tests.store.suite import PlaceSuite

if TYPE_CHECKING:
    from aioflux.testing import GCSServer


class TestGCS(PlaceSuite):
    @pytest.fixture(autouse=True)
    def set_place(self, gcs_server: GCSServer) -> None:
        self.place = GCSPlace(gcs_server)


class TestGCSBlocking(TestGCS):
    face = "sync"

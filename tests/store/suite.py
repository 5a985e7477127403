"""The contract of a store, run on a place of `places.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux.testing import StoreSuite
from aioflux.testing.store_suite import SuiteBase

if TYPE_CHECKING:
    import aioflux
    from tests.store.places import Place


class OnPlace(SuiteBase):
    """The hooks of the suite; a subclass's own fixture sets `place`."""

    place: Place

    def open_store(self, *, transfer: aioflux.TransferOptions) -> aioflux.Store:
        return self.place.open(transfer=transfer)

    def write_back_door(self, key: str, data: bytes) -> None:
        self.place.write(key, data)

    def read_back_door(self, key: str) -> bytes:
        return self.place.read(key)


class PlaceSuite(OnPlace, StoreSuite):
    """The whole suite."""

"""Contract of a store as tests, for every service and wrapper and for both APIs.

    class TestMyStore(StoreSuite):
        def open_store(self, *, transfer): ...
        def write_back_door(self, key, data): ...
        def read_back_door(self, key): ...

    class TestMyStoreBlocking(TestMyStore):
        face = "sync"

A subclass implements the hooks, for which it may use its own fixtures
(`@pytest.fixture(autouse=True)`), and declares the capabilities of the service in `can`. It never
overrides a test. Instead of `StoreSuite` it may derive from `SuiteBase` and some of the contracts.
Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

from aioflux.testing.store_suite._base import SuiteBase, SuiteCapabilities
from aioflux.testing.store_suite._keys import KeyContract
from aioflux.testing.store_suite._list import ListContract
from aioflux.testing.store_suite._many import ManyContract
from aioflux.testing.store_suite._read import ReadContract
from aioflux.testing.store_suite._server_side import ServerSideContract
from aioflux.testing.store_suite._streams import ReaderContract, WriterContract
from aioflux.testing.store_suite._write import WriteContract

__all__ = [
    "KeyContract",
    "ListContract",
    "ManyContract",
    "ReadContract",
    "ReaderContract",
    "ServerSideContract",
    "StoreSuite",
    "SuiteBase",
    "SuiteCapabilities",
    "WriteContract",
    "WriterContract",
]


class StoreSuite(
    ReadContract,
    ManyContract,
    ListContract,
    WriteContract,
    WriterContract,
    ReaderContract,
    ServerSideContract,
    KeyContract,
):
    """Tests of every public method of a store, by operation; see the module."""

"""Tests that every store must pass, for each storage service and for wrappers of a store.

    class TestMyStore(StoreSuite):
        def open_store(self, *, transfer): ...
        def write_back_door(self, key, data): ...
        def read_back_door(self, key): ...

    class TestMyStoreBlocking(TestMyStore):
        face = "sync"

`TestMyStore` tests the asynchronous API and `TestMyStoreBlocking` the blocking API. A subclass of
`StoreSuite` implements the three methods and sets `can` to the capabilities of its service. The
methods may use values that a fixture of the subclass has set (`@pytest.fixture(autouse=True)`). A
subclass never overrides a test. To run some of the tests only, derive from `ReadContract`,
`WriteContract` and so on instead of `StoreSuite`. The tests need pytest and pytest-asyncio.
"""

from __future__ import annotations

from aioflux.testing.store_suite._base import SuiteBase, SuiteCapabilities
from aioflux.testing.store_suite._files import FileContract
from aioflux.testing.store_suite._keys import KeyContract
from aioflux.testing.store_suite._list import ListContract
from aioflux.testing.store_suite._many import ManyContract
from aioflux.testing.store_suite._read import ReadContract
from aioflux.testing.store_suite._server_side import ServerSideContract
from aioflux.testing.store_suite._streams import ReaderContract, WriterContract
from aioflux.testing.store_suite._write import WriteContract

__all__ = [
    "FileContract",
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
    FileContract,
    ServerSideContract,
    KeyContract,
):
    """Tests of every public method of a store. The docstring of the module has an example."""

"""The contract of a store, as tests: every service and wrapper passes it, through both faces.

    class TestMyStore(StoreSuite):
        def open_store(self, *, transfer): ...
        def write_back_door(self, key, data): ...
        def read_back_door(self, key): ...

    class TestMyStoreBlocking(TestMyStore):
        face = "sync"

A subclass fills the hooks, for which it may use fixtures of its own
(`@pytest.fixture(autouse=True)`), and declares in `can` what the service cannot do. It never
overrides a test. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

from aioflux.testing.store_suite import _assertions  # noqa: F401  before what it is about
from aioflux.testing.store_suite._base import SuiteCapabilities
from aioflux.testing.store_suite._keys import KeyContract
from aioflux.testing.store_suite._listing import ListContract
from aioflux.testing.store_suite._many import ManyContract
from aioflux.testing.store_suite._on_service import ServiceSideContract
from aioflux.testing.store_suite._reading import ReadContract
from aioflux.testing.store_suite._streams import ReaderContract, WriterContract
from aioflux.testing.store_suite._writing import WriteContract

__all__ = ["StoreSuite", "SuiteCapabilities"]


class StoreSuite(
    ReadContract,
    ManyContract,
    ListContract,
    WriteContract,
    WriterContract,
    ReaderContract,
    ServiceSideContract,
    KeyContract,
):
    """Tests of every public method of a store, by operation; see the module for how to use it."""

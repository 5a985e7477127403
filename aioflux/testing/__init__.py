"""Tools for testing aioflux and programs that use it: a GCS server, recorded requests, faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioflux.testing._process import GCSServerProcess
    from aioflux.testing._record import SentRequests, record
    from aioflux.testing.gcs_server import GCSServer
    from aioflux.testing.store_suite import StoreSuite

__all__ = ["GCSServer", "GCSServerProcess", "SentRequests", "StoreSuite", "record"]


def __getattr__(name: str) -> object:
    """Import a name on first use: the server needs httptools and uvloop, the suite pytest."""
    if name == "GCSServer":
        from aioflux.testing.gcs_server import GCSServer

        return GCSServer
    if name == "GCSServerProcess":
        from aioflux.testing._process import GCSServerProcess

        return GCSServerProcess
    if name in {"SentRequests", "record"}:
        from aioflux.testing import _record

        return getattr(_record, name)
    if name == "StoreSuite":
        from aioflux.testing.store_suite import StoreSuite

        return StoreSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

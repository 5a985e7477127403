"""Tools for testing aioflux and programs that use it: a GCS server, a store suite, and faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioflux.testing._process import GCSServerProcess
    from aioflux.testing.gcs_server import GCSServer
    from aioflux.testing.store_suite import StoreSuite

__all__ = ["GCSServer", "GCSServerProcess", "StoreSuite"]


def __getattr__(name: str) -> object:
    """Import a class on first use: the server needs httptools and uvloop, the suite pytest."""
    if name == "GCSServer":
        from aioflux.testing.gcs_server import GCSServer

        return GCSServer
    if name == "GCSServerProcess":
        from aioflux.testing._process import GCSServerProcess

        return GCSServerProcess
    if name == "StoreSuite":
        from aioflux.testing.store_suite import StoreSuite

        return StoreSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

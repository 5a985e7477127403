"""Services behind their contract, opened as a store opens them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aioflux import Timeouts
from aioflux._services import open as _open
from aioflux._values.uri import parse_uri

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def open_service(uri: str, **settings: Any) -> Any:
    """Open the service of a uri; settings are those of `ServiceConfig`."""
    settings = {"timeouts": Timeouts(), "max_connections": 4, **settings}
    return _open.open_service(_open.ServiceConfig(location=parse_uri(uri), **settings))


@asynccontextmanager
async def opened_service(uri: str, **settings: Any) -> AsyncIterator[Any]:
    """Open the service of a uri, and close it at the end."""
    service = open_service(uri, **settings)
    try:
        yield service
    finally:
        await service.aclose()

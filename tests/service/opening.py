"""Services without a store, opened like a store opens them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aioflux import Timeouts
from aioflux._services.base import ServiceConfig
from aioflux._services.open import open_service as open_of
from aioflux._values.uri import parse_uri

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def service_config(uri: str, **settings: Any) -> ServiceConfig:
    """Return the settings of a service; `settings` are those of `ServiceConfig`."""
    settings = {"timeouts": Timeouts(), "max_idle": 4, **settings}
    return ServiceConfig(location=parse_uri(uri), **settings)


def open_service(uri: str, **settings: Any) -> Any:
    """Open the service of a uri."""
    return open_of(service_config(uri, **settings))


@asynccontextmanager
async def opened_service(uri: str, **settings: Any) -> AsyncIterator[Any]:
    """Open the service of a uri, and close it at the end."""
    service = open_service(uri, **settings)
    try:
        yield service
    finally:
        await service.aclose()

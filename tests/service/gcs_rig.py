"""A Cloud Storage service on one server, its operations, and hooks that answer in its place."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aioflux import Timeouts
from aioflux._services.base import Precondition
from aioflux._services.gcs.service import GCSService
from aioflux.testing.gcs_server import Hook
from tests.service.operations import operations

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aioflux.testing.gcs_server import Request, Response

ANY = Precondition()

OPERATIONS = operations("delete_page")


@asynccontextmanager
async def opened(url: str, **settings: Any) -> AsyncIterator[GCSService]:
    service = GCSService(
        "bucket",
        "p/",
        endpoint_url=url,
        emulator="credentials" not in settings,
        timeouts=Timeouts(),
        max_connections=4,
        **settings,
    )
    try:
        yield service
    finally:
        await service.aclose()


class Answering(Hook):
    """Keeps the Authorization header of each request, and may answer in the server's place."""

    def __init__(self, answer: Callable[[Request], Response | None] = lambda _: None) -> None:
        self.tokens: list[str | None] = []
        self._answer = answer

    def before(self, request: Request) -> Response | None:
        self.tokens.append(request.headers.get("authorization"))
        return self._answer(request)

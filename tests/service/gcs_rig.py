"""A Cloud Storage service on one server, its operations, and hooks that answer in its place."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aioflux import Timeouts
from aioflux._services.base import ListRequest, Precondition, ReadRequest, Source, WriteRequest
from aioflux._services.gcs.service import GCSService
from aioflux.testing.gcs_server import Hook

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from aioflux.testing.gcs_server import Request, Response

ANY = Precondition()

OPERATIONS: dict[str, Callable[[GCSService], Awaitable[object]]] = {
    "head": lambda service: service.head("a"),
    "get": lambda service: service.get(ReadRequest("a")),
    "put": lambda service: service.put(WriteRequest("b"), b"1", crc32c=None),
    "delete": lambda service: service.delete("a"),
    "list": lambda service: service.list_page(ListRequest("")),
    "compose": lambda service: service.compose(WriteRequest("b"), [Source(key="a")]),
    "copy": lambda service: service.copy(Source(key="a"), "b", precondition=ANY),
    "initiate": lambda service: service.initiate_upload(WriteRequest("b")),
    "put_part": lambda service: service.put_part("b", "id", 1, (b"1",), offset=0, crc32c=None),
    "complete": lambda service: service.complete_upload(WriteRequest("b"), "id", []),
    "abort": lambda service: service.abort_upload("b", "id"),
    "list_uploads": lambda service: service.list_uploads(""),
    "permissions": lambda service: service.granted_permissions(["storage.objects.get"]),
}


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

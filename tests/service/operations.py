"""Table of all operations of a service, with a call of each, for tests of every service."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aioflux import StorageError
from aioflux._services.base import (
    ListRequest,
    PartRequest,
    Precondition,
    ReadRequest,
    Source,
    WriteRequest,
)
from aioflux._values.checksums import crc32c
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aioflux._services.base import Body, Service

_DATA = b"1"
_UPLOAD = "0" * 32


class SmallRead:
    """A read without a task, as the waiter of its response.

    Attributes:
        exchange: The read; None if it could not begin.
        result: What `get` would return, or None if it would send another request.
        error: Error of the data plane.
    """

    def __init__(self, service: Service, request: ReadRequest) -> None:
        self.service = service
        self.request = request
        self.result: asyncio.Future[Body | None] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None
        self.exchange = service.begin_get(request, self)

    def done(self) -> bool:
        return self.result.done()

    def set_result(self, response: Any) -> None:
        assert self.exchange is not None
        try:
            body = self.service.end_get(self.request, self.exchange, response)
        except StorageError as exc:
            self.result.set_exception(exc)
        else:
            self.result.set_result(body)

    def set_exception(self, error: Exception) -> None:
        assert self.exchange is not None
        self.error = error
        failed = self.service.fail_get(self.request, self.exchange, error)
        if failed is None:
            self.result.set_result(None)
        else:
            self.result.set_exception(failed)


async def small_read(service: Service) -> Body:
    """Read with `begin_get`, after a read that opens a connection, like the small-read loop."""
    request = ReadRequest("a", end=100)
    with suppress(AiofluxError):
        await service.get(request)
    read = SmallRead(service, request)
    body = None if read.exchange is None else await read.result
    return body or await service.get(request)


ALL: dict[str, Callable[[Any], Awaitable[object]]] = {
    "head": lambda service: service.head("a"),
    "get": lambda service: service.get(ReadRequest("a")),
    "small_read": small_read,
    "put": lambda service: service.put(WriteRequest("b"), [_DATA], crc32c=crc32c(_DATA)),
    "delete": lambda service: service.delete("a"),
    "delete_page": lambda service: service.delete_page([Source(key="a")]),
    "list": lambda service: service.list_page(ListRequest("")),
    "compose": lambda service: service.compose(WriteRequest("b"), [Source(key="a")]),
    "copy": lambda service: service.copy(Source(key="a"), "b", precondition=Precondition()),
    "initiate": lambda service: service.initiate_upload(WriteRequest("b")),
    "put_part": lambda service: service.put_part(
        PartRequest("b", _UPLOAD, 1, (_DATA,), crc32c=crc32c(_DATA))
    ),
    "complete": lambda service: service.complete_upload(WriteRequest("b"), _UPLOAD, []),
    "abort": lambda service: service.abort_upload("b", _UPLOAD),
    "list_uploads": lambda service: service.list_uploads(""),
    "permissions": lambda service: service.granted_permissions(["storage.objects.get"]),
}


def operations(*without: str) -> dict[str, Callable[[Any], Awaitable[object]]]:
    """Return the operations for which a service sends a request."""
    return {name: call for name, call in ALL.items() if name not in without}

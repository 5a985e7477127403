"""A minimal client: asyncio.BufferedProtocol that parses only Content-Length, and discards bodies.

The lower bound of the CPU time of a client on this event loop and TLS library.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from perf._meter import steady
from perf.peers._parts import ssl_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.work import Work

_BUFFER_BYTES = 256 * 1024
_LENGTH = b"content-length:"


class _Connection(asyncio.BufferedProtocol):
    """One connection, which reads one object after the other into the same memory."""

    def __init__(self) -> None:
        self._memory = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._memory)
        self._head_bytes = self._num_missing = self._total = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # uvloop's transports are not subclasses of asyncio's

    def read(self, requests: Iterator[bytes]) -> asyncio.Future[int]:
        """Send requests, each after the response of the one before; return the bytes of bodies."""
        self._requests, self._total = requests, 0
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._send()
        return self._done

    def _send(self) -> None:
        if (request := next(self._requests, None)) is None:
            self._done.set_result(self._total)
        else:
            self._transport.write(request)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._head_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        if not self._num_missing:
            self._head_bytes += nbytes
            end = self._memory.find(b"\r\n\r\n", 0, self._head_bytes) + 4
            if end < 4:
                return
            head = bytes(self._view[:end]).lower()
            at = head.index(_LENGTH) + len(_LENGTH)
            self._num_missing = int(head[at : head.index(b"\r\n", at)])
            if not head.startswith(b"http/1.1 200"):
                self._done.set_exception(RuntimeError(f"the server returned {head[:40]!r}"))
            self._total += self._num_missing
            nbytes, self._head_bytes = self._head_bytes - end, 0
        self._num_missing -= nbytes
        if not self._num_missing:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))


async def get_many(work: Work) -> int:
    at, loop = urlsplit(work.url), asyncio.get_running_loop()
    assert at.hostname is not None
    assert at.port is not None
    opened = [
        await loop.create_connection(_Connection, at.hostname, at.port, ssl=ssl_context(work))
        for _ in range(work.in_flight)
    ]

    async def read(work: Work) -> int:
        head = f"GET /{work.bucket}/%s HTTP/1.1\r\nhost: {at.netloc}\r\n\r\n"
        requests = iter([(head % key).encode() for key in work.each_key()])
        return sum(await asyncio.gather(*(protocol.read(requests) for _, protocol in opened)))

    try:
        return await steady(read, work)
    finally:
        for transport, _ in opened:
            transport.close()

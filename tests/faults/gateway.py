"""A small proxy: for clients with HTTP_PROXY, or as the endpoint in front of a server.

    GET http://host/path   (absolute form)  -> forwarded to that host
    CONNECT host:port                       -> a tunnel
    GET /path              (origin form)    -> forwarded to `upstream`, with `headers` added

Responses are forwarded unchanged: a reset by the server is a reset for the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from tests.http.scripted import turn

if TYPE_CHECKING:
    import ssl
    from types import TracebackType

__all__ = ["Gateway"]

_LIMIT_BYTES = 1 << 20
_HOP_BY_HOP = (b"proxy-connection:", b"proxy-authorization:")


class Gateway:
    """A proxy in its own thread, for the length of a `with` block.

    Attributes:
        headers: Added to each request, lines without their end; may be changed at any time.
        upstream: Url of the server behind it.
        num_requests: Forwarded requests, by form: "origin", "absolute" and "connect".
        heads: Head of each request, as received.
    """

    def __init__(self, upstream: str = "", *, tls: ssl.SSLContext | None = None) -> None:
        self.headers: tuple[bytes, ...] = ()
        self.num_requests: Counter[str] = Counter()
        self.heads: list[bytes] = []
        self.url = ""
        self.upstream = upstream
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, limit=_LIMIT_BYTES, backlog=512, ssl=self._tls
        )
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{port}"

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        await turn()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in self._writers:
            # The abort of a transport that has closed its socket fails in asyncio if it had to
            # write first. A closed TLS transport does not even have a socket.
            with contextlib.suppress(AttributeError):
                if writer.get_extra_info("socket").fileno() >= 0:
                    writer.transport.abort()
        await turn()

    # --- one connection -----------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        responses: asyncio.Task[None] | None = None
        upstream: asyncio.StreamWriter | None = None
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                method, target, _ = head.split(b" ", 2)
                if upstream is None:
                    from_upstream, upstream = await self._connect(method, target)
                    self._writers.add(upstream)
                    if method == b"CONNECT":
                        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    responses = asyncio.create_task(_pipe(from_upstream, writer))
                if method == b"CONNECT":
                    self.num_requests["connect"] += 1
                    await _pipe(reader, upstream)
                    break
                await self._forward(head, reader, upstream)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the peer closed the connection; `finally` closes the other one
        except asyncio.CancelledError:
            pass  # by `_close`; asyncio of Python 3.11 logs a cancelled task of its server
        finally:
            if upstream is not None:
                upstream.close()
            if responses is not None:
                # Stop forwarding responses: the client has closed its connection.
                responses.cancel()
                await asyncio.gather(responses, return_exceptions=True)
            writer.close()

    def rewrite(self, method: bytes, lines: list[bytes]) -> list[bytes]:
        """Return the headers to forward; a subclass may change them."""
        return lines

    async def _connect(
        self, method: bytes, target: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(f"//{target.decode()}" if method == b"CONNECT" else target.decode())
        if not url.hostname:
            url = urlsplit(self.upstream)
        return await asyncio.open_connection(url.hostname, url.port or 80, limit=_LIMIT_BYTES)

    async def _forward(
        self, head: bytes, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter
    ) -> None:
        first, *lines = head[:-4].split(b"\r\n")
        method, target, version = first.split(b" ")
        form = "origin" if target.startswith(b"/") else "absolute"
        self.num_requests[form] += 1
        if form == "absolute":
            url = urlsplit(target)
            target = url.path + (b"?" + url.query if url.query else b"")
        kept = [line for line in lines if not line.lower().startswith(_HOP_BY_HOP)]
        kept = self.rewrite(method, kept)
        upstream.write(
            b"\r\n".join([b" ".join((method, target, version)), *kept, *self.headers]) + b"\r\n\r\n"
        )
        remaining = _content_length(lines)
        while remaining:
            data = await reader.read(min(remaining, _LIMIT_BYTES))
            if not data:
                raise ConnectionResetError
            remaining -= len(data)
            upstream.write(data)
            await upstream.drain()


def _content_length(lines: list[bytes]) -> int:
    for line in lines:
        name, _, value = line.partition(b":")
        if name.lower() == b"transfer-encoding":
            raise AssertionError("the gateway needs a Content-Length")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes, and the end or reset of their connection."""
    try:
        while data := await reader.read(_LIMIT_BYTES):
            writer.write(data)
            await writer.drain()
        writer.close()
    except ConnectionError:
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

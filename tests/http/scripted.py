"""Scripted servers: each connection follows a script, byte by byte."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from aioflux._http.codec import Origin

if TYPE_CHECKING:
    import ssl


class Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read_head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def read_request(self) -> tuple[bytes, bytes]:
        head = await self.read_head()
        size = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                size = int(line.partition(b":")[2])
        return head, await self.reader.readexactly(size)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def wait_closed_by_client(self) -> bytes:
        """Return the bytes that the client sends until it closes."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    def shut_now(self) -> None:
        """Shut the socket down in this iteration of the loop, before the client can notice it."""
        sock = self.writer.get_extra_info("socket")
        with socket.socket(fileno=os.dup(sock.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Close with a RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


class ScriptedServer:
    """Accepts connections; the n-th follows the n-th script, the last script serves all others."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = scripts
        self.num_accepted = 0
        self.num_open = 0
        self.max_open = 0
        self.requests: list[tuple[bytes, bytes]] = []
        self.all_closed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self.scripts[min(self.num_accepted, len(self.scripts) - 1)]
        self.num_accepted += 1
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        self.all_closed.clear()
        self._writers.add(writer)
        try:
            await script(Peer(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.num_open -= 1
            if not self.num_open:
                self.all_closed.set()

    def close_connections(self) -> None:
        """Close them now, also those with unread bytes."""
        for writer in tuple(self._writers):
            writer.transport.abort()


async def turn() -> None:
    """Run some iterations of the loop, so that it serves accepted and closed connections."""
    for _ in range(4):
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    *scripts: Script, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[ScriptedServer, Origin]]:
    """Run a scripted server on its own port."""
    scripted = ScriptedServer(*scripts)
    server = await asyncio.start_server(scripted.serve, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    try:
        if tls is None:
            yield scripted, Origin("http", "127.0.0.1", port)
        else:
            yield scripted, Origin("https", "localhost", port)
    finally:
        server.close()
        await turn()
        scripted.close_connections()
        async with asyncio.timeout(60):
            if scripted.num_open:
                await scripted.all_closed.wait()
        await turn()


@contextmanager
def refusing() -> Iterator[Origin]:
    """Yield an origin that refuses connections: its port is bound, but no server listens on it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield Origin("http", "127.0.0.1", bound.getsockname()[1])


def answering(*responses: bytes) -> Script:
    """A script that responds to each request with the next of these bytes, then always the last."""

    async def script(peer: Peer) -> None:
        num = 0
        while True:
            await peer.read_request()
            await peer.send(responses[min(num, len(responses) - 1)])
            num += 1

    return script


async def echoing(peer: Peer) -> None:
    """Respond to each request with its own body."""
    while True:
        _, body = await peer.read_request()
        await peer.send(ok(body))


def ok(body: bytes = b"", *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """A response with a Content-Length."""
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body

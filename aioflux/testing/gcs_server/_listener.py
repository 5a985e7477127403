"""Listening socket: accepts connections, limits their bandwidth, and rejects stalled requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server import _fork
from aioflux.testing.gcs_server._connection import STALL_PERIODS, Connection
from aioflux.testing.gcs_server._network import PACED_BY_KERNEL

if TYPE_CHECKING:
    import ssl

    from aioflux.testing.gcs_server._app import App

_BACKLOG = 1024
_SO_MAX_PACING_RATE = 47  # Linux; the `socket` module has no constant
_NO_PACING = -1


class Listener:
    """Listening socket and its connections, on one event loop."""

    def __init__(
        self,
        app: App,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        bytes_per_second: int | None,
    ) -> None:
        self._app = app
        self._loop = loop
        self._sock = sock
        self._period = app.limits.stalled_seconds / STALL_PERIODS
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        if bytes_per_second is not None:
            _pace(sock, bytes_per_second)

    async def open(self, ssl_context: ssl.SSLContext | None) -> None:
        """Start to accept connections, with TLS if a context is given."""
        app, loop = self._app, self._loop
        scheme = "http" if ssl_context is None else "https"
        self._server = await loop.create_server(
            lambda: Connection(app, loop, scheme=scheme),
            sock=self._sock,
            backlog=_BACKLOG,
            ssl=ssl_context,
        )
        _fork.track(self._sock.fileno())
        self._timer = loop.call_later(self._period, self._check)

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        _fork.untrack(self._sock.fileno())
        with contextlib.suppress(OSError):  # some systems cannot shut down a listening socket
            self._sock.shutdown(socket.SHUT_RDWR)  # also in forked processes
        server.close()
        while self._app.connections:
            for connection in tuple(self._app.connections):
                connection.abort()
            await asyncio.sleep(0)
        await server.wait_closed()

    def pace(self, bytes_per_second: int | None) -> None:
        """Change the bandwidth of open and new connections (on Linux). Any thread may call this."""
        _pace(self._sock, bytes_per_second)
        self._loop.call_soon_threadsafe(self._pace_open, bytes_per_second)

    def _pace_open(self, bytes_per_second: int | None) -> None:
        for connection in self._app.connections:
            _pace(connection.socket, bytes_per_second)

    def _check(self) -> None:
        """Check all connections for stalled requests. One timer serves all of them."""
        for connection in tuple(self._app.connections):
            connection.check_progress()
        self._timer = self._loop.call_later(self._period, self._check)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise OSError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _pace(sock: socket.socket, bytes_per_second: int | None) -> None:
    if PACED_BY_KERNEL:
        rate = _NO_PACING if bytes_per_second is None else min(bytes_per_second, 0x7FFF_FFFF)
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)

"""A pool of HTTP connections: those that are idle are kept open and used again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from aioflux._http.body import Buffer, Destination, as_destination, as_views
from aioflux._http.codec import (
    BODY_METHODS,
    RESENDABLE,
    FixedHeaders,
    encode_fields,
    encode_head,
    match_target,
)
from aioflux._http.connect import Connector
from aioflux._http.errors import ConnectionLostError
from aioflux._http.proxy import Proxy, proxy_for

if TYPE_CHECKING:
    import ssl

    from aioflux._http.codec import Origin
    from aioflux._http.connection import Connection, Response, ResponseFuture
    from aioflux.options import Timeouts

_NO_HEADERS: Final = FixedHeaders()

_MAX_CHECK_SECONDS: Final = 0.25
"""Longest time between two checks of the timeouts, in seconds."""


class Server:
    """An origin: the idle connections to it, and what every request to it contains.

    The connection that became idle last is used first, so that connections that are not needed
    reach the idle timeout.

    Attributes:
        host_line: Encoded header lines of every request to the origin: Host, and
            Proxy-Authorization if a proxy receives the request itself.
        target_prefix: Beginning of the target of every request: the origin if a proxy receives the
            request itself (absolute-form of RFC 9112, 3.2.2), otherwise empty.
        idle: Idle connections, in the order in which they became idle.
    """

    __slots__ = ("_max_idle", "host_line", "idle", "target_prefix")

    def __init__(
        self, max_idle: int, *, host_line: bytes = b"", target_prefix: bytes = b""
    ) -> None:
        self.host_line = host_line
        self.target_prefix = target_prefix
        self.idle: list[Connection] = []
        self._max_idle = max_idle

    def take(self) -> Connection | None:
        """Return an idle connection, which is no longer idle; None if there is none."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_usable:
                return connection
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep a connection after its request, if it is usable and not too many are idle."""
        if connection.is_usable:
            if len(self.idle) < self._max_idle:
                self.idle.append(connection)
            else:
                connection.retire()


class Pool:
    """A pool of connections, used on the event loop of its first request.

    Attributes:
        num_opened: Number of connections that were opened.
        num_stale: Number of idle connections that the server had closed, and that were replaced for
            a request.
        proxy: Proxy for all requests; None for direct connections.
    """

    def __init__(
        self,
        *,
        max_idle: int,
        timeouts: Timeouts,
        ssl_context: ssl.SSLContext | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        """Initialize without opening a connection.

        Args:
            max_idle: Maximum number of idle connections to one origin; others are closed.
            timeouts: Timeouts of one attempt.
            ssl_context: TLS settings; `default_context()` by default.
            proxy: Proxy for all requests; None for direct connections.
        """
        self.num_opened = 0
        self.num_stale = 0
        self._max_idle = max_idle
        self._timeouts = timeouts
        self.proxy = proxy
        self._servers: dict[Origin, Server] = {}
        # Server of the last request: comparing an origin is cheaper than hashing it.
        self._last_server: tuple[Origin | None, Server] = (None, Server(0))
        self._open: set[Connection] = set()
        self._connector = Connector(
            timeouts=timeouts,
            ssl_context=ssl_context,
            proxy=proxy,
            on_lost=self._connection_lost,
            on_abandoned=self._connection_abandoned,
        )
        self._unflushed: list[Connection] = []
        self._all_lost: asyncio.Event | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._check_seconds = min(timeouts.progress_seconds / 4, _MAX_CHECK_SECONDS)
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    @property
    def num_idle(self) -> int:
        """Number of idle connections."""
        return sum(len(server.idle) for server in self._servers.values())

    def request(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        body: Sequence[Buffer] | Buffer | None = None,
        into: Destination | None = None,
        max_body_bytes: int | None = None,
        head_seconds: float | None = None,
        fixed: FixedHeaders = _NO_HEADERS,
    ) -> Coroutine[Any, Any, Response]:
        """Send one request and receive its complete response. Redirects are not followed.

        A server may close an idle connection just before a request is sent over it. The request is
        then sent again over another connection if this is safe: always for GET and HEAD, and for
        other methods if the request was not sent completely, so that the server cannot have carried
        it out. Cancellation closes the connection.

        Args:
            origin: The server.
            method: Method, in upper case.
            target: Path and query, percent-encoded.
            headers: Headers other than Host and Content-Length, which the pool adds.
            body: Memory that is sent without a copy. It must not change before the response.
            into: Memory for the body of a 2xx response, or a function that returns memory for a
                length, or the class `bytes` to receive an object of this class; a new buffer by
                default. The body of another status is received into a new buffer of
                1 MiB at most, and its rest is dropped.
            max_body_bytes: Longest body of a 2xx response that is accepted, in bytes.
            head_seconds: Time for the response to start after the request was sent, in seconds. By
                default `progress_seconds` for GET and HEAD, and `idle_seconds` for other methods.
            fixed: Encoded headers that are sent before `headers`.

        Raises:
            TransportError: No complete response was received.
            ValueError: The request cannot be encoded, or `into` is read-only.
            RuntimeError: The pool is closed.
        """
        views = as_views(body) if body is not None else []
        if isinstance(into, memoryview):
            into = as_destination(into)
        if head_seconds is None:
            # Writes have a limit of their own: services process a write before they respond.
            timeouts = self._timeouts
            is_read = method in RESENDABLE
            head_seconds = timeouts.progress_seconds if is_read else timeouts.idle_seconds
        last, server = self._last_server
        if origin is not last:
            server = self._server_of(origin)
        lines = server.host_line + fixed.encoded
        if views or method in BODY_METHODS:
            lines += b"Content-Length: %d\r\n" % sum(map(len, views))
        head = encode_head(method, server.target_prefix + target, headers, lines)
        # Returned without `await`, which saves one coroutine for each request.
        return self._exchange(
            origin, server, method, head, views, into, max_body_bytes, head_seconds
        )

    async def _exchange(
        self,
        origin: Origin,
        server: Server,
        method: bytes,
        head: bytes,
        body: list[memoryview],
        into: Destination | None,
        max_body_bytes: int | None,
        head_seconds: float,
    ) -> Response:
        """Send an encoded request over an idle or a new connection, and await its response."""
        if self._is_closed:
            raise RuntimeError("the pool is closed")
        is_resendable = method in RESENDABLE
        connection = server.take()
        try:
            if connection is not None and not is_resendable and connection.is_readable():
                self.num_stale += 1
                connection.abort()
            while True:
                if connection is None or not connection.is_usable:
                    connection = await self._connect(origin, server)
                future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
                connection.send(
                    head,
                    body,
                    is_head=method == b"HEAD",
                    into=into,
                    max_body_bytes=max_body_bytes,
                    head_seconds=head_seconds,
                    future=future,
                )
                self._flush_soon(connection)
                try:
                    return await future
                except ConnectionLostError:
                    is_safe = is_resendable or not connection.fully_sent
                    if not (connection.is_stale and is_safe) or self._is_closed:
                        raise
                    self.num_stale += 1
                    connection = None
        except BaseException:
            # Also after a cancellation: from now on the connection must not access the caller's
            # memory.
            if connection is not None:
                connection.abort()
            raise
        finally:
            if connection is not None:
                server.give_back(connection)

    def start_get(
        self,
        origin: Origin,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        future: ResponseFuture,
        into: Destination | None,
        max_body_bytes: int | None,
        fixed: FixedHeaders = _NO_HEADERS,
    ) -> Connection | None:
        """Start a GET without a task or a coroutine, if a connection is idle.

        The caller must call `release` of the returned connection when `future` has the response or
        an error, or after it aborted the connection.

        Args:
            origin: The server.
            target: As in `request`.
            headers: As in `request`.
            future: Receiver of the response, called inside the callback of the transport.
            into: As in `request`.
            max_body_bytes: As in `request`.
            fixed: As in `request`.

        Returns:
            The connection; None, and nothing was sent, if no connection is idle or the pool is
            closed.

        Raises:
            ValueError: The request cannot be encoded.
        """
        last, server = self._last_server
        if origin is not last:
            server = self._server_of(origin)
        # The code of `encode_head`, without the cost of a call for each small read.
        if match_target(target) is None:
            raise ValueError("target must be percent-encoded: visible ASCII only, no spaces")
        lines = encode_fields(headers)
        head = b"".join(
            (
                b"GET ",
                server.target_prefix,
                target,
                b" HTTP/1.1\r\n",
                server.host_line,
                fixed.encoded,
                lines,
                b"\r\n",
            )
        )
        connection = None if self._is_closed else server.take()
        if connection is not None:
            connection.send(
                head,
                None,
                is_head=False,
                into=into,
                max_body_bytes=max_body_bytes,
                head_seconds=self._timeouts.progress_seconds,
                future=future,
            )
            self._flush_soon(connection)
        return connection

    def _flush_soon(self, connection: Connection) -> None:
        """Write the request of a connection in the next iteration of the event loop.

        All requests that start in one iteration are written one directly after the other, so that
        the server wakes up once for all of them. With nginx on the same machine of two cores, a GET
        of 1 KiB by a store took 54 to 61 us of CPU in the client instead of 75 to 88 us, and half
        of the CPU in the server.
        """
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for connection in unflushed:
            connection.flush()

    async def aclose(self) -> None:
        """Fail all pending requests, close every connection, and wait until all are closed."""
        self._is_closed = True
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None
        for connection in tuple(self._open):
            connection.close()
        await self._connector.aclose()
        while self._open:
            # A new event for each wait: another connection may open after the event was set, and
            # waiting for an event that is set does not yield to the event loop.
            self._all_lost = asyncio.Event()
            await self._all_lost.wait()

    def _server_of(self, origin: Origin) -> Server:
        if origin not in self._servers:
            host_line, target_prefix = b"Host: %b\r\n" % origin.authority, b""
            if self.proxy is not None and origin.scheme == "http":
                host_line += self.proxy.header_line
                target_prefix = origin.url.encode()
            self._servers[origin] = Server(
                self._max_idle, host_line=host_line, target_prefix=target_prefix
            )
        server = self._servers[origin]
        self._last_server = (origin, server)
        return server

    async def _connect(self, origin: Origin, server: Server) -> Connection:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        connection = await self._connector.connect(origin)
        now = clock()
        connection.on_connected(now, now - started_at, self._timeouts.slow_seconds)
        self.num_opened += 1
        if connection.is_lost:
            raise ConnectionLostError(f"{origin.url} closed the connection as soon as it was open")
        connection.on_release = server.give_back
        self._open.add(connection)
        if self._is_closed:
            connection.abort()
            raise ConnectionLostError("the pool was closed")
        if self._check_timer is None:
            self._schedule_check(asyncio.get_running_loop())
        return connection

    def _connection_abandoned(self, connection: Connection) -> None:
        """Close a new connection whose request was cancelled during the connect."""
        if not connection.is_lost:
            self._open.add(connection)
            connection.abort()

    def _connection_lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        for server in self._servers.values():
            if connection in server.idle:
                server.idle.remove(connection)
        if not self._open and self._all_lost is not None:
            self._all_lost.set()

    def _check_timeouts(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the timeouts of every connection, and schedule the next check if any is open."""
        now = loop.time()
        assert self._check_timer is not None
        # After the event loop was blocked, the kernel may have responses that were not read yet.
        # So the time for which the loop was blocked does not count.
        late_seconds = now - self._check_timer.when()
        if late_seconds <= self._check_seconds:
            late_seconds = 0.0
        for connection in tuple(self._open):
            connection.check_timeouts(now, self._timeouts, late_seconds=late_seconds)
        self._check_timer = None
        if self._open:
            self._schedule_check(loop)

    def _schedule_check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._check_timer = loop.call_later(self._check_seconds, self._check_timeouts, loop)


def open_pool(
    origin: Origin,
    *,
    max_idle: int,
    timeouts: Timeouts,
    ssl_context: ssl.SSLContext | None = None,
) -> Pool:
    """Return a new pool for an origin, through the proxy that the environment names for it.

    It opens no connection before the first request.

    Raises:
        ValueError: The environment names an invalid proxy.
    """
    url = proxy_for(origin)
    return Pool(
        max_idle=max_idle,
        timeouts=timeouts,
        ssl_context=ssl_context,
        proxy=None if url is None else Proxy.from_url(url),
    )

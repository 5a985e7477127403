"""A pool of keep-alive connections, bounded for each origin, and the requests over them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aioflux._http.body import Buffer, Destination, as_destination, as_views
from aioflux._http.codec import encode_fields, encode_head, match_target
from aioflux._http.connect import Connector
from aioflux._http.connection_slots import ConnectionSlots
from aioflux._http.errors import ConnectionLostError
from aioflux._http.request import (
    BODY_METHODS,
    RESENDABLE,
    FixedHeaders,
    check_headers,
    default_head_seconds,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Coroutine, Sequence

    from aioflux._http.connection import Connection, Response, ResponseFuture
    from aioflux._http.request import Origin
    from aioflux.options import Timeouts

__all__ = ["Pool"]

_NO_HEADERS: Final = FixedHeaders()

_MAX_CHECK_SECONDS: Final = 0.25
"""Longest time between two checks of the timeouts."""


class Pool:
    """Requests over bounded keep-alive connections.

    A pool belongs to the event loop of its first request. Nothing is opened before that.

    Attributes:
        num_opened: Connections opened so far.
        num_stale: Kept-alive connections that the server had closed, and that were replaced.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        timeouts: Timeouts,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Initialize; connections are opened by requests.

        Args:
            max_connections: Most connections to one origin; further requests wait for a slot.
            timeouts: Deadlines of one attempt.
            ssl_context: TLS settings; `default_context()` by default.
        """
        if max_connections < 1:
            raise ValueError(f"max_connections must be above 0, not {max_connections!r}")
        self.num_opened = 0
        self.num_stale = 0
        self._max_connections = max_connections
        self._timeouts = timeouts
        self._slots: dict[Origin, ConnectionSlots] = {}
        # Those of the last request: comparing an origin costs less than hashing it.
        self._last_slots: tuple[Origin | None, ConnectionSlots] = (None, ConnectionSlots(1))
        self._open: set[Connection] = set()
        self._connector = Connector(
            timeouts=timeouts,
            ssl_context=ssl_context,
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
        """Connections that are open."""
        return len(self._open)

    @property
    def num_idle(self) -> int:
        """Open connections without a request."""
        return sum(len(slots.idle) for slots in self._slots.values())

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

        A kept-alive connection that the server has closed is replaced. If only the request finds
        out, it is sent again if that is safe: a GET or HEAD always, another one if its body was not
        sent completely, so that the server cannot have acted on it.

        Cancellation closes the connection and frees its slot.

        Args:
            origin: The server.
            method: Method, in upper case.
            target: Path and query, percent-encoded.
            headers: Further headers; Host and Content-Length are added here.
            body: Memory that is sent without a copy; it must not change meanwhile.
            into: Memory for the body of a 2xx response, or a function that returns memory for a
                length; `bytes` makes it an object of that class. Other bodies get a buffer of
                their own, of 1 MiB at most.
            max_body_bytes: Longest body of a 2xx response that is accepted.
            head_seconds: Time for the response to start once the request is sent, in seconds; by
                default `progress_seconds` for GET and HEAD and `idle_seconds` for the others.
            fixed: Headers before `headers`, already encoded.

        Raises:
            TransportError: There is no complete response.
            ValueError: The request cannot be encoded, or `into` cannot be written.
            RuntimeError: The pool is closed.
        """
        views = as_views(body) if body is not None else []
        check_headers(headers)
        if views or method in BODY_METHODS:
            headers = [*headers, (b"Content-Length", b"%d" % sum(map(len, views)))]
        if isinstance(into, memoryview):
            into = as_destination(into)
        if head_seconds is None:
            head_seconds = default_head_seconds(method, self._timeouts)
        slots = self._slots_of(origin)
        head = encode_head(method, target, headers, slots.host_line + fixed.encoded)
        # Not awaited here: one coroutine less for each request.
        return self._exchange(
            origin, slots, method, head, views, into, max_body_bytes, head_seconds
        )

    async def _exchange(
        self,
        origin: Origin,
        slots: ConnectionSlots,
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
        connection = slots.acquire_idle() or await slots.acquire()
        try:
            if connection is not None and not is_resendable and connection.has_expired():
                self.num_stale += 1
                connection.abort()
            while True:
                if connection is None or not connection.is_usable:
                    connection = await self._connect(origin, slots)
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
            # If cancelled, the connection must not write to the caller's memory any more.
            if connection is not None:
                connection.abort()
            raise
        finally:
            slots.release(connection)

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

        The caller calls `release` of the connection when the response or error is set on `future`,
        or after it has aborted the connection before that.

        Args:
            origin: The server.
            target: As in `request`, and so are `headers`, `into`, `max_body_bytes` and `fixed`.
            headers: Further headers.
            future: Receives the response, within the callback that reads its last byte.
            into: Memory for the body.
            max_body_bytes: Longest body that is accepted.
            fixed: Headers before `headers`.

        Returns:
            The connection; None if none is idle, in which case nothing was done.

        Raises:
            ValueError: The request cannot be encoded.
        """
        last, slots = self._last_slots
        if origin is not last:
            slots = self._slots_of(origin)
        # As `encode_head`, whose call every small read would pay for.
        if match_target(target) is None:
            raise ValueError("target must be percent-encoded: visible ASCII only, no spaces")
        lines = encode_fields(headers)
        head = b"GET %b HTTP/1.1\r\n%b%b%b\r\n" % (target, slots.host_line, fixed.encoded, lines)
        connection = None if self._is_closed else slots.acquire_idle()
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
        """Write the request of a connection at the end of this iteration of the loop.

        All that are started in one iteration are sent together: a server is then woken by the first
        and busy with it as the others arrive. Beside nginx on one machine of two cores, a GET of
        1 KiB through a store took 54 to 61 us of the client's CPU instead of 75 to 88, and half of
        the server's.
        """
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for connection in unflushed:
            connection.flush()

    async def aclose(self) -> None:
        """Fail the requests under way, close every connection, and wait until all are closed."""
        self._is_closed = True
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None
        for slots in self._slots.values():
            slots.fail_waiters(ConnectionLostError("the pool was closed"))
        for connection in tuple(self._open):
            connection.close()
        await self._connector.aclose()
        while self._open:
            # A new event each time: another connection may open after the first event is set, and
            # awaiting an event that is set does not yield to the loop.
            self._all_lost = asyncio.Event()
            await self._all_lost.wait()

    def _slots_of(self, origin: Origin) -> ConnectionSlots:
        last, slots = self._last_slots
        if origin is last:
            return slots
        known = self._slots.get(origin)
        if known is None:
            host_line = encode_fields([(b"Host", origin.authority)])
            known = ConnectionSlots(self._max_connections, host_line=host_line)
            self._slots[origin] = known
        self._last_slots = (origin, known)
        return known

    async def _connect(self, origin: Origin, slots: ConnectionSlots) -> Connection:
        """Open a connection in a slot that the caller has acquired."""
        connection = await self._connector.connect(origin)
        self.num_opened += 1
        if connection.is_lost:
            raise ConnectionLostError(f"{origin.url} closed the connection as soon as it was open")
        connection.slots = slots
        self._open.add(connection)
        if self._is_closed:
            connection.abort()
            raise ConnectionLostError("the pool was closed")
        if self._check_timer is None:
            self._schedule_check(asyncio.get_running_loop())
        return connection

    def _connection_abandoned(self, connection: Connection) -> None:
        """Close a connection whose request was cancelled as it connected."""
        if not connection.is_lost:
            self._open.add(connection)
            connection.abort()

    def _connection_lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection.slots is not None:
            connection.slots.remove_idle(connection)
        if not self._open and self._all_lost is not None:
            self._all_lost.set()

    def _check_timeouts(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the timeouts of every connection; again later while there is one."""
        now = loop.time()
        assert self._check_timer is not None
        # If this process was blocked or not scheduled, responses may be here that were not read.
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

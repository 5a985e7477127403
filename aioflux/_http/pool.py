"""Bounded keep-alive connections to each origin, and the requests over them.

`Pool.request` is over 60 lines: half of it says what a request means, and the rest is the hot path,
on which one more coroutine would cost every request.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Final

from aioflux._http.body import Buffer, Destination, as_destination, as_views
from aioflux._http.codec import encode_fields, encode_head
from aioflux._http.connect import Openings
from aioflux._http.connection import Connection, Response, Waiter
from aioflux._http.connection_slots import Lane
from aioflux._http.errors import CertificateError, ConnectError, ConnectionLostError
from aioflux._http.request import (
    BODY_METHODS,
    RESENDABLE,
    FixedHeaders,
    check_headers,
    head_seconds_of,
)
from aioflux._http.tls import default_context, distrust

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._http.origin import Origin
    from aioflux.options import Timeouts

__all__ = ["Pool"]

_NO_HEADERS: Final = FixedHeaders()

_MAX_TICK_SECONDS: Final = 0.25
_SETTLE_SECONDS: Final = 1.0
"""Time for handshakes under way when the pool is closed."""


class Pool:
    """Requests over bounded keep-alive connections.

    A pool belongs to the event loop of its first request. Nothing is opened before that.

    Attributes:
        num_opened: Connections opened so far.
        num_stale: Kept-alive connections that a request found closed, and that were replaced by
            new ones.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        timeouts: Timeouts,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Take the limits; open nothing.

        Args:
            max_connections: Most connections to one origin; further requests wait in line.
            timeouts: How long one attempt waits for the network.
            ssl_context: How servers are verified; `default_context()` by default.
        """
        if max_connections < 1:
            raise ValueError(f"max_connections must be above 0, not {max_connections!r}")
        self.num_opened = 0
        self.num_stale = 0
        self._max_connections = max_connections
        self._timeouts = timeouts
        self._ssl_context = ssl_context
        self._lanes: dict[Origin, Lane] = {}
        # The lane of the last request: to compare an origin costs less than to hash it.
        self._last: tuple[Origin | None, Lane] = (None, Lane(1))
        # Every open connection, and where it belongs.
        self._open: dict[Connection, Lane | None] = {}
        self._openings = Openings()
        self._held: list[Connection] = []
        self._all_lost: asyncio.Event | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._tick_seconds = min(timeouts.progress_seconds / 4, _MAX_TICK_SECONDS)
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._open)

    @property
    def num_idle(self) -> int:
        """Open connections without a request."""
        return sum(len(lane.idle) for lane in self._lanes.values())

    async def request(
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
    ) -> Response:
        """Send one request and receive its whole response. Redirects are not followed.

        A kept-alive connection that the server has closed is replaced: unseen by any request where
        the end of it is here already; and where it is found under a request, by sending a GET or
        HEAD once more, and any other one whose body had not left whole, so that the server cannot
        have acted on it. A write that had left whole is the caller's to decide on.

        Cancellation closes the connection under way and frees its place.

        Args:
            origin: The server.
            method: Method, in upper case.
            target: Path and query, percent-encoded.
            headers: Further headers; Host and Content-Length are added here.
            body: Memory that is sent as it is, without a copy; it must not change meanwhile.
            into: Memory for the body of a 2xx response, or a function that gives memory for a
                length; `bytes` makes it an object of that class. Other bodies get a buffer of
                their own, of 1 MiB at most.
            max_body_bytes: Longest body of a 2xx response that is accepted.
            head_seconds: Time for the response to begin once the request has left, in seconds; by
                default `progress_seconds` for GET and HEAD and `idle_seconds` for the others.
            fixed: Headers that stand before `headers`, encoded already.

        Raises:
            TransportError: There is no whole response.
            ValueError: The request cannot be encoded, or `into` cannot be written.
            RuntimeError: The pool is closed.
        """
        if self._is_closed:
            raise RuntimeError("the pool is closed")
        views = as_views(body) if body is not None else []
        last, lane = self._last
        if origin is not last:
            lane = self._lane_of(origin)
        check_headers(headers)
        if views or method in BODY_METHODS:
            headers = [*headers, (b"Content-Length", b"%d" % sum(map(len, views)))]
        head = encode_head(method, target, headers, fixed=lane.fixed + fixed.encoded)
        if isinstance(into, memoryview):
            into = as_destination(into)
        if head_seconds is None:
            head_seconds = head_seconds_of(method, self._timeouts)
        is_resendable = method in RESENDABLE
        connection = lane.take_idle() or await lane.take()
        try:
            if connection is not None and not is_resendable and connection.has_spoken():
                self.num_stale += 1
                connection.abort()
            while True:
                if connection is None or not connection.is_usable:
                    connection = await self._open_connection(origin, lane)
                waiter: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
                connection.send(
                    head,
                    views,
                    is_head=method == b"HEAD",
                    into=into,
                    max_body_bytes=max_body_bytes,
                    head_seconds=head_seconds,
                    waiter=waiter,
                    is_held=True,
                )
                self._hold(connection)
                try:
                    return await waiter
                except ConnectionLostError:
                    is_stale = connection.is_stale
                    is_safe = is_resendable or not connection.request_left
                    if not (is_stale and is_safe) or self._is_closed:
                        raise
                    self.num_stale += 1
                    connection = None
        except BaseException:
            # Cancelled: what is under way must not reach the caller's memory any more.
            if connection is not None:
                connection.abort()
            raise
        finally:
            lane.give_back(connection)

    def start(
        self,
        origin: Origin,
        target: bytes,
        fields: bytes,
        waiter: Waiter,
        *,
        into: Destination | None,
        max_body_bytes: int | None,
    ) -> Connection | None:
        """Send a GET, if a connection is idle; nothing is awaited, and a task is not needed.

        The waiter is told of the response within the callback that receives the end of it. It, or
        whoever calls `abort` on the connection before that, gives the connection to `end`.

        Args:
            origin: The server.
            target: Path and query, percent-encoded; the caller answers for it.
            fields: Header lines, each with its end, as `FixedHeaders.encoded`.
            waiter: Who is told.
            into: As in `request`, and so is `max_body_bytes`.
            max_body_bytes: Longest body that is accepted.

        Returns:
            The connection, or None where none is idle and nothing was done.
        """
        last, lane = self._last
        if origin is not last:
            lane = self._lane_of(origin)
        connection = None if self._is_closed else lane.take_idle()
        if connection is not None:
            try:
                connection.send(
                    b"GET %b HTTP/1.1\r\n%b%b\r\n" % (target, lane.fixed, fields),
                    None,
                    is_head=False,
                    into=into,
                    max_body_bytes=max_body_bytes,
                    head_seconds=self._timeouts.progress_seconds,
                    waiter=waiter,
                    is_held=True,
                )
            except BaseException:
                connection.abort()
                lane.give_back(connection)
                raise
            self._hold(connection)
        return connection

    def _hold(self, connection: Connection) -> None:
        """Write the request of a connection at the end of this turn of the loop.

        All that are begun in one turn leave together: a server is then woken by the first of them
        and busy with it as the others arrive. Beside nginx on one machine of two cores, a GET of
        1 KiB through a store took 54 to 61 us of the client's CPU instead of 75 to 88, and half of
        the server's.
        """
        if not self._held:
            asyncio.get_running_loop().call_soon(self._write_held)
        self._held.append(connection)

    def _write_held(self) -> None:
        held, self._held = self._held, []
        for connection in held:
            connection.write_held()

    def end(self, origin: Origin, connection: Connection) -> None:
        """Take back a connection that `start` gave out."""
        last, lane = self._last
        (lane if origin is last else self._lanes[origin]).give_back(connection)

    async def aclose(self) -> None:
        """Fail what is under way, close every connection, and wait until all are closed."""
        self._is_closed = True
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for lane in self._lanes.values():
            lane.fail_waiters(ConnectionLostError("the pool was closed"))
        for connection in tuple(self._open):
            connection.fail_closed()
        await self._openings.settle(seconds=_SETTLE_SECONDS)
        while self._open:
            # A new one each time: a connection that was being opened meanwhile comes after the
            # first is set, and waiting for a set event never lets the loop turn.
            self._all_lost = asyncio.Event()
            await self._all_lost.wait()

    def _lane_of(self, origin: Origin) -> Lane:
        lane = self._lanes.get(origin)
        if lane is None:
            host = encode_fields([(b"Host", origin.authority)])
            lane = self._lanes[origin] = Lane(self._max_connections, fixed=host)
        self._last = (origin, lane)
        return lane

    async def _open_connection(self, origin: Origin, lane: Lane) -> Connection:
        """Open a connection in a place that the caller has taken."""
        connection = await self._openings.run(self._connect(origin), self._drop)
        where = f"{origin.scheme}://{origin.authority.decode()}"
        self.num_opened += 1
        if connection.is_lost:
            raise ConnectionLostError(f"{where} closed the connection as soon as it was open")
        self._open[connection] = lane
        if self._is_closed:
            connection.abort()
            raise ConnectionLostError("the pool was closed")
        if self._ticker is None:
            self._tick_soon(asyncio.get_running_loop())
        return connection

    def _drop(self, connection: Connection) -> None:
        """Close a connection that nobody waited for."""
        if not connection.is_lost:
            self._open[connection] = None
            connection.abort()

    async def _connect(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        is_tls = origin.scheme == "https"
        context = self._tls_context() if is_tls else None

        def connection_factory() -> Connection:
            return Connection(on_lost=self._connection_lost, is_tls=is_tls)

        limit = self._timeouts.connect_seconds
        where = f"{origin.scheme}://{origin.authority.decode()}"
        try:
            async with asyncio.timeout(limit):
                _, connection = await loop.create_connection(
                    connection_factory, origin.host, origin.port, ssl=context
                )
        except TimeoutError as exc:
            raise ConnectError(f"no connection to {where} within {limit:g} s") from exc
        except ssl.SSLCertVerificationError as exc:
            raise CertificateError(distrust(where, exc)) from exc
        except (OSError, ssl.SSLError) as exc:
            raise ConnectError(f"no connection to {where}: {exc}") from exc
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = default_context()
        return self._ssl_context

    def _connection_lost(self, connection: Connection) -> None:
        lane = self._open.pop(connection, None)
        if lane is not None:
            lane.lost(connection)
        if not self._open and self._all_lost is not None:
            self._all_lost.set()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look at every connection; come again while there is one."""
        now = loop.time()
        assert self._ticker is not None
        # Where this process stood still, or was not given the processor, answers may lie unread.
        late_seconds = now - self._ticker.when()
        slept_seconds = late_seconds if late_seconds > self._tick_seconds else 0.0
        for connection in tuple(self._open):
            connection.check(now, self._timeouts, slept_seconds=slept_seconds)
        self._ticker = None
        if self._open:
            self._tick_soon(loop)

    def _tick_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticker = loop.call_later(self._tick_seconds, self._tick, loop)

"""Slots that limit the number of connections to one origin, without I/O.

A slot is free, or held by one connection that is connecting, idle or in use. The connection that
became idle last is acquired first, so that connections that are not needed reach the idle timeout.
Requests wait for a free slot in the order in which they arrive.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioflux._http.connection import Connection


class ConnectionSlots:
    """Slots for the connections to one origin.

    Attributes:
        host_line: Encoded header lines of every request to the origin: Host, and
            Proxy-Authorization if a proxy receives the request itself.
        target_prefix: Beginning of the target of every request: the origin if a proxy receives the
            request itself (absolute-form of RFC 9112, 3.2.2), otherwise empty.
        idle: Idle connections, in the order in which they became idle.
        num_held: Number of slots that are not free.
    """

    __slots__ = ("_max_connections", "_waiters", "host_line", "idle", "num_held", "target_prefix")

    def __init__(
        self, max_connections: int, *, host_line: bytes = b"", target_prefix: bytes = b""
    ) -> None:
        self.host_line = host_line
        self.target_prefix = target_prefix
        self.idle: list[Connection] = []
        self.num_held = 0
        self._max_connections = max_connections
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()

    def acquire_idle(self) -> Connection | None:
        """Acquire an idle connection and its slot; None if none is idle, or if requests wait."""
        if not self._waiters:
            while self.idle:
                connection = self.idle.pop()
                if connection.is_usable:
                    return connection
                # Closed: release its slot here. `remove_idle` will not find it in `idle`.
                self.num_held -= 1
        return None

    async def acquire(self) -> Connection | None:
        """Acquire a slot, and wait for a free one if necessary. `release` frees the slot.

        Returns:
            The open connection that holds the slot, or None if the caller has to open one.
        """
        connection = self.acquire_idle()
        if connection is not None:
            return connection
        if not self._waiters and self.num_held < self._max_connections:
            self.num_held += 1
            return None
        return await self._wait()

    async def _wait(self) -> Connection | None:
        waiter: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # Cancelled after `release` had passed the slot to this waiter: pass it on.
                self.release(waiter.result())
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def release(self, connection: Connection | None) -> None:
        """Pass a slot, with its connection if that is usable, to the next waiter.

        If no request waits, a usable connection becomes idle and holds the slot; otherwise the slot
        is free.
        """
        if connection is not None and not connection.is_usable:
            connection = None
        waiter = self._next_waiter() if self._waiters else None
        if waiter is not None:
            waiter.set_result(connection)
        elif connection is not None:
            self.idle.append(connection)
        else:
            self.num_held -= 1

    def remove_idle(self, connection: Connection) -> None:
        """Release the slot of a closed connection, if the connection was idle."""
        if connection in self.idle:
            self.idle.remove(connection)
            self.release(None)

    def fail_waiters(self, error: Exception) -> None:
        """Fail every request that waits for a slot."""
        while (waiter := self._next_waiter()) is not None:
            waiter.set_exception(error)

    def _next_waiter(self) -> asyncio.Future[Connection | None] | None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                return waiter
        return None

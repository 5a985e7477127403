"""Slots for the connections to one origin: bookkeeping without I/O.

A slot is free, or held by one connection that is connecting, idle or under a request. The
connection that became idle last is acquired first, so that under a shrinking load the others reach
their idle limit. Requests that find no free slot wait, first in, first out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioflux._http.connection import Connection

__all__ = ["ConnectionSlots"]


class ConnectionSlots:
    """Slots for the connections to one origin.

    Attributes:
        host_line: The Host header line of every request to the origin.
        idle: Open connections without a request, the last used one at the end.
        num_held: Slots that are not free.
    """

    __slots__ = ("_max_connections", "_waiters", "host_line", "idle", "num_held")

    def __init__(self, max_connections: int, *, host_line: bytes = b"") -> None:
        self.host_line = host_line
        self.idle: list[Connection] = []
        self.num_held = 0
        self._max_connections = max_connections
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()

    def acquire_idle(self) -> Connection | None:
        """Acquire an idle connection with its slot; None if there is none, or requests wait."""
        if not self._waiters:
            # A connection in `idle` is usable, or `remove_idle` is about to be called for it.
            while self.idle:
                connection = self.idle.pop()
                if connection.is_usable:
                    return connection
                self.num_held -= 1
        return None

    async def acquire(self) -> Connection | None:
        """Acquire a slot, to be given back with `release`.

        Returns:
            The idle connection in it, or None: the caller may open one.
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
                # Cancelled after it had acquired the slot, which goes to the next waiter.
                self.release(waiter.result())
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def release(self, connection: Connection | None) -> None:
        """Release a slot, with the connection in it if that is still usable."""
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
        """Free the slot of a connection that was closed, if it was idle."""
        if connection in self.idle:
            self.idle.remove(connection)
            self.release(None)

    def fail_waiters(self, error: Exception) -> None:
        """Fail every waiting request."""
        while (waiter := self._next_waiter()) is not None:
            waiter.set_exception(error)

    def _next_waiter(self) -> asyncio.Future[Connection | None] | None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                return waiter
        return None

"""Who holds which of the places for connections to one origin: bookkeeping without I/O.

A place is free, or taken by one connection that is opening, idle, or under a request. Idle
connections are taken last in, first out, so that a shrinking load lets the oldest run into their
idle limit. Requests that find no place wait first come, first served.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioflux._http.connection import Connection

__all__ = ["Lane"]


class Lane:
    """Places for connections to one origin.

    Attributes:
        fixed: Header lines of every request to the origin.
        idle: Open connections without a request, the last used one at the end.
        num_taken: Places taken.
    """

    __slots__ = ("_max_connections", "_waiters", "fixed", "idle", "num_taken")

    def __init__(self, max_connections: int, *, fixed: bytes = b"") -> None:
        self.fixed = fixed
        self.idle: list[Connection] = []
        self.num_taken = 0
        self._max_connections = max_connections
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()

    def take_idle(self) -> Connection | None:
        """Take an open connection, with its place, if one is idle and nobody is in line for it."""
        if not self._waiters:
            # A connection in `idle` is usable, or its loss is about to be told to us.
            while self.idle:
                connection = self.idle.pop()
                if connection.is_usable:
                    return connection
                self.num_taken -= 1
        return None

    async def take(self) -> Connection | None:
        """Take a place.

        Returns:
            An open connection, or None: a place to open one in. The caller ends with `give_back`
            or `free` either way.
        """
        connection = self.take_idle()
        if connection is not None:
            return connection
        if not self._waiters and self.num_taken < self._max_connections:
            self.num_taken += 1
            return None
        return await self._wait()

    async def _wait(self) -> Connection | None:
        waiter: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # Cancelled after it was served: the place goes to the next in line.
                self.give_back(waiter.result())
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def give_back(self, connection: Connection | None) -> None:
        """Give a place back, with the connection in it if that is still usable."""
        if connection is not None and not connection.is_usable:
            connection = None
        waiter = self._next_waiter()
        if waiter is not None:
            waiter.set_result(connection)
        elif connection is not None:
            self.idle.append(connection)
        else:
            self.num_taken -= 1

    def lost(self, connection: Connection) -> None:
        """Free the place of a connection that was closed while it was idle."""
        if connection in self.idle:
            self.idle.remove(connection)
            self.give_back(None)

    def fail_waiters(self, error: Exception) -> None:
        """Fail everybody in line."""
        while (waiter := self._next_waiter()) is not None:
            waiter.set_exception(error)

    def _next_waiter(self) -> asyncio.Future[Connection | None] | None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                return waiter
        return None

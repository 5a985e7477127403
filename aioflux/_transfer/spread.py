"""Requests with large bodies, spread over several event loops, each in a thread of its own.

    Session.call, on the loop of the caller: slots, bytes in flight, retries, deadlines, counters
        -> Spread.run: the service of the caller's loop, or of the loop of another thread
                -> connection, TLS, checksums: without the GIL for most of their time

Only the attempt runs on another loop, so that all loops have one set of limits and counters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aioflux._concurrency.loop_threads import loop_threads, run_on

if TYPE_CHECKING:
    import asyncio

    from aioflux._services.base import Service

T = TypeVar("T")

_LEAST_BYTES: Final = 1024 * 1024
"""Smaller bodies stay on the caller's loop: the crossing to another loop costs 0.1 ms."""


class Spread:
    """The services of one store: on the caller's loop, and on the loops of other threads.

    Args:
        service: The service on the caller's loop.
        others: The services on other loops, opened at the same time, so that they have the same
            settings.
    """

    def __init__(self, service: Service, others: Sequence[Service]) -> None:
        self._services = (service, *others)
        self._used: set[int] = set()
        """Numbers of the other services that were used."""
        self._busy_bytes = [0] * len(self._services)
        """Bytes of the bodies in flight on each loop; the first is the caller's."""
        self._pid = os.getpid()

    async def run(self, num_bytes: int, request: Callable[[Service], Coroutine[Any, Any, T]]) -> T:
        """Run a request with a body of this size on the loop with the fewest bytes in flight."""
        busy = self._busy_bytes
        number = busy.index(min(busy)) if num_bytes >= _LEAST_BYTES else 0
        busy[number] += num_bytes
        try:
            service = self._services[number]
            if not number:
                return await request(service)
            self._used.add(number)
            return await run_on(self._loop(number), lambda: request(service))
        finally:
            busy[number] -= num_bytes

    def _loop(self, number: int) -> asyncio.AbstractEventLoop:
        return loop_threads(len(self._services) - 1)[number - 1]

    async def aclose(self) -> None:
        """Close the services of all loops; in a forked child only that of the caller's loop."""
        try:
            if self._pid == os.getpid():
                for number in self._used:
                    await run_on(self._loop(number), self._services[number].aclose)
        finally:
            await self._services[0].aclose()

"""Requests with large bodies, spread over several event loops, each in a thread of its own.

    Session.call, on the loop of the caller: slots, bytes in flight, retries, deadlines, counters
        -> Spread.run: the service of the caller's loop, or of the loop of another thread
                -> connection, TLS, checksums: without the GIL for most of their time

Only the attempt runs on another loop, so that all loops have one set of limits and counters.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypeVar

from aioflux._concurrency.loop_threads import loop_threads, run_on

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine
    from typing import Any

    from aioflux._services.base import Service

__all__ = ["Spread"]

T = TypeVar("T")

_LEAST_BYTES: Final = 1024 * 1024
"""Smaller bodies stay on the caller's loop: the crossing to another loop costs 0.1 ms."""


class Spread:
    """The services of one store: on the caller's loop, and on the loops of other threads.

    Args:
        service: The service on the caller's loop.
        open_service: Opens another service of the store. Called on the loop that will use it.
        num_loops: Number of event loops, that of the caller included.
    """

    def __init__(
        self, service: Service, open_service: Callable[[], Service], num_loops: int
    ) -> None:
        self._home = service
        self._pid = os.getpid()
        self._open_service = open_service
        self._num_loops = num_loops
        self._services: dict[asyncio.AbstractEventLoop, Service] = {}
        """The opened services, by their loops. Each loop's thread adds and uses its own."""
        self._busy_bytes = [0] * num_loops
        """Bytes of the bodies in flight on each loop; the first is the caller's."""

    async def run(self, num_bytes: int, request: Callable[[Service], Coroutine[Any, Any, T]]) -> T:
        """Run a request with a body of this size on the loop with the fewest bytes in flight."""
        if self._num_loops == 1 or num_bytes < _LEAST_BYTES:
            return await request(self._home)
        number = self._busy_bytes.index(min(self._busy_bytes))
        self._busy_bytes[number] += num_bytes
        try:
            if not number:
                return await request(self._home)
            loop = loop_threads(self._num_loops - 1)[number - 1]
            return await run_on(loop, lambda: request(self._service_of(loop)))
        finally:
            self._busy_bytes[number] -= num_bytes

    def _service_of(self, loop: asyncio.AbstractEventLoop) -> Service:
        service = self._services.get(loop)
        if service is None:
            service = self._services[loop] = self._open_service()
        return service

    async def aclose(self) -> None:
        """Close the services of all loops; in a forked child only that of the caller's loop."""
        services, self._services = self._services, {}
        if self._pid != os.getpid():
            services = {}
        for loop, service in services.items():
            await run_on(loop, service.aclose)
        await self._home.aclose()

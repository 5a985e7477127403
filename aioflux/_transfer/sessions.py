"""The sessions of one store: one for each event loop that it is used on."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from aioflux._transfer.counters import StoreCounters
from aioflux._transfer.limits import Limits, RequestRate, plan_start
from aioflux._transfer.session import Session
from aioflux._transfer.spread import Spread
from aioflux._transfer.twice import ReadingTwice
from aioflux.options import longest_cleanup

if TYPE_CHECKING:
    from aioflux._services.base import Service
    from aioflux._values.stats import ProgressHook, StoreStats
    from aioflux.options import CleanupTimeouts, RetryPolicy, TransferOptions

T = TypeVar("T")

_jitter: Final = random.SystemRandom().random
_live: weakref.WeakSet[Sessions] = weakref.WeakSet()


class Sessions:
    """The sessions of one store. Each is opened when the store is first used on an event loop.

    In a DataLoader worker, a session has its share of the requests per second of the store.

    Environment:
        WORLD_SIZE: Number of ranks. If it is above 64, multiplied by the number of workers, the
            first requests of a session are spread over time.

    Attributes:
        cleanup_timeouts: Time limits of the clean-up of the store's transfers.
    """

    def __init__(
        self,
        open_service: Callable[[], Service],
        transfer: TransferOptions,
        retry: RetryPolicy,
        progress: ProgressHook | None,
        *,
        num_loops: int,
        cleanup_timeouts: CleanupTimeouts,
        owner: str,
    ) -> None:
        self._open_service = open_service
        self._transfer = transfer
        self._retry = retry
        self._progress = progress
        self._num_loops = num_loops
        self.cleanup_timeouts = cleanup_timeouts
        self._owner = owner
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Session] = (
            weakref.WeakKeyDictionary()
        )
        self._counters = StoreCounters()
        self._is_closed = False
        _live.add(self)

    def current(self) -> Session:
        """Return the session of the running loop, opened on first use.

        Raises:
            ValueError: The store is closed.
        """
        if self._is_closed:
            raise ValueError(f"{self._owner} is closed; open a new store")
        loop = asyncio.get_running_loop()
        session = self._by_loop.get(loop)
        return session if session is not None else self._open(loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> Session:
        for other_loop, other in self.open_sessions():
            if other_loop.is_closed():
                other.memory.clear()  # the timer of the memory ended with its loop
        transfer = self._transfer
        reads_twice = transfer.verify and transfer.verify_ranges
        # A read may be two requests at the same time.
        limits = Limits(
            max_in_flight=-(-transfer.max_in_flight // (1 + reads_twice)),
            max_in_flight_bytes=-(-transfer.max_in_flight_bytes // (1 + reads_twice)),
        )
        text, num_workers = os.environ.get("WORLD_SIZE", ""), _num_workers()
        world_size = (int(text) if text.isdecimal() else 1) * num_workers
        first, delay = plan_start(transfer.max_in_flight, world_size, _jitter())
        if delay:
            limits.requests.start_slowly(first, delay)
        if (per_second := transfer.max_requests_per_second) is not None:
            limits.requests.rate = RequestRate(per_second / num_workers, fraction=_jitter())
        services = [self._open_service() for _ in range(self._num_loops)]
        if reads_twice:

            def on_mismatch(key: str, reason: str) -> None:
                """Count wrong bytes; the thread of another event loop may call this."""
                if asyncio.get_running_loop() is loop:
                    session.count_mismatch(key, reason)
                else:
                    loop.call_soon_threadsafe(session.count_mismatch, key, reason)

            services = [ReadingTwice(service, on_mismatch) for service in services]
        counters = self._counters.add_loop(loop, limits.requests)
        session = Session(
            services[0],
            Spread(services[0], services[1:]),
            transfer,
            self._retry,
            limits,
            counters,
            self._progress,
            self.cleanup_timeouts,
        )
        self._by_loop[loop] = session
        return session

    def __contains__(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        return loop is not None and loop in self._by_loop

    @property
    def num_repeated(self) -> int:
        """Number of requests that were repeated, summed over all event loops of this process."""
        return self._counters.num_repeated

    def stats(self) -> StoreStats:
        """Return the counters of the store, summed over all event loops of this process."""
        return self._counters.stats(self._transfer.max_in_flight)

    async def close_current(self, *, is_interrupted: bool = False) -> None:
        """Close the connections of the running loop; the store stays usable."""
        session = self._by_loop.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.aclose(is_interrupted=is_interrupted)

    async def aclose(self, *, is_interrupted: bool = False) -> None:
        """Close the store and the connections of the running loop. A second call has no effect."""
        self._is_closed = True
        await self.close_current(is_interrupted=is_interrupted)
        if not self._by_loop:
            _live.discard(self)  # it has no clean-up left, for which others would wait

    def open_sessions(self) -> list[tuple[asyncio.AbstractEventLoop, Session]]:
        """Return the event loops that use the store, each with its session."""
        return copied(self._by_loop.items)

    def forget(self) -> None:
        """Drop all sessions without closing their connections, in a forked child."""
        self._by_loop.clear()
        self._counters = StoreCounters()


def _num_workers() -> int:
    """Return the number of workers of the DataLoader if this process is one, otherwise 1."""
    worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)()
    return 1 if worker_info is None else worker_info.num_workers


def copied(items: Callable[[], Iterator[T]]) -> list[T]:
    """Return the items of a weak collection, to which other threads may add items meanwhile."""
    while True:
        with suppress(RuntimeError):  # another thread has added an item
            return list(items())


def live_sessions() -> list[Sessions]:
    """Return the sessions of all stores of this process."""
    return copied(lambda: iter(_live))


def longest_cleanup_of_all() -> CleanupTimeouts:
    """Return `CleanupTimeouts` whose fields are each the longest of all stores of this process."""
    return longest_cleanup(sessions.cleanup_timeouts for sessions in live_sessions())

"""A store opened on one event loop: what every transfer needs, in one value."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from aioflux._errors import TransientError
from aioflux._stats import Progress
from aioflux.service._base import Body
from aioflux.transfer._counters import Counters
from aioflux.transfer._retry import RetryBudget, with_retry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aioflux._policy import RetryPolicy, TransferOptions
    from aioflux._stats import ProgressHook
    from aioflux.service._base import Service
    from aioflux.transfer._limits import Limits
    from aioflux.transfer._upload import ObjectWriter

__all__ = ["Session"]

T = TypeVar("T")

_THROTTLED = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Session:
    """Service, policies and limits; made once for each store and loop."""

    service: Service
    options: TransferOptions
    retry: RetryPolicy
    limits: Limits
    counters: Counters = field(default_factory=Counters)
    progress: ProgressHook | None = None
    writers: set[ObjectWriter] = field(default_factory=set)
    cleanups: set[asyncio.Task[Any]] = field(default_factory=set)
    pid: int = field(default_factory=os.getpid)
    budget: RetryBudget = field(init=False)

    def __post_init__(self) -> None:
        budget = RetryBudget(
            burst=self.retry.budget_retries, per_second=self.retry.budget_per_second
        )
        object.__setattr__(self, "budget", budget)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child: tasks and connections are the parent's then."""
        return os.getpid() != self.pid

    def refuse_in_child(self, key: str) -> None:
        """Refuse to go on in a forked child with what was opened before.

        Raises:
            RuntimeError: This is one.
        """
        if self.is_inherited:
            raise RuntimeError(
                f"{self.service.uri(key)} is reached through what was opened before a fork; open "
                "it again in this process"
            )

    async def call(
        self, key: str, attempt: Callable[[int], Awaitable[T]], *, num_bytes: int = 0
    ) -> T:
        """Run one request, within the limits, until it succeeds or the policy ends.

        Bytes are held from the first attempt to the end of the last, because the memory is; a
        place among the requests in flight only while an attempt is under way, so that a backoff
        keeps nobody waiting.

        Args:
            key: What it asks for; errors name it.
            attempt: Sends the request once; it is given the number of the attempt, from 1.
            num_bytes: Bytes of the bodies that it moves.
        """
        self.refuse_in_child(key)
        # Bytes first: who waits for memory must not keep a place from a request that needs none.
        await self.limits.bytes.acquire(num_bytes)
        try:
            # Waiting in line for the first place is not yet part of the request, whose deadline
            # begins after it.
            place = _Place(self, await self.limits.requests.acquire())
            try:
                return await with_retry(
                    lambda number: place.run(key, attempt, number, num_bytes),
                    self.retry,
                    uri_of=lambda: self.service.uri(key),
                    budget=self.budget,
                )
            finally:
                place.give_up()
        finally:
            self.limits.bytes.release(num_bytes)

    async def aclose(self, *, seconds: float = 5.0) -> None:
        """Abort the uploads of writers that are still open, and close the service.

        A writer that somebody goes on using fails then. What it has stored so far would be billed.

        Args:
            seconds: Time for clean-up that is under way: a service that answers needs a part of a
                second.
        """
        while self.writers or self.cleanups:
            for writer in tuple(self.writers):
                await writer.end()
            if self.cleanups:
                _, left = await asyncio.wait(tuple(self.cleanups), timeout=seconds)
                if left:
                    break  # they fail with the connections, and say so
        await self.service.aclose()

    def moved(self, key: str, *, num_received: int = 0, num_sent: int = 0) -> None:
        """Count bytes of bodies, and tell the hook."""
        self.counters.bytes_received += num_received
        self.counters.bytes_sent += num_sent
        if self.progress is not None:
            if num_received:
                self._tell(Progress(self.service.uri(key), "received", num_received))
            if num_sent:
                self._tell(Progress(self.service.uri(key), "sent", num_sent))

    def _tell(self, progress: Progress) -> None:
        assert self.progress is not None
        try:
            self.progress(progress)
        except (SystemExit, KeyboardInterrupt) as exc:
            # These would end the event loop, and with it every other request.
            raise RuntimeError(f"the progress hook raised {exc!r}") from exc


class _Place:
    """A place among the requests in flight, taken anew for each attempt, and what is counted."""

    __slots__ = ("_mark", "_session")

    def __init__(self, session: Session, mark: int) -> None:
        self._session = session
        self._mark: int | None = mark

    def give_up(self) -> None:
        """Give the place back, where it is taken."""
        if self._mark is not None:
            self._mark = None
            self._session.limits.requests.release()

    async def run(
        self, key: str, attempt: Callable[[int], Awaitable[T]], number: int, num_bytes: int
    ) -> T:
        session = self._session
        counters, requests = session.counters, session.limits.requests
        if self._mark is None:
            # What was begun is finished first: at the end of the line its deadline could pass.
            self._mark = await requests.acquire(in_front=True)
        mark = self._mark
        counters.num_requests += 1
        counters.num_retries += number > 1
        counters.num_in_flight += 1
        begun = time.perf_counter()
        try:
            result = await attempt(number)
        except BaseException as exc:
            counters.num_failures += 1
            if isinstance(exc, TransientError):
                if exc.status in _THROTTLED:
                    counters.num_throttled += 1
                    requests.throttled(mark)
                session.moved(key, num_received=exc.num_bytes_received)
            raise
        finally:
            counters.num_in_flight -= 1
            self.give_up()
        counters.add_latency(time.perf_counter() - begun)
        requests.succeeded()
        session.budget.succeeded(was_retry=number > 1)
        if isinstance(result, Body):
            session.moved(key, num_received=len(result.data))
        elif num_bytes:
            session.moved(key, num_sent=num_bytes)
        return result

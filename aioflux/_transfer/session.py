"""A store opened on one event loop: what every transfer needs, in one value.

`Session.call` is over 60 lines: a third of it says what it does, and the first attempt stands in it
because a coroutine more would cost every request.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aioflux._services.base import Body
from aioflux._transfer.counters import Counters
from aioflux._transfer.deadlines import Deadlines
from aioflux._transfer.prefault import Populator
from aioflux._transfer.retry import RetryBudget, with_retry
from aioflux._values.stats import Progress
from aioflux.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aioflux._services.base import Service
    from aioflux._transfer.limits import Limits
    from aioflux._values.stats import ProgressHook
    from aioflux.options import RetryPolicy, TransferOptions

__all__ = ["THROTTLED", "Session"]

T = TypeVar("T")

THROTTLED = frozenset({429, 503})
"""Statuses of a service that is asked too often."""


class Open(Protocol):
    """What leaves something behind on the service unless it is ended: a writer, a composed read."""

    async def end(self) -> None:
        """Clean up because the store is closed, and be none of `Session.opened` any more."""


@dataclass(frozen=True, slots=True)
class Session:
    """Service, policies and limits; made once for each store and loop."""

    service: Service
    options: TransferOptions
    retry: RetryPolicy
    limits: Limits
    counters: Counters = field(default_factory=Counters)
    progress: ProgressHook | None = None
    opened: set[Open] = field(default_factory=set)
    cleanups: set[asyncio.Task[Any]] = field(default_factory=set)
    pid: int = field(default_factory=os.getpid)
    budget: RetryBudget = field(init=False)
    deadlines: Deadlines = field(init=False)
    populator: Populator = field(default_factory=Populator)

    def __post_init__(self) -> None:
        budget = RetryBudget(
            burst=self.retry.budget_retries, per_second=self.retry.budget_per_second
        )
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "deadlines", Deadlines(self.retry.deadline_seconds))

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
        self,
        key: str,
        attempt: Callable[[int], Awaitable[T]],
        *,
        num_bytes: int = 0,
        after: TransientError | None = None,
        began: float = 0.0,
    ) -> T:
        """Run one request, within the limits, until it succeeds or the policy ends.

        Bytes are held from the first attempt to the end of the last, because the memory is; a
        place among the requests in flight only while an attempt is under way, so that a backoff
        keeps nobody waiting.

        Args:
            key: What it asks for; errors name it.
            attempt: Sends the request once; it is given the number of the attempt, from 1.
            num_bytes: Bytes of the bodies that it moves.
            after: How the first attempt failed, where it was made before.
            began: When that began, on the monotonic clock.
        """
        if os.getpid() != self.pid:
            self.refuse_in_child(key)
        # Bytes first: who waits for memory must not keep a place from a request that needs none.
        held, requests = self.limits.bytes, self.limits.requests
        if not held.take(num_bytes):
            await held.acquire(num_bytes)
        try:
            if after is None:
                # Waiting in line for the first place is not yet part of the request, whose deadline
                # begins after it.
                mark = requests.take()
                if mark is None:
                    mark = await requests.acquire()
                began = self.begin()
                # Not in `_again`: of a hundred attempts ninety-nine are the first.
                task = asyncio.current_task()
                assert task is not None
                is_first = self.deadlines.enter(task, began)
                try:
                    result = await attempt(1)
                except TransientError as exc:
                    self._failed(key, exc, mark)
                    after = exc
                except BaseException as exc:
                    self._failed(key, exc, mark)
                    is_cancelled = is_first and isinstance(exc, asyncio.CancelledError)
                    if is_cancelled and self.deadlines.expired(task):
                        raise self.too_late(key, began) from exc
                    raise
                else:
                    self._succeeded(key, result, num_bytes, began)
                    return result
                finally:
                    if is_first:
                        self.deadlines.leave(task)
            return await with_retry(
                lambda number: self._again(key, attempt, number, num_bytes),
                self.retry,
                after=after,
                begun=began,
                uri_of=lambda: self.service.uri(key),
                budget=self.budget,
            )
        finally:
            held.release(num_bytes)

    async def _again(
        self, key: str, attempt: Callable[[int], Awaitable[T]], number: int, num_bytes: int
    ) -> T:
        """Make another attempt, in a place of its own."""
        # What was begun is finished first: at the end of the line its deadline could pass.
        mark = await self.limits.requests.acquire(in_front=True)
        began = self.begin()
        self.counters.num_retries += 1
        try:
            result = await attempt(number)
        except BaseException as exc:
            self._failed(key, exc, mark)
            raise
        self._succeeded(key, result, num_bytes, began, was_retry=True)
        return result

    # For a request without a task: what `call` does around its first attempt, step by step.

    def succeeded(self, key: str, result: object, num_bytes: int, began: float) -> None:
        """Count a first attempt that succeeded, and give back what it took from the limits."""
        self.limits.bytes.release(num_bytes)
        self._succeeded(key, result, 0, began)

    def failed(self, key: str, error: BaseException, mark: int, num_bytes: int) -> None:
        """Count a first attempt that failed, and give back what it took from the limits."""
        self.limits.bytes.release(num_bytes)
        self._failed(key, error, mark)

    def undo(self, num_bytes: int) -> None:
        """Forget an attempt that was never sent, and give back what it took from the limits."""
        self.counters.num_requests -= 1
        self.counters.num_in_flight -= 1
        self.limits.give_back(num_bytes)

    def begin(self) -> float:
        """Count an attempt that begins, and return the monotonic clock's time."""
        counters = self.counters
        counters.num_requests += 1
        counters.num_in_flight += 1
        return time.monotonic()

    def _failed(self, key: str, error: BaseException, mark: int) -> None:
        """Count an attempt that failed, and give its place back."""
        counters, requests = self.counters, self.limits.requests
        counters.num_in_flight -= 1
        counters.num_failures += 1
        if isinstance(error, TransientError) and error.status in THROTTLED:
            counters.num_throttled += 1
            requests.throttled(mark)
        requests.release()
        if isinstance(error, TransientError):
            self.moved(key, num_received=error.num_bytes_received)

    def _succeeded(
        self, key: str, result: object, num_bytes: int, began: float, *, was_retry: bool = False
    ) -> None:
        """Count an attempt that succeeded, and give its place back."""
        counters, requests = self.counters, self.limits.requests
        counters.num_in_flight -= 1
        counters.add_latency(time.monotonic() - began)
        requests.release()
        requests.succeeded()
        self.budget.succeeded(was_retry=was_retry)
        if isinstance(result, Body):
            num_received = len(result.data)
            counters.bytes_received += num_received
            if self.progress is not None and num_received:
                self._tell(Progress(self.service.uri(key), "received", num_received))
        elif num_bytes:
            self.moved(key, num_sent=num_bytes)

    def too_late(self, key: str, began: float) -> TransientError:
        """Return the error of a first attempt that the deadline has ended."""
        uri, seconds = self.service.uri(key), time.monotonic() - began
        return TransientError(
            f"no answer about {uri} came before the deadline (gave up after 1 attempt in "
            f"{seconds:.1f} s; RetryPolicy sets both)",
            uri=uri,
        )

    async def aclose(self, *, seconds: float = 5.0) -> None:
        """End the writers and composed reads that are still open, and close the service.

        One that somebody goes on using fails then. What it has stored so far would be billed.

        Args:
            seconds: Time for clean-up that is under way: a service that answers needs a part of a
                second.
        """
        while self.opened or self.cleanups:
            for each in tuple(self.opened):
                await each.end()
            if self.cleanups:
                _, left = await asyncio.wait(tuple(self.cleanups), timeout=seconds)
                if left:
                    break  # they fail with the connections, and say so
        self.deadlines.close()
        self.populator.close()
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
        except (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError) as exc:
            # These would end the event loop, and with it every other request, or be taken for the
            # end of the call.
            raise RuntimeError(f"the progress hook raised {exc!r}") from exc

"""A store opened on one event loop: service, policies and limits of every transfer.

`Session.call` is over 60 lines: half of it are its parameters and docstring, and the first attempt
is part of it because one more coroutine would cost every request.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aioflux._concurrency.run_to_completion import run_to_completion, start_task
from aioflux._services.base import Body
from aioflux._transfer.counters import Counters
from aioflux._transfer.deadlines import Deadlines
from aioflux._transfer.prefault import Prefaulter
from aioflux._transfer.retry import RetryBudget, with_retry
from aioflux._values.stats import Progress
from aioflux.errors import TransientError
from aioflux.options import CleanupTimeouts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from aioflux._services.base import Service
    from aioflux._transfer.limits import Limits
    from aioflux._values.meta import ObjectMeta
    from aioflux._values.stats import ProgressHook
    from aioflux.options import RetryPolicy, TransferOptions

__all__ = ["THROTTLED", "Session"]

T = TypeVar("T")

THROTTLED = frozenset({429, 503})
"""Statuses of a service that throttles."""


class OpenTransfer(Protocol):
    """A transfer that leaves objects behind unless it is ended: a writer, a composed read."""

    async def end(self) -> None:
        """Clean up because the store is closed, and remove itself from `Session.open_transfers`."""


@dataclass(frozen=True, slots=True)
class Session:
    """Service, policies and limits; made once for each store and loop."""

    service: Service
    options: TransferOptions
    retry: RetryPolicy
    limits: Limits
    counters: Counters = field(default_factory=Counters)
    progress: ProgressHook | None = None
    cleanup_timeouts: CleanupTimeouts = field(default_factory=CleanupTimeouts)
    clock: Callable[[], float] = time.monotonic
    open_transfers: set[OpenTransfer] = field(default_factory=set)
    cleanup_tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    pid: int = field(default_factory=os.getpid)
    budget: RetryBudget = field(init=False)
    deadlines: Deadlines = field(init=False)
    prefaulter: Prefaulter = field(default_factory=Prefaulter)

    def __post_init__(self) -> None:
        retry = self.retry
        budget = RetryBudget(burst=retry.budget_retries, per_second=retry.budget_per_second)
        object.__setattr__(self, "budget", budget)
        deadlines = Deadlines(retry.deadline_seconds, clock=self.clock)
        object.__setattr__(self, "deadlines", deadlines)

    @property
    def is_inherited(self) -> bool:
        """Return whether this is a forked child: tasks and connections are the parent's then."""
        return os.getpid() != self.pid

    def require_own_process(self, key: str) -> None:
        """Raise RuntimeError in a forked child, in which the transfer of `key` cannot go on."""
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
        started_at: float = 0.0,
    ) -> T:
        """Run one request, within the limits, until it succeeds or the policy ends.

        Bytes are held from the first attempt to the end of the last, because the memory is; a
        request slot only while an attempt is under way, so that others use it during a backoff.

        Args:
            key: Name of the object; errors name it.
            attempt: Sends the request once, given the number of the attempt, from 1.
            num_bytes: Bytes of the bodies that it moves.
            after: Failure of the first attempt, if it was made before.
            started_at: Start of that attempt, on the monotonic clock.
        """
        if os.getpid() != self.pid:
            self.require_own_process(key)
        # Bytes first: a request that waits for memory must not hold a slot that others could use.
        held, requests = self.limits.bytes, self.limits.requests
        if not held.try_acquire(num_bytes):
            await held.acquire(num_bytes)
        try:
            if after is None:
                # The deadline begins after the wait for the first slot.
                if not requests.try_acquire():
                    await requests.acquire()
                num_cuts = requests.num_cuts
                started_at = self.count_start()
                # Not by `_retry`: of a hundred attempts ninety-nine are the first.
                task = asyncio.current_task()
                assert task is not None
                is_outermost = self.deadlines.add(task, started_at)
                try:
                    result = await attempt(1)
                except TransientError as exc:
                    self.count_failure(key, exc, num_cuts)
                    after = exc
                except BaseException as exc:
                    self.count_failure(key, exc, num_cuts)
                    is_cancelled = is_outermost and isinstance(exc, asyncio.CancelledError)
                    if is_cancelled and self.deadlines.pop_expired(task):
                        raise self.deadline_error(key, started_at) from exc
                    raise
                else:
                    self.count_success(key, result, num_bytes, started_at)
                    return result
                finally:
                    if is_outermost:
                        self.deadlines.remove(task)
            return await with_retry(
                lambda number: self._retry(key, attempt, number, num_bytes),
                self.retry,
                after=after,
                started_at=started_at,
                uri_of=lambda: self.service.uri(key),
                budget=self.budget,
                clock=self.clock,
            )
        finally:
            held.release(num_bytes)

    async def _retry(
        self, key: str, attempt: Callable[[int], Awaitable[T]], number: int, num_bytes: int
    ) -> T:
        """Make another attempt, in a request slot of its own."""
        # What was begun is finished first: behind all others its deadline could pass.
        await self.limits.requests.acquire(in_front=True)
        num_cuts = self.limits.requests.num_cuts
        started_at = self.count_start()
        self.counters.num_retries += 1
        try:
            result = await attempt(number)
        except BaseException as exc:
            self.count_failure(key, exc, num_cuts)
            raise
        self.count_success(key, result, num_bytes, started_at, was_retry=True)
        return result

    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        """Read the metadata of an object."""
        return await self.call(key, lambda _: self.service.head(key, generation=generation))

    # Called for requests without a task, too.

    def count_start(self) -> float:
        """Count an attempt that starts, and return the monotonic clock's time."""
        counters = self.counters
        counters.num_requests += 1
        counters.num_in_flight += 1
        return self.clock()

    def count_failure(self, key: str, error: BaseException, num_cuts: int) -> None:
        """Count an attempt that failed, and release its slot.

        Args:
            key: Name of the object.
            error: The failure.
            num_cuts: `AdaptiveLimit.num_cuts` when it was sent.
        """
        counters, requests = self.counters, self.limits.requests
        counters.num_in_flight -= 1
        counters.num_failures += 1
        if isinstance(error, TransientError) and error.status in THROTTLED:
            counters.num_throttled += 1
            requests.on_throttled(num_cuts)
        requests.release()
        if isinstance(error, TransientError):
            self.count_bytes(key, num_received=error.num_bytes_received)

    def count_success(
        self,
        key: str,
        result: object,
        num_bytes: int,
        started_at: float,
        *,
        was_retry: bool = False,
    ) -> None:
        """Count an attempt that succeeded, and release its slot."""
        counters, requests = self.counters, self.limits.requests
        counters.num_in_flight -= 1
        counters.add_latency(self.clock() - started_at)
        requests.release()
        requests.on_success()
        self.budget.on_success(was_retry=was_retry)
        if isinstance(result, Body):
            num_received = len(result.data)
            counters.bytes_received += num_received
            if self.progress is not None and num_received:
                self._call_hook(Progress(self.service.uri(key), "received", num_received))
        elif num_bytes:
            self.count_bytes(key, num_sent=num_bytes)

    def deadline_error(self, key: str, started_at: float) -> TransientError:
        """Return the error of a first attempt that the deadline has ended."""
        uri, seconds = self.service.uri(key), self.clock() - started_at
        return TransientError(
            f"no response for {uri} came before the deadline (gave up after 1 attempt in "
            f"{seconds:.1f} s; RetryPolicy sets both)",
            uri=uri,
        )

    def start_cleanup(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task for which closing the store waits."""
        return start_task(coroutine, self.cleanup_tasks)

    async def clean_up(
        self,
        work: Callable[[], Awaitable[object]],
        *,
        wait_seconds: float | None = None,
        is_interrupted: bool = False,
    ) -> None:
        """Run `work` to completion, whatever cancels the caller; see `run_to_completion`.

        Args:
            work: The clean-up; it must be idempotent.
            wait_seconds: Time to wait for it; all by default.
            is_interrupted: The event loop may be ending, so that there is less time.

        Raises:
            TimeoutError: One of these times ran out.
        """
        times = self.cleanup_timeouts
        await run_to_completion(
            work,
            self.cleanup_tasks,
            seconds=times.interrupted_seconds if is_interrupted else times.total_seconds,
            interrupted_seconds=times.interrupted_seconds,
            wait_seconds=wait_seconds,
        )

    async def aclose(self, *, is_interrupted: bool = False) -> None:
        """End the writers and composed reads that are still open, and close the service.

        Their next use fails. What they have stored so far would be billed.

        Args:
            is_interrupted: The caller was cancelled or interrupted, and waits less for clean-up.
        """
        times = self.cleanup_timeouts
        seconds = times.interrupted_seconds if is_interrupted else times.close_seconds
        while self.open_transfers or self.cleanup_tasks:
            for each in tuple(self.open_transfers):
                await each.end()
            if self.cleanup_tasks:
                _, pending = await asyncio.wait(tuple(self.cleanup_tasks), timeout=seconds)
                if pending:
                    break  # they fail with the connections, and log it
        self.deadlines.close()
        self.prefaulter.close()
        await self.service.aclose()

    def count_bytes(self, key: str, *, num_received: int = 0, num_sent: int = 0) -> None:
        """Count bytes of bodies, and call the progress hook."""
        self.counters.bytes_received += num_received
        self.counters.bytes_sent += num_sent
        if self.progress is not None:
            if num_received:
                self._call_hook(Progress(self.service.uri(key), "received", num_received))
            if num_sent:
                self._call_hook(Progress(self.service.uri(key), "sent", num_sent))

    def _call_hook(self, progress: Progress) -> None:
        assert self.progress is not None
        try:
            self.progress(progress)
        except (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError) as exc:
            # These would end the event loop, and with it every other request, or be taken for the
            # end of the call.
            raise RuntimeError(f"the progress hook raised {exc!r}") from exc

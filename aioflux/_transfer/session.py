"""The sessions of a store, one for each event loop: service, policies, admission and memory.

    Session.call, on the loop of the caller: slots, bytes in flight, retries, deadlines, counters
        -> attempt -> for large bodies Spread.run: the service of the caller's loop, or of the loop
           of another thread
                -> connection, TLS, checksums: without the GIL for most of their time

Only the attempt runs on another loop, so that all loops have one set of limits and counters.

Over 500 lines because a session is opened, used and closed here.

`Session.call` is over 60 lines: half of them are its parameters and docstring. The first attempt is
not a function of its own, because another coroutine would slow down every request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from aioflux._concurrency.byte_budget import ByteBudget
from aioflux._concurrency.loop_threads import loop_threads, run_on
from aioflux._concurrency.run_to_completion import run_to_completion, start_task
from aioflux._http.memory import BytesPool
from aioflux._services.base import ATTEMPT, Body
from aioflux._transfer.admission import (
    Admission,
    Counters,
    RequestRate,
    StoreCounters,
    cause_of,
    plan_start,
)
from aioflux._transfer.event_log import EventLog
from aioflux._transfer.prefault import LEAST_THREADED_BYTES, Prefaulter
from aioflux._transfer.read_plan import SizeEstimate
from aioflux._transfer.retry import with_retry
from aioflux._transfer.twice import ReadingTwice
from aioflux._values.stats import Progress
from aioflux._values.uri import meant_key
from aioflux.errors import NotFoundError, TransientError
from aioflux.options import MIB, CleanupTimeouts, longest_cleanup

if TYPE_CHECKING:
    from aioflux._services.base import Service
    from aioflux._values.meta import ObjectMeta
    from aioflux._values.stats import ProgressHook, StoreStats
    from aioflux.options import RetryPolicy, TransferOptions

T = TypeVar("T")

_log = logging.getLogger("aioflux")
_request_log = logging.getLogger("aioflux.requests")
_retry_log = logging.getLogger("aioflux.retry")

_SMALL_BYTES: Final = 1 * MIB


class OpenTransfer(Protocol):
    """A transfer that needs clean-up when the store is closed: a writer, a composed read."""

    async def on_store_close(self) -> None:
        """Clean up, and remove the transfer from `Session.open_transfers`."""


class Spread:
    """The services of one store: on the caller's loop, and on the loops of other threads.

    Args:
        service: The service on the caller's loop.
        others: The services on other loops, opened at the same time, so that they have the same
            settings.
    """

    def __init__(self, service: Service, others: Sequence[Service]) -> None:
        self.service = service
        self._services = (service, *others)
        self._used: set[int] = set()
        """Numbers of the other services that were used."""
        self._busy_bytes = [0] * len(self._services)
        """Bytes of the bodies in flight on each loop; the first is the caller's."""
        self._pid = os.getpid()

    async def run(self, num_bytes: int, request: Callable[[Service], Coroutine[Any, Any, T]]) -> T:
        """Run a request with a body of this size on the loop with the fewest bytes in flight."""
        busy = self._busy_bytes
        number = busy.index(min(busy)) if num_bytes >= LEAST_THREADED_BYTES else 0
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


class Session:
    """Service, policies, admission and memory of one store on one event loop.

    Attributes:
        small_bytes: Largest object that is read by one request, in bytes. If the body of a small
            object breaks off, all of it is requested again; reads of larger objects keep the
            received bytes.
        unknown_size: Estimate of the sizes of objects, for first ranges.
        open_transfers: Transfers that need clean-up when the store is closed.
        file_memory: Budget of the buffers of uploads and downloads of local files.
        cleanup_tasks: Tasks that `aclose` waits for.
    """

    def __init__(
        self,
        spread: Spread,
        options: TransferOptions,
        retry: RetryPolicy,
        admission: Admission,
        *,
        progress: ProgressHook | None = None,
        cleanup_timeouts: CleanupTimeouts,
        slow_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = spread.service
        self.spread = spread
        self.options = options
        self.retry = retry
        self.admission = admission
        self.counters = admission.counters
        self.progress = progress
        self.cleanup_timeouts = cleanup_timeouts
        self.clock = clock
        self.pid = os.getpid()
        self.small_bytes = min(_SMALL_BYTES, options.range_size_bytes)
        self.unknown_size = SizeEstimate(options)
        self.open_transfers: set[OpenTransfer] = set()
        self.cleanup_tasks: set[asyncio.Task[Any]] = set()
        self.prefaulter = Prefaulter()
        self.memory = BytesPool(options.max_in_flight_bytes)
        self.file_memory = ByteBudget(options.max_in_flight_bytes)
        self._retries = EventLog("were retried")
        self._slow_seconds = inf if slow_seconds is None else slow_seconds
        self._slow_requests = EventLog(f"took over {self._slow_seconds:g} s")
        self._log_due_at = inf

    @property
    def is_inherited(self) -> bool:
        """Return whether the session was inherited by a fork: its parent process owns the tasks."""
        return os.getpid() != self.pid

    def require_own_process(self, key: str) -> None:
        """Raise RuntimeError in a forked child, which cannot continue the transfer of `key`."""
        if self.is_inherited:
            raise RuntimeError(
                f"{self.service.uri(key)} was opened before a fork; open it again in this process"
            )

    async def call(
        self,
        key: str,
        attempt: Callable[..., Awaitable[T]],
        *arguments: Any,
        num_bytes: int = 0,
        after: TransientError | None = None,
        started_at: float = 0.0,
    ) -> T:
        """Attempt one request, within the limits, until an attempt succeeds or no other may follow.

        Another attempt follows only a TransientError, and only if the retry policy allows it. The
        bytes are acquired once, because the memory is in use during the backoff, too. A request
        slot is acquired for each attempt, and other requests can use it during the backoff.

        Args:
            key: Name of the object, for errors.
            attempt: Sends the request once.
            arguments: Arguments of `attempt`.
            num_bytes: Size of the body that is sent or received.
            after: Failure of the first attempt, if the caller has made that attempt.
            started_at: Start of the first attempt, on the monotonic clock; used with `after`.
        """
        if os.getpid() != self.pid:
            self.require_own_process(key)
        admission = self.admission
        byte_budget, slots, deadlines = admission.bytes, admission.slots, admission.deadlines
        if num_bytes and not byte_budget.try_acquire(num_bytes):
            await byte_budget.acquire(num_bytes)
        try:
            if after is None:
                # The deadline begins after the wait for the first slot.
                if not slots.try_acquire():
                    await slots.acquire()
                num_cuts = slots.num_cuts
                started_at = admission.start()
                # Not by `_retry`, to save a coroutine: almost all attempts are first attempts.
                task = asyncio.current_task()
                assert task is not None
                is_outermost = deadlines.add(task, started_at)
                try:
                    result = await attempt(*arguments)
                except TransientError as exc:
                    self.count_failure(key, exc, num_cuts)
                    after = exc
                except BaseException as exc:
                    self.count_failure(key, exc, num_cuts)
                    is_cancelled = is_outermost and isinstance(exc, asyncio.CancelledError)
                    if is_cancelled and deadlines.pop_expired(task):
                        raise self.deadline_error(key, started_at) from exc
                    raise
                else:
                    self.count_success(key, result, num_bytes, started_at)
                    return result
                finally:
                    if is_outermost:
                        deadlines.remove(task)
            return await with_retry(
                lambda number: self._retry(number, key, attempt, arguments, num_bytes),
                self.retry,
                after=after,
                started_at=started_at,
                uri_of=lambda: self.service.uri(key),
                budget=admission.budget,
                count=self.count_retry,
                clock=self.clock,
            )
        finally:
            if num_bytes:
                byte_budget.release(num_bytes)

    async def _retry(
        self,
        number: int,
        key: str,
        attempt: Callable[..., Awaitable[T]],
        arguments: tuple[Any, ...],
        num_bytes: int,
    ) -> T:
        """Make another attempt, with a new request slot."""
        # In front, because at the end of the queue the deadline of the request could pass.
        admission = self.admission
        await admission.slots.acquire(in_front=True)
        num_cuts = admission.slots.num_cuts
        started_at = admission.start()
        admission.counters.num_retries += 1
        ATTEMPT.set(number)
        try:
            result = await attempt(*arguments)
        except BaseException as exc:
            self.count_failure(key, exc, num_cuts)
            raise
        finally:
            ATTEMPT.set(1)
        self.count_success(key, result, num_bytes, started_at, was_retry=True)
        return result

    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        """Read the metadata of an object."""
        return await self.call(key, self.service.head, key, generation)

    async def timed(self, key: str, call: Awaitable[T], started_at: float = 0.0) -> T:
        """Await a call, and count its duration since `started_at`, or since now."""
        started_at = started_at or self.clock()
        result = await call
        self.counters.add_call(key, self.clock() - started_at)
        return result

    def count_mismatch(self, key: str, reason: str) -> None:
        """Count a read whose bytes were wrong, and log a warning."""
        self.counters.num_checksum_mismatches += 1
        _log.warning("wrong bytes of %s were received: %s", self.service.uri(key), reason)

    def count_retry(self, error: TransientError) -> bool:
        """Count a retry; return whether it is logged at once, and not as a part of a summary.

        Each event loop of a store has its own counts, which need no lock, and are logged at the
        latest when its connections are closed.
        """
        return self._add_event(self._retries, cause_of(error), str(error), self.clock())

    def _log_slow(self, key: str, kind: str, seconds: float, now: float) -> None:
        """Log a slow request, or count it for the next summary."""
        phase = self.service.slow_phases.pop(uri := self.service.uri(key), "")
        text = f"{kind} of {uri} took {seconds:.1f} s"
        if self._add_event(self._slow_requests, f"{phase} ({kind})".strip(), text, now):
            _request_log.info("%s%s", text, phase and f", mostly {phase}")

    def _add_event(self, events: EventLog, cause: str, text: str, now: float) -> bool:
        is_first = events.add(cause, text, now, num_requests=self.counters.num_ended)
        self._log_summaries(now)
        return is_first

    def _log_summaries(self, now: float) -> None:
        for events, log in ((self._retries, _retry_log), (self._slow_requests, _request_log)):
            if text := events.pop(now, num_requests=self.counters.num_ended):
                log.info("%s: %s", self.service.uri(), text)
        self._log_due_at = min(self._retries.due_at, self._slow_requests.due_at)

    def count_unverified(
        self, num_bytes: int, *, is_whole: bool, expected: int | None = None
    ) -> None:
        """Count bytes that were read, unless a checksum, TLS or a second copy protects them.

        TLS and a second copy protect ranges only: a whole object may be stored with wrong bytes.
        """
        is_guarded = not is_whole and self.service.capabilities.guarded_transport
        if not self.options.verify or (expected is None and not is_guarded):
            self.counters.bytes_unverified += num_bytes

    # `Session.call` and `SmallReadLoop` call these methods at the end of attempts.

    def count_failure(self, key: str, error: BaseException, num_cuts: int) -> None:
        """Count an attempt that failed, and name a key that was meant; see `Admission.fail`."""
        self.admission.fail(error, num_cuts)
        if isinstance(error, NotFoundError):
            error.message += meant_key(key, self.service.uri())
        if isinstance(error, TransientError):
            if error.is_damaged:
                self.count_mismatch(key, error.message)
            self.counters.bytes_received += error.num_bytes_received
            if self.progress is not None:
                self._report(key, "received", error.num_bytes_received)

    def count_success(
        self,
        key: str,
        result: object,
        num_bytes: int,
        started_at: float,
        *,
        was_retry: bool = False,
        is_call: bool = False,
    ) -> None:
        """Count an attempt that succeeded, and call the progress hook; see `Admission.succeed`."""
        call_key = key if is_call else None
        now = self.admission.succeed(started_at, was_retry=was_retry, call_key=call_key)
        if now - started_at >= self._slow_seconds:
            kind = "download" if isinstance(result, Body) else "upload" if num_bytes else "request"
            self._log_slow(key, kind, now - started_at, now)
        elif now >= self._log_due_at:
            self._log_summaries(now)
        if isinstance(result, Body):
            num_received = len(result.data)
            self.counters.bytes_received += num_received
            if self.progress is not None:
                self._report(key, "received", num_received)
        else:
            self.counters.bytes_sent += num_bytes
            if self.progress is not None:
                self._report(key, "sent", num_bytes)

    def deadline_error(self, key: str, started_at: float) -> TransientError:
        """Return the error of a first attempt whose deadline has passed."""
        uri, seconds = self.service.uri(key), self.clock() - started_at
        return TransientError(
            f"no response for {uri} came before the deadline (gave up after 1 attempt in "
            f"{seconds:.1f} s; RetryPolicy.deadline_seconds sets the limit)",
            uri=uri,
        )

    def start_cleanup(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `aclose` waits for."""
        return start_task(coroutine, self.cleanup_tasks)

    async def clean_up(
        self,
        work: Callable[[], Awaitable[object]],
        *,
        wait_seconds: float | None = None,
        is_interrupted: bool = False,
    ) -> None:
        """Run `work` to completion, even if the caller is cancelled; see `run_to_completion`.

        Args:
            work: The clean-up; it must be idempotent.
            wait_seconds: Longest time to wait for `work`, which then continues in the background;
                by default until it is done.
            is_interrupted: Whether the event loop may be about to end; `work` then has less time.

        Raises:
            TimeoutError: The time for `work`, or for the wait, has passed.
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
        """Abort open writers and composed reads, and close the service.

        Aborting a transfer deletes the bytes that it has stored, which would be billed otherwise.
        Later calls of the methods of an aborted writer raise.

        Args:
            is_interrupted: Whether the caller was cancelled or interrupted; the clean-up then has
                less time.
        """
        times = self.cleanup_timeouts
        seconds = times.interrupted_seconds if is_interrupted else times.close_seconds
        while self.open_transfers or self.cleanup_tasks:
            for transfer in tuple(self.open_transfers):
                await transfer.on_store_close()
            if self.cleanup_tasks:
                _, pending = await asyncio.wait(tuple(self.cleanup_tasks), timeout=seconds)
                if pending:
                    break  # the pending tasks fail without connections, and log the failure
        self._log_summaries(inf)
        self.admission.deadlines.close()
        self.prefaulter.close()
        self.memory.clear()
        await self.spread.aclose()

    def _report(self, key: str, direction: Literal["received", "sent"], num_bytes: int) -> None:
        """Call the progress hook, if there are bytes to report."""
        assert self.progress is not None
        if not num_bytes:
            return
        call_hook(self.progress, Progress(self.service.uri(key), direction, num_bytes))


def call_hook(hook: Callable[[T], object], argument: T) -> None:
    """Call a progress hook; no exception of it ends the event loop or looks like a cancellation."""
    try:
        hook(argument)
    except (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError) as exc:
        # SystemExit and KeyboardInterrupt would stop the event loop and all requests. The other
        # two would look as if the caller had closed or cancelled the call.
        raise RuntimeError(f"the progress hook raised {exc!r}") from exc


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
        clock: Monotonic clock of sessions that are opened from now on.
        uri: Uri of the store.
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
        slow_seconds: float | None,
        uri: str,
    ) -> None:
        self._open_service = open_service
        self._transfer = transfer
        self._retry = retry
        self._progress = progress
        self._num_loops = num_loops
        self.cleanup_timeouts = cleanup_timeouts
        self._slow_seconds = slow_seconds
        self.uri = uri
        self.clock = time.monotonic
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
            raise ValueError(f"<Store {self.uri}> is closed; open a new store")
        loop = asyncio.get_running_loop()
        session = self._by_loop.get(loop)
        return session if session is not None else self._open(loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> Session:
        for other_loop, other in self.open_sessions():
            if other_loop.is_closed():
                other.memory.clear()  # the timer of the memory ended with its loop
        transfer = self._transfer
        reads_twice = transfer.verify and transfer.verify_ranges
        counters = Counters()
        admission = Admission(
            max_in_flight=transfer.max_in_flight,
            # A read holds the memory of two copies.
            max_in_flight_bytes=-(-transfer.max_in_flight_bytes // (1 + reads_twice)),
            retry=self._retry,
            counters=counters,
            clock=self.clock,
        )
        self._counters.add_loop(loop, counters, admission.slots)
        text, num_workers = os.environ.get("WORLD_SIZE", ""), _num_workers()
        world_size = (int(text) if text.isdecimal() else 1) * num_workers
        first, delay = plan_start(transfer.max_in_flight, world_size, _jitter())
        if delay:
            admission.slots.start_slowly(first, delay)
        if (per_second := transfer.max_requests_per_second) is not None:
            admission.slots.rate = RequestRate(per_second / num_workers, fraction=_jitter())
        services = [self._open_service() for _ in range(self._num_loops)]
        if reads_twice:

            def on_mismatch(key: str, reason: str) -> None:
                """Count wrong bytes; the thread of another event loop may call this."""
                if asyncio.get_running_loop() is loop:
                    session.count_mismatch(key, reason)
                else:
                    loop.call_soon_threadsafe(session.count_mismatch, key, reason)

            services = [ReadingTwice(each, admission, loop, on_mismatch) for each in services]
        session = Session(
            Spread(services[0], services[1:]),
            transfer,
            self._retry,
            admission,
            progress=self._progress,
            cleanup_timeouts=self.cleanup_timeouts,
            slow_seconds=self._slow_seconds,
            clock=self.clock,
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
        return self._counters.stats(self.uri, self._transfer.max_in_flight)

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

"""Reads of small objects one after another, by callbacks instead of coroutines.

response --> check --> result --> next item --> request on the idle connection

A read by coroutines takes 61 microseconds of CPU per object, a read here 39 to 42, on a transport
that responds at once: a successful read has no task and runs no `await`, even if it is queued for a
request slot. The loop hands an item over to a coroutine, which reads it as `get` does, in these
cases: a failed attempt, a large object, a wrong checksum, no free bytes in a budget, or no idle
connection.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from aioflux._services.base import ReadRequest
from aioflux._transfer.read import (
    NO_ATTEMPT,
    Fetched,
    PriorAttempt,
    check_small,
)
from aioflux._values.meta import ObjectMeta
from aioflux.errors import StorageError, TransientError

if TYPE_CHECKING:
    from aioflux._concurrency.byte_budget import PrefetchBudget, Reservation
    from aioflux._concurrency.fan_out import FanOut
    from aioflux._http import Response
    from aioflux._services.base import Exchange
    from aioflux._transfer.session import Session

_UNAUTHORIZED: Final = 401
Result: TypeAlias = "tuple[str, Fetched] | StorageError"
"""The key and the object; or an error that the caller receives as a result."""


class Handover(NamedTuple):
    """An item that a `SmallReadLoop` hands over to a coroutine."""

    item: Any
    """Key or metadata of the object."""
    reservation: Reservation
    """Bytes that are reserved for the object."""
    prior: PriorAttempt
    """Attempt of the loop to read the object."""


class _SlotCallback:
    """A `SlotWaiter` that calls `SmallReadLoop.on_slot` when it has a slot."""

    __slots__ = ("_loop",)

    def __init__(self, loop: SmallReadLoop) -> None:
        self._loop = loop

    def cancelled(self) -> bool:
        return False

    def set_result(self, result: None, /) -> None:
        self._loop.on_slot()


class SmallReadLoop:
    """A reader of the items of one fan-out, one at a time; each worker has its own loop.

    The connection calls `set_result` with the response, or `set_exception` with the error. The
    worker uses the loop as a `Runner`, the deadlines use it as a `RequestSequence`.

    Attributes:
        started_at: Start of the current request, on the monotonic clock.
    """

    __slots__ = (
        "_budget",
        "_end",
        "_exchange",
        "_fan_out",
        "_handover",
        "_index",
        "_item",
        "_meta",
        "_num_cuts",
        "_request",
        "_session",
        "_slot_waiter",
        "_small_bytes",
        "started_at",
    )

    def __init__(
        self, session: Session, budget: PrefetchBudget, fan_out: FanOut[Any, Result]
    ) -> None:
        self._session = session
        self._budget = budget
        self._fan_out = fan_out
        self._small_bytes = session.small_bytes
        self._exchange: Exchange | None = None
        self._slot_waiter: _SlotCallback | None = None
        self.started_at = 0.0
        self._handover: asyncio.Future[tuple[int, Handover] | None] | None = None

    # Called by the worker.

    def start(
        self, index: int, item: object
    ) -> asyncio.Future[tuple[int, Handover] | None] | tuple[int, Handover]:
        """Start to read an item; after it the loop reads the next items of the fan-out.

        Returns:
            The index and handover of the item, if it cannot be read by callbacks. Otherwise a
            future. Its result is the index and handover of a later item, or None if no next item
            may start now. If the iterator of the items raises, the future has its exception.
        """
        session = self._session
        handover = (
            Handover(item, self._budget.reserve(index), NO_ATTEMPT)
            if os.getpid() != session.pid  # a forked child: the connections are its parent's
            else self._start_item(index, item)
        )
        if handover is not None:
            return index, handover
        session.admission.deadlines.add_sequence(self)
        self._handover = asyncio.get_running_loop().create_future()
        return self._handover

    def stop(self, error: BaseException) -> None:
        """Abort the current item, whose outcome is `error`."""
        self._session.admission.deadlines.remove_sequence(self)
        future, index = self._handover, self._index
        if self._exchange is not None:
            self._abort_request(asyncio.CancelledError())
        elif self._slot_waiter is not None:
            self._session.admission.remove_waiter(self._slot_waiter, self._end)
            self._slot_waiter = None
            self._budget.change(-self._end)
        else:
            # The worker was woken, maybe with a handover, and was cancelled before it ran.
            assert future is not None
            is_woken = not future.cancelled() and future.exception() is None
            handover = future.result() if is_woken else None
            if handover is None:
                return
            index = handover[0]
        # Without an outcome the consumer would wait for the item for ever.
        self._fan_out.finish(index, None, error)

    # Called by the connection and by the deadlines.

    def done(self) -> bool:
        """Return whether the request has completed."""
        return self._exchange is None

    def set_result(self, result: Response) -> None:
        """Check the response, and continue with the next item."""
        session, exchange, self._exchange = self._session, self._exchange, None
        assert exchange is not None
        try:
            body = session.service.end_get(self._request, exchange, result)
        except Exception as exc:  # the connection calls this: there is no caller to raise it to
            self._on_failure(exc)
            return
        try:
            session.admission.bytes.release(self._end)
            key, started_at = self._request.key, self.started_at
            read = None if body is None else check_small(session, key, body, self._end, self._meta)
            session.count_success(key, body, 0, started_at, is_call=isinstance(read, Fetched))
        except Exception as exc:  # raised by the progress hook
            self._budget.change(-self._end)
            self._finish_item(None, exc)
            return
        if isinstance(read, Fetched):
            self._budget.change(len(read.data) - self._end)
            self._finish_item((self._request.key, read), None)
        else:
            self._fall_back(PriorAttempt(read, None, started_at, num_reads=int(read is None)))

    def set_exception(self, exception: Exception) -> None:
        """Fail or hand over the item, after its request failed with `exception`."""
        error = self._session.service.fail_get(self._request, self._pop_exchange(), exception)
        if error is None:
            self._session.admission.cancel(self._end, was_started=True)
            self._fall_back(NO_ATTEMPT)
        else:
            self._on_failure(error)

    def expire(self) -> None:
        """Fail the current item, because its deadline has passed."""
        if self._exchange is not None:
            error = self._session.deadline_error(self._request.key, self.started_at)
            self._abort_request(error)
            self._finish_item(None, error)
        elif self._slot_waiter is not None:  # the wait for a slot has no deadline
            self.started_at = self._session.clock()

    # Called by `_SlotCallback`.

    def on_slot(self) -> None:
        """Send the request of the item, for which a slot was acquired."""
        self._slot_waiter = None
        future = self._handover
        assert future is not None
        if future.done() or not self._send():
            self._session.admission.cancel(self._end)
            self._fall_back(NO_ATTEMPT)

    # One item.

    def _start_item(self, index: int, item: object) -> Handover | None:
        """Start to read an item; return a handover if it cannot be started at once."""
        session, budget = self._session, self._budget
        if isinstance(item, str):
            estimate = session.unknown_size
            key, meta, generation = item, None, ""
            if not key or not estimate.is_known or estimate.num_bytes > self._small_bytes:
                return Handover(item, budget.reserve(index), NO_ATTEMPT)
            end = estimate.first_range_bytes
        elif isinstance(item, ObjectMeta) and 0 < item.size <= self._small_bytes:
            key, meta, generation, end = item.key, item, item.generation, item.size
        else:
            return Handover(item, budget.reserve(index), NO_ATTEMPT)
        if not budget.try_acquire(index, end):
            return Handover(item, budget.reserve(index), NO_ATTEMPT)
        self._index, self._item, self._meta = index, item, meta
        self._request, self._end = ReadRequest(key, generation, 0, end), end
        if session.admission.try_enter(end):
            if self._send():
                return None
            session.admission.cancel(end)
        else:
            waiter = _SlotCallback(self)
            if session.admission.add_waiter(waiter, end):
                self._slot_waiter = waiter
                self.started_at = session.clock()
                return None
        return Handover(item, budget.reserve(index, end), NO_ATTEMPT)

    def _send(self) -> bool:
        """Send the request of the item if a connection is idle; return whether it was sent."""
        session = self._session
        try:
            exchange = session.service.begin_get(self._request, self)
        except Exception:
            # The key is, for example, not valid. The coroutine path raises the same error.
            return False
        if exchange is None:
            return False
        self._exchange, self._num_cuts = exchange, session.admission.slots.num_cuts
        self.started_at = session.admission.start()
        return True

    def _pop_exchange(self) -> Exchange:
        """Return the current exchange, and forget it."""
        exchange = self._exchange
        assert exchange is not None
        self._exchange = None
        return exchange

    def _abort_request(self, error: BaseException) -> None:
        """Abort the current request, and count it as failed with `error`."""
        self._session.service.abort_get(self._pop_exchange())
        self._session.admission.bytes.release(self._end)
        self._session.count_failure(self._request.key, error, self._num_cuts)
        self._budget.change(-self._end)

    def _on_failure(self, error: Exception) -> None:
        """Hand the item over if its request may be retried; otherwise fail the item."""
        self._session.admission.bytes.release(self._end)
        try:
            self._session.count_failure(self._request.key, error, self._num_cuts)
        except Exception as exc:  # raised by the progress hook
            error = exc
        if isinstance(error, TransientError):
            self._fall_back(PriorAttempt(failure=error, started_at=self.started_at))
        elif isinstance(error, StorageError) and error.status == _UNAUTHORIZED:
            self._fall_back(NO_ATTEMPT)
        else:
            self._budget.change(-self._end)
            self._finish_item(None, error)

    # The end of an item.

    def _finish_item(self, result: Result | None, error: Exception | None) -> None:
        """Store the outcome of the item, and start the next item."""
        fan_out = self._fan_out
        fan_out.finish(self._index, result, error)
        future = self._handover
        assert future is not None
        if future.done():  # the worker was cancelled in this iteration of the event loop
            return
        try:
            indexed = fan_out.next_ready_item()
            handover = None if indexed is None else self._start_item(*indexed)
        except BaseException as exc:  # from the iterator of the items; the worker raises it
            self._session.admission.deadlines.remove_sequence(self)
            # Set both now: the consumer may run before the worker.
            fan_out.exhausted = True
            fan_out.crash = exc
            future.set_exception(exc)
            return
        if indexed is None:
            self._wake_worker(None)
        elif handover is not None:
            self._wake_worker((indexed[0], handover))

    def _wake_worker(self, handover: tuple[int, Handover] | None) -> None:
        self._session.admission.deadlines.remove_sequence(self)
        assert self._handover is not None
        self._handover.set_result(handover)

    def _fall_back(self, prior: PriorAttempt) -> None:
        """Hand the item over to the worker, which reads it in a coroutine."""
        future = self._handover
        assert future is not None
        if future.done():  # the worker was cancelled in this iteration of the event loop
            self._budget.change(-self._end)
            self._fan_out.finish(self._index, None, asyncio.CancelledError())
        else:
            reservation = self._budget.reserve(self._index, self._end)
            self._wake_worker((self._index, Handover(self._item, reservation, prior)))

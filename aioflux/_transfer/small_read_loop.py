"""Small objects one after another, each asked for where the answer to the one before is received.

connection --answer--> judge --> result --> next item --> request on the connection that is free now

A coroutine for each object, with those that it awaits, costs as much again as half of the rest: on
a transport that answers at once 61 microseconds of CPU per object, against 39 to 42 here. So
nothing is awaited as long as all goes well, and there is no task, not even where the limit of
requests makes one wait. What needs a second look (a failed attempt, a large object, bytes that do
not match, no memory at once) is handed to a coroutine that does what `get` does.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from aioflux._services.base import ReadRequest
from aioflux._transfer.get_small import (
    NOTHING,
    Begun,
    Fetched,
    first_range_bytes,
    judge_small,
    small_bytes,
)
from aioflux._values.meta import ObjectMeta
from aioflux.errors import StorageError, TransientError

if TYPE_CHECKING:
    from aioflux._concurrency.fan_out import Shared
    from aioflux._http import Response
    from aioflux._services.base import Exchange
    from aioflux._transfer.prefetch_budget import Ahead, Share
    from aioflux._transfer.session import Session

__all__ = ["Express", "Left"]

_UNAUTHORIZED: Final = 401
_UNSURE: Final = Begun(num_reads=1)

Result: TypeAlias = "tuple[str, Fetched] | StorageError"
"""The key with the object; or an error that is a result, which the fan-out makes of a failure."""


class Left(NamedTuple):
    """An item that was begun, and is left to a coroutine."""

    item: Any
    share: Share
    begun: Begun


class _Place:
    """Waits in line for a place among the requests in flight."""

    __slots__ = ("_express",)

    def __init__(self, express: Express) -> None:
        self._express = express

    def cancelled(self) -> bool:
        return False

    def set_result(self, result: None, /) -> None:
        self._express.enter()


class Express:
    """Reads items of one fan-out, one at a time; each worker has one of its own.

    To the connection it is the waiter of the answer, to the deadlines a runner.

    Attributes:
        began: When the request under way began, on the monotonic clock.
    """

    __slots__ = (
        "_ahead",
        "_end",
        "_ended",
        "_ends",
        "_exchange",
        "_index",
        "_item",
        "_mark",
        "_meta",
        "_place",
        "_request",
        "_session",
        "_shared",
        "_small_bytes",
        "began",
    )

    def __init__(self, session: Session, ahead: Ahead, shared: Shared[Any, Result]) -> None:
        self._session = session
        self._ahead = ahead
        self._shared = shared
        self._small_bytes = small_bytes(session.options)
        self._ends: dict[int, int] = {}
        self._exchange: Exchange | None = None
        self._place: _Place | None = None
        self.began = 0.0
        self._ended: asyncio.Future[tuple[int, Left] | None] | None = None

    # What the worker calls.

    def start(
        self, index: int, item: object
    ) -> asyncio.Future[tuple[int, Left] | None] | tuple[int, Left]:
        """Begin to read an item, and then all that follow it.

        Returns:
            The item itself, where it cannot be read so. Otherwise a future: its result is a later
            item, which is left to the worker, or None where there is none, or no room for it; it
            fails with what the iterator of the items raises.
        """
        session = self._session
        left = (
            Left(item, self._ahead.share(index), NOTHING)
            if os.getpid() != session.pid  # a child of a fork: the connections are its parent's
            else self._begin(index, item)
        )
        if left is not None:
            return index, left
        session.deadlines.enter_runner(self)
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def stop(self, error: BaseException) -> None:
        """End what is under way, at once, with `error` as what became of the item."""
        self._session.deadlines.leave_runner(self)
        ended, index = self._ended, self._index
        if self._exchange is not None:
            self._drop(asyncio.CancelledError())
        elif self._place is not None:
            self._session.limits.leave_line(self._place, self._end)
            self._place = None
            self._ahead.change(-self._end)
        else:
            # Cancelled after it was woken and before it ran, maybe for an item that was left to it.
            assert ended is not None
            is_woken = not ended.cancelled() and ended.exception() is None
            left = ended.result() if is_woken else None
            if left is None:
                return
            index = left[0]
        # Whoever waits for it would wait without end.
        self._shared.finish(index, None, error)

    # What the connection and the deadline call.

    def done(self) -> bool:
        """Whether no answer is waited for."""
        return self._exchange is None

    def set_result(self, result: Response) -> None:
        """Take an answer, and go on with the next item."""
        session, exchange = self._session, self._let_go()
        try:
            body = session.service.end_get(self._request, exchange, result)
        except Exception as exc:  # judged below; here is no caller to raise it to
            self._fail(exc)
            return
        try:
            session.succeeded(self._request.key, body, self._end, self.began)
            found = None if body is None else judge_small(session, body, self._end, self._meta)
        except Exception as exc:  # what the progress hook raises
            self._ahead.change(-self._end)
            self._give(None, exc)
            return
        if isinstance(found, Fetched):
            self._ahead.change(len(found.data) - self._end)
            self._give((self._request.key, found), None)
        else:
            self._leave(_UNSURE if found is None else Begun(first=found))

    def set_exception(self, exception: Exception) -> None:
        """Take the reason why there is no answer."""
        error = self._session.service.fail_get(self._request, self._let_go(), exception)
        if error is None:
            self._session.undo(self._end)
            self._leave(NOTHING)
        else:
            self._fail(error)

    def expire(self) -> None:
        """Give up what is under way: its deadline has passed."""
        if self._exchange is not None:
            error = self._session.too_late(self._request.key, self.began)
            self._drop(error)
            self._give(None, error)
        elif self._place is not None:  # the time of what waits in line has not begun
            self.began = time.monotonic()

    # What the limit calls.

    def enter(self) -> None:
        """Begin the request of the item, for which there is a place now."""
        self._place = None
        ended = self._ended
        assert ended is not None
        if ended.done() or not self._ask(self._session.limits.requests.mark):
            self._session.limits.give_back(self._end)
            self._leave(NOTHING)

    # One item.

    def _begin(self, index: int, item: object) -> Left | None:
        """Begin to read an item; return it where that cannot be done at once."""
        session, ahead = self._session, self._ahead
        if isinstance(item, str):
            estimate = session.limits.unknown_size
            key, meta, generation = item, None, ""
            mean = estimate.num_bytes
            if not key or not estimate.is_known or mean > self._small_bytes:
                return Left(item, ahead.share(index), NOTHING)
            end = self._ends.get(mean) or self._end_of(mean)
        elif isinstance(item, ObjectMeta) and 0 < item.size <= self._small_bytes:
            key, meta, generation, end = item.key, item, item.generation, item.size
        else:
            return Left(item, ahead.share(index), NOTHING)
        if not ahead.take(index, end):
            return Left(item, ahead.share(index), NOTHING)
        self._index, self._item, self._meta = index, item, meta
        self._request, self._end = ReadRequest(key, generation, 0, end), end
        mark = session.limits.take(end)
        if mark is not None:
            if self._ask(mark):
                return None
            session.limits.give_back(end)
        else:
            place = _Place(self)
            if session.limits.stand_in_line(place, end):
                self._place = place
                self.began = time.monotonic()
                return None
        return Left(item, ahead.share(index, end), NOTHING)

    def _ask(self, mark: int) -> bool:
        """Send the request of the item, if that can be done at once."""
        session = self._session
        try:
            exchange = session.service.begin_get(self._request, self)
        except Exception:
            # Such as of a key that no object can have: the worker, who asks again, raises it as
            # what became of this item.
            return False
        if exchange is None:
            return False
        self._exchange, self._mark = exchange, mark
        self.began = session.begin()
        return True

    def _end_of(self, mean: int) -> int:
        """Return what `first_range_bytes` does, and remember it for the next object."""
        end = first_range_bytes(mean, self._session.options)
        self._ends = {mean: end}
        return end

    def _let_go(self) -> Exchange:
        """Wait no more for the answer."""
        exchange = self._exchange
        assert exchange is not None
        self._exchange = None
        return exchange

    def _drop(self, error: BaseException) -> None:
        """End the request under way, which counts as failed with `error`."""
        self._session.service.abort_get(self._let_go())
        self._session.failed(self._request.key, error, self._mark, self._end)
        self._ahead.change(-self._end)

    def _fail(self, error: Exception) -> None:
        """Judge a failed attempt: whether the item has failed, or a coroutine tries again."""
        try:
            self._session.failed(self._request.key, error, self._mark, self._end)
        except Exception as exc:  # what the progress hook raises
            error = exc
        if isinstance(error, TransientError):
            self._leave(Begun(failure=error, began=self.began))
        elif isinstance(error, StorageError) and error.status == _UNAUTHORIZED:
            self._leave(NOTHING)
        else:
            self._ahead.change(-self._end)
            self._give(None, error)

    # What follows.

    def _give(self, result: Result | None, error: Exception | None) -> None:
        """Hand over what became of the item, and go on with the next one."""
        shared = self._shared
        shared.finish(self._index, result, error)
        ended = self._ended
        assert ended is not None
        if ended.done():  # the worker was cancelled in this turn of the loop
            return
        try:
            numbered = shared.next_if_any()
            left = None if numbered is None else self._begin(*numbered)
        except BaseException as exc:  # of the iterator of the items: raised in the worker
            self._session.deadlines.leave_runner(self)
            # Now, and not when the worker runs: the consumer may look before it does.
            shared.exhausted = True
            shared.crash = exc
            ended.set_exception(exc)
            return
        if numbered is None:
            self._stand(None)
        elif left is not None:
            self._stand((numbered[0], left))

    def _stand(self, left: tuple[int, Left] | None) -> None:
        """Wake the worker."""
        self._session.deadlines.leave_runner(self)
        assert self._ended is not None
        self._ended.set_result(left)

    def _leave(self, begun: Begun) -> None:
        """Hand the item to the worker."""
        ended = self._ended
        assert ended is not None
        if ended.done():  # the worker was cancelled in this turn of the loop
            self._ahead.change(-self._end)
            self._shared.finish(self._index, None, asyncio.CancelledError())
        else:
            share = self._ahead.share(self._index, self._end)
            self._stand((self._index, Left(self._item, share, begun)))

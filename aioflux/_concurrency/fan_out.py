"""Many items through one coroutine function: bounded, prefetching, in order or as they complete."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterable
from operator import length_hint
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeAlias, TypeVar

from aioflux._concurrency.async_iteration import nested

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
    )

__all__ = [
    "Items",
    "Runner",
    "Shared",
    "Supply",
    "bounded_batches",
    "bounded_map",
    "gather",
    "pair",
]

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")
T_contra = TypeVar("T_contra", contravariant=True)
Items: TypeAlias = "Iterable[T] | AsyncIterable[T]"

_FAILURES = (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt)
"""All but GeneratorExit; the last two come from code of the caller: a credentials function."""


class Supply(ABC, Generic[T]):
    """An asynchronous iterator of which some items may be there before they are asked for."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> T:
        """Wait for the next item."""

    @abstractmethod
    def has_ready(self) -> bool:
        """Whether the next item is there."""

    @abstractmethod
    def next_ready(self) -> T:
        """Return the next item, which is there."""


class Shared(Generic[T, R]):
    """What the workers and the consumer of one fan-out share."""

    def __init__(
        self,
        items: Items[T],
        *,
        ordered: bool,
        max_ahead: int,
        recover: Callable[[BaseException], R | None] | None = None,
        weigh: Callable[[R], float] | None = None,
    ) -> None:
        self._items: Iterator[T] | None = None
        self._supply = items if isinstance(items, Supply) else None
        self.is_sync = not isinstance(items, AsyncIterable)
        if isinstance(items, AsyncIterable):
            self._source = aiter(items)
            self._turn = asyncio.Lock()
        else:
            self._items = iter(items)
        self.ordered = ordered
        self.max_ahead = max_ahead
        self._recover = recover
        self._weigh = weigh
        self.taken = 0
        self.given = 0
        self.done: dict[int, tuple[R | None, BaseException | None]] = {}
        self.finished: deque[int] = deque()
        self.exhausted = False
        self.closing = False
        self.crash: BaseException | None = None
        self.consumer: asyncio.Future[None] | None = None
        self.parked: deque[asyncio.Future[None]] = deque()

    def next_item(self) -> tuple[int, T] | None:
        """Return the next item of an iterable and its place, or None at the end."""
        assert self._items is not None
        try:
            item = next(self._items)
        except StopIteration:
            self.exhausted = True
            return None
        except GeneratorExit as exc:
            # It would end a worker, and with it the iteration, without a word.
            raise RuntimeError("the iterator of the items raised GeneratorExit") from exc
        self.taken += 1
        return self.taken - 1, item

    async def take_item(self) -> tuple[int, T] | None:
        """Return the next item of an asynchronous iterable and its place, or None at the end."""
        async with self._turn:
            if self.exhausted:
                return None
            try:
                item = await anext(self._source)
            except StopAsyncIteration:
                self.exhausted = True
                return None
            # Places are given in the order of the items.
            self.taken += 1
            return self.taken - 1, item

    def finish(self, index: int, result: R | None, error: BaseException | None) -> None:
        """Take in what became of an item, and wake the consumer."""
        self.done[index] = (result, error)
        if not self.ordered:
            self.finished.append(index)
        self.wake_consumer()

    def take_ready(self) -> tuple[list[R], BaseException | None]:
        """Return the results that the consumer may have now, and the failure after them."""
        ready: list[R] = []
        weight = 0.0
        while weight < 1:
            if self.ordered:
                index = self.given + len(ready)
                if index not in self.done:
                    return ready, None
            elif self.finished:
                index = self.finished.popleft()
            else:
                return ready, None
            result, error = self.done.pop(index)
            if error is not None:
                result = None if self._recover is None else self._recover(error)
                if result is None:
                    return ready, error
            ready.append(result)  # type: ignore[arg-type]  # a result without an error is an R
            if self._weigh is not None:
                weight += self._weigh(ready[-1])
        return ready, None

    @property
    def has_room(self) -> bool:
        """Whether one more item may be begun."""
        return self.taken - self.given < self.max_ahead

    def next_if_any(self) -> tuple[int, T] | None:
        """Return the next item at once; None where that cannot be, or there is no room for it."""
        has_room = self.taken - self.given < self.max_ahead
        if not has_room or self.exhausted or self.closing:
            return None
        if self._items is not None:
            return self.next_item()
        if self._supply is None or not self._supply.has_ready():
            return None
        self.taken += 1
        return self.taken - 1, self._supply.next_ready()

    def is_over(self) -> bool:
        return self.exhausted and self.given == self.taken

    def wake_consumer(self) -> None:
        if self.consumer is not None and not self.consumer.done():
            self.consumer.set_result(None)

    def wake_workers(self, count: int) -> None:
        while self.parked and count:
            worker = self.parked.popleft()
            if not worker.done():
                worker.set_result(None)
                count -= 1


class Runner(Protocol[T_contra]):
    """What a worker lets run through items without it, until one of them needs a coroutine."""

    def start(
        self, index: int, item: T_contra
    ) -> asyncio.Future[tuple[int, Any] | None] | tuple[int, Any]:
        """Begin with an item; tell now or later which one is left to the worker, if any.

        What is left need not be the item itself: `function` is called with it.
        """

    def stop(self, error: BaseException) -> None:
        """End what is under way, with `error` as what became of it."""


async def _run(runner: Runner[T], index: int, item: T) -> tuple[int, Any] | None:
    """Let a runner begin with an item, and return what it leaves."""
    left = runner.start(index, item)
    if isinstance(left, tuple):
        return left
    try:
        return await left
    except BaseException as exc:
        runner.stop(exc)
        raise


async def _work(
    shared: Shared[T, R],
    function: Callable[[T], Awaitable[R]],
    new_runner: Callable[[Shared[T, R]], Runner[T]] | None,
) -> None:
    runner = None if new_runner is None else new_runner(shared)
    try:
        while not shared.exhausted:
            if not shared.has_room:
                room = asyncio.get_running_loop().create_future()
                shared.parked.append(room)
                await room
                continue
            if shared.is_sync:
                numbered = shared.next_item()
            else:
                numbered = shared.next_if_any() or await shared.take_item()
            if numbered is not None and runner is not None:
                numbered = await _run(runner, *numbered)
            if numbered is None:
                continue
            index, item = numbered
            try:
                result = await function(item)
            except _FAILURES as exc:
                if shared.closing:
                    raise
                # Raised where the item's result is taken: a worker that ends in silence would be
                # waited for without end.
                shared.finish(index, None, exc)
                if not isinstance(exc, Exception):
                    shared.exhausted = True
            else:
                shared.finish(index, result, None)
                # Otherwise it would live until the next result is there.
                del result
    except _FAILURES as exc:
        if shared.closing:
            raise
        # The caller's own iterator failed, or somebody cancels every task there is.
        shared.exhausted = True
        shared.crash = exc
    shared.wake_consumer()
    shared.wake_workers(1)


async def bounded_batches(
    function: Callable[[T], Awaitable[R]],
    items: Items[T],
    *,
    max_in_flight: int,
    ordered: bool = True,
    new_runner: Callable[[Shared[T, R]], Runner[T]] | None = None,
    recover: Callable[[BaseException], R | None] | None = None,
    weigh: Callable[[R], float] | None = None,
) -> AsyncGenerator[list[R], None]:
    """Yield lists of `await function(item)`, each of what is ready at once.

    The first failure is raised where its result would have been (in order) or as soon as it is
    known, and ends the rest, unless `recover` makes a result of it. Results wait for a slow
    consumer up to twice `max_in_flight`; then no new item is begun. Closing the generator, or
    cancelling its consumer, cancels what is under way and waits for it.

    `weigh` returns the part of a full list that a result is: a list ends when its results add up
    to 1 or more. Without it a list has no limit.

    A fixed set of workers instead of a task for each item saves 15 microseconds an item. They are
    not in a TaskGroup, because a generator that yields inside one would let it cancel the
    consumer's code.
    """
    shared: Shared[T, R] = Shared(
        items, ordered=ordered, max_ahead=2 * max_in_flight, recover=recover, weigh=weigh
    )
    num_workers = min(max_in_flight, max(1, length_hint(items, max_in_flight)))
    workers = [asyncio.create_task(_work(shared, function, new_runner)) for _ in range(num_workers)]
    pid = os.getpid()
    try:
        while True:
            ready, error = shared.take_ready()
            if ready:
                yield ready
                if os.getpid() != pid:
                    raise RuntimeError(
                        "an iteration that began before a fork cannot go on after it; begin again"
                    )
                shared.given += len(ready)
                shared.wake_workers(len(ready))
            if error is not None:
                raise error
            if ready:
                continue
            if shared.is_over():
                break
            shared.consumer = asyncio.get_running_loop().create_future()
            await shared.consumer
    finally:
        shared.closing = True
        if os.getpid() == pid:  # in a forked child they are the parent's
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    if shared.crash is not None:
        raise shared.crash


async def bounded_map(
    function: Callable[[T], Awaitable[R]],
    items: Items[T],
    *,
    max_in_flight: int,
    ordered: bool = True,
) -> AsyncGenerator[R, None]:
    """Yield each result of `bounded_batches` by itself."""
    batches = bounded_batches(function, items, max_in_flight=max_in_flight, ordered=ordered)
    async with nested(batches) as inner:
        async for batch in inner:
            for result in batch:
                yield result


async def gather(calls: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Await all of `calls` at once and return their results in order.

    The first failure cancels the others, waits for them, and is raised itself instead of in a
    group: callers name the error that they expect.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


async def pair(first: Coroutine[Any, Any, R], second: Coroutine[Any, Any, S]) -> tuple[R, S]:
    """Await two calls at once; a failure as in `gather`."""
    try:
        async with asyncio.TaskGroup() as group:
            one, other = group.create_task(first), group.create_task(second)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return one.result(), other.result()

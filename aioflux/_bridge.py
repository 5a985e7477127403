r"""The background event loop of blocking callers: its thread, fork hooks and end of process.

One thread runs one uvloop loop for the whole process; it starts with the first call. A call from
the loop's own thread raises, because it would wait for itself; a caller whose thread runs another
loop (a notebook) is served.

    caller's thread:  run(coroutine) -> waits ---------------------------> result, or error
                                    \\                                /
    loop's thread:                   task -> ... -> done, cancelled /

After a fork the child has no such thread, and must not touch the parent's sockets: closing or
collecting an inherited session in the child removes the parent's sockets from the epoll set that
both share, and the parent's next request hangs. So inherited objects are kept for ever, and the
lock is replaced, because another thread may have held it at the fork.

Over 500 lines: everything that depends on threads and forks is in this one module.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import ctypes
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from aioflux._concurrency.async_iteration import nested
from aioflux._concurrency.fan_out import BufferedIterator
from aioflux._transfer.sessions import live_sessions, longest_cleanup_of_all
from aioflux.store import sessions_of

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
    )
    from contextlib import AbstractAsyncContextManager

    from aioflux._transfer.sessions import Sessions
    from aioflux.store import Store

__all__ = [
    "Feed",
    "ForkSafeLock",
    "Held",
    "background_loop",
    "begin",
    "close_when_dropped",
    "entered",
    "feed",
    "iterate",
    "limit_wait_for_workers",
    "run",
    "shut_down_with_worker",
]

T = TypeVar("T")

_WORKER_SHUTDOWN_SECONDS = 10.0
"""Time that a terminated DataLoader worker has to clean up; the main process waits for it."""

_POLL_SECONDS = 0.5
"""Interval at which a waiting caller wakes for signals that arrived just before it waited."""

_FEED_SECONDS = 0.001
"""Longest time for which a feed collects items in one crossing."""

_BUILTIN_ITERABLES: tuple[type, ...] = (
    list,
    tuple,
    set,
    frozenset,
    dict,
    range,
    type({}.keys()),
    type({}.items()),
)
"""Iterables that run no code of the caller."""

_BEFORE_FORK = "an object opened before a fork cannot be used after it; open it again"

_parked: list[Any] = []
"""Objects that a forked child inherited; never closed, never collected."""


class _LoopThread:
    """The background thread of one process, and the work on its loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled: set[concurrent.futures.Future[Any]] = set()
        self._started: set[concurrent.futures.Future[Any]] = set()
        self.ends_with_worker = False
        self.limits_workers = False
        self.is_exiting = False
        self.is_closed = False

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop, started on first use.

        Raises:
            RuntimeError: The caller is on the loop's own thread.
        """
        if self._thread is threading.current_thread():
            raise RuntimeError(
                "a blocking call of aioflux was made on its own event loop and would wait for "
                "itself; await the same method of aioflux.open_store(...) instead"
            )
        with self._lock:
            if self._loop is None:
                loop = _new_loop()
                self._thread = threading.Thread(
                    target=_run_until_stopped, args=(loop,), name="aioflux-loop", daemon=True
                )
                self._thread.start()
                self._loop = loop  # last: Ctrl-C may have kept the thread from starting
            return self._loop

    def stop(self) -> None:
        """Cancel all tasks, stop the loop and wait for its thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or not thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_wind_down(loop), loop)
        thread.join(longest_cleanup_of_all().total_seconds)
        if not thread.is_alive():
            loop.close()

    def start_if_own(self, coroutine: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Start a coroutine if this is the loop's own thread; return whether it is."""
        if self._loop is None or self._thread is not threading.current_thread():
            return False
        task = self._loop.create_task(coroutine())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def track_cancelled(self, outcome: concurrent.futures.Future[Any]) -> None:
        """Remember cancelled work whose caller may stop waiting before it has ended."""
        self._cancelled.add(outcome)
        outcome.add_done_callback(self._cancelled.discard)

    def track_started(self, outcome: concurrent.futures.Future[Any]) -> None:
        """Remember work that the end of the process waits for."""
        self._started.add(outcome)
        outcome.add_done_callback(self._started.discard)

    def wait_for_started(self) -> None:
        """Wait for all work of `begin`."""
        concurrent.futures.wait(list(self._started))

    def wait_for_cancelled(self) -> None:
        """Wait a little for cancelled work."""
        seconds = longest_cleanup_of_all().interrupted_seconds
        concurrent.futures.wait(list(self._cancelled), timeout=seconds)

    def serves(self, sessions: Sessions) -> bool:
        """Return whether there is a session of this loop."""
        return self._loop in sessions

    def inherited(self) -> tuple[Any, ...]:
        """Return what a forked child must neither close nor collect."""
        return self._loop, self._thread, self._tasks


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # no wheels for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run the shared loop until it is stopped, also after exceptions that end `run_forever`.

    A SystemExit or KeyboardInterrupt in a task, from code of the caller such as a credentials
    function, is raised both where the task is awaited and out of the loop.
    """
    while True:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            return


async def _wind_down(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop.stop()


async def _close_all(iterators: list[AsyncGenerator[Any, None]]) -> None:
    # One that another thread is iterating raises; its task is cancelled later.
    await asyncio.gather(*(each.aclose() for each in iterators), return_exceptions=True)


_bridge = _LoopThread()
_held: weakref.WeakSet[Held[Any]] = weakref.WeakSet()
_iterating: weakref.WeakSet[AsyncGenerator[Any, None]] = weakref.WeakSet()
"""Contexts and iterations that blocking callers have open; closed before the loop is stopped."""


def _own_bridge() -> _LoopThread:
    """Return the bridge of this process.

    Ctrl-C just after a fork is raised in the fork hook, and ends it: the child then still has the
    bridge of its parent, whose thread does not run here.
    """
    if _bridge.pid != os.getpid():
        _after_fork_in_child()
    return _bridge


def shut_down() -> None:
    """Close what is in flight, and stop the loop: the process is about to end."""
    _own_bridge().wait_for_started()
    _bridge.is_exiting = True
    for held in list(_held):
        held.abandon()
    if iterators := list(_iterating):
        run(_close_all(iterators))
    _bridge.wait_for_cancelled()
    for each in live_sessions():
        _close_session(each)
    _bridge.wait_for_started()
    _bridge.is_closed = True
    _bridge.stop()


def _park(*inherited: object) -> None:
    """Keep objects from ever being closed or collected, at the end of the process too."""
    _parked.append(inherited)
    if sys.implementation.name == "cpython":
        # A reference that is never released: the list alone is cleared when the process ends, and
        # aiohttp sessions and sockets would close themselves.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _after_fork_in_child() -> None:
    global _bridge
    sessions = live_sessions()
    # Parked before they are dropped, and the new bridge last: Ctrl-C may arrive in between.
    _park(_bridge, _bridge.inherited(), [each.open_sessions() for each in sessions])
    for each in sessions:
        each.forget()
    _held.clear()
    _iterating.clear()
    _bridge = _LoopThread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(shut_down)


def shut_down_with_worker() -> None:
    """Have `shut_down` run when this process, a DataLoader worker, ends or is terminated.

    A worker runs no hook of `atexit`. When the main process ends, multiprocessing sends SIGTERM to
    the workers that still run (a traceback or `persistent_workers` keeps them alive), and waits for
    them without a limit; torch's handler calls `_exit` at once. So the handler here has a limit.
    """
    from multiprocessing.util import Finalize  # its own hook at exit must run before this one

    bridge = _own_bridge()
    if not bridge.ends_with_worker:
        bridge.ends_with_worker = True
        Finalize(None, shut_down, exitpriority=0)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _shut_down_and_exit)


def limit_wait_for_workers() -> None:
    """Have the end of this process wait for its daemonic children for a limited time.

    DataLoader workers are such children. One in the middle of a C call does not run the handler of
    `shut_down_with_worker`, and multiprocessing would wait for it without a limit.
    """
    from multiprocessing.util import Finalize

    bridge = _own_bridge()
    if not bridge.limits_workers:
        bridge.limits_workers = True
        Finalize(None, _end_workers, exitpriority=0)  # before multiprocessing joins its children


def _end_workers() -> None:
    from multiprocessing import active_children

    workers = [each for each in active_children() if each.daemon]
    for each in workers:
        each.terminate()
    give_up_at = time.monotonic() + _WORKER_SHUTDOWN_SECONDS + 1.0
    for each in workers:
        each.join(max(0.0, give_up_at - time.monotonic()))
        if each.is_alive():
            each.kill()


def _shut_down_and_exit(*_: object) -> None:
    # In a thread: the main thread may hold the bridge's lock, and would wait for itself.
    thread = threading.Thread(target=shut_down, name="aioflux-shutdown")
    thread.start()
    thread.join(_WORKER_SHUTDOWN_SECONDS)
    os._exit(0)  # as torch's handler: another status is an error in the main process


def run(coroutine: Coroutine[Any, Any, T], *, feed: Feed[Any] | None = None) -> T:
    """Run a coroutine on the background loop and return its result.

    If it takes items of a `feed`, they are produced in this thread meanwhile.

    Ctrl-C (or any other exception that a signal handler raises here) cancels the coroutine, waits
    until it has cleaned up, and is then raised in the caller.

    Raises:
        RuntimeError: Called on the background loop's own thread.
    """
    started: list[asyncio.Task[T]] = []
    loop: asyncio.AbstractEventLoop | None = None

    def start() -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        started.append(task)
        task.add_done_callback(finish)

    def finish(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            outcome.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def cancel() -> None:
        if started:
            started[0].cancel()
        else:  # Ctrl-C came before `start` was scheduled
            coroutine.close()
            outcome.set_exception(asyncio.CancelledError())

    # Ctrl-C may come anywhere from here on.
    try:
        if _own_bridge().is_exiting and threading.current_thread().daemon:
            coroutine.close()
            _block_forever()
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        loop = _bridge.loop()
        loop.call_soon_threadsafe(start)
        if feed is not None:
            feed.serve(outcome)
        return _result(outcome)
    except BaseException:
        if loop is None:
            coroutine.close()
        elif not outcome.done():
            loop.call_soon_threadsafe(cancel)
            _bridge.track_cancelled(outcome)  # another Ctrl-C ends the wait for it
            concurrent.futures.wait([outcome], timeout=longest_cleanup_of_all().total_seconds)
        if _bridge.is_exiting and threading.current_thread().daemon:
            _block_forever()
        raise


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the background loop, started on first use, for libraries that ask for a loop.

    Raises:
        RuntimeError: Called on the background loop's own thread.
    """
    return _own_bridge().loop()


def begin(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the background loop and return its future at once.

    The end of the process waits for it. `cancel` of the future cancels the coroutine, whose
    clean-up still runs. After a fork only the parent runs it.

    Raises:
        RuntimeError: Called on the background loop's own thread.
    """
    try:
        loop = _own_bridge().loop()
    except BaseException:
        coroutine.close()
        raise
    outcome = asyncio.run_coroutine_threadsafe(coroutine, loop)
    _bridge.track_started(outcome)
    return outcome


def _block_forever() -> NoReturn:
    """Wait in a daemon thread until the exiting interpreter ends it.

    Its stores are closed already; an error would only print a traceback that says so.
    """
    while True:
        threading.Event().wait()


def _result(outcome: concurrent.futures.Future[T]) -> T:
    """Wait for the outcome, and wake every `_POLL_SECONDS`.

    A signal that arrives just before the thread blocks does not interrupt the wait: CPython would
    run its handler only afterwards.
    """
    while True:
        try:
            return outcome.result(_POLL_SECONDS)
        except TimeoutError:  # of the wait, or of the work
            if outcome.done():
                return outcome.result()


async def _step(iterator: AsyncIterator[T]) -> tuple[bool, T | None]:
    # StopAsyncIteration cannot pass through a future as it is.
    try:
        return True, await anext(iterator)
    except StopAsyncIteration:
        return False, None


class ForkSafeLock:
    """A lock among threads of a process that is free in a forked child.

        with lock.current:

    `with` enters the interpreter's own lock: in a Python method around it, Ctrl-C could arrive
    after the lock is acquired and before the block is entered, or before it is released.
    """

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()

    @property
    def current(self) -> threading.Lock:
        """The lock of this process."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        return self._lock


class Feed(BufferedIterator[T]):
    """A blocking caller's iterable, as an asynchronous iterator on the background loop.

    Items are produced in the caller's own thread, while it waits in `run`: its generators may
    block, use other blocking stores, and run in no thread but their own. One crossing takes the
    items that are produced within a millisecond. Up to `max_ahead` items are buffered, and more
    are requested when half of them are used.
    """

    def __init__(self, items: Iterable[T], *, max_ahead: int) -> None:
        self._items = iter(items)
        self._max_ahead = max_ahead
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ready: deque[T] = deque()
        self._requested_by: asyncio.AbstractEventLoop | None = None
        self._is_requested = False
        self._waiter: asyncio.Future[None] | None = None
        self._is_exhausted = False
        self._failure: BaseException | None = None

    async def __anext__(self) -> T:
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if self._is_exhausted:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            self._request()
            await self._waiter
        return self._ready.popleft()

    def has_ready(self) -> bool:
        """See base class."""
        if 2 * len(self._ready) <= self._max_ahead:
            self._request()
        return bool(self._ready)

    def next_ready(self) -> T:
        """See base class."""
        return self._ready.popleft()

    def _request(self) -> None:
        """Wake the caller's thread to produce more, unless it was woken or has no more."""
        if not (self._is_requested or self._is_exhausted or self._failure):
            self._is_requested = True
            self._requested_by = asyncio.get_running_loop()
            self._wakeups.put(None)

    def serve(self, outcome: concurrent.futures.Future[Any]) -> None:
        """Produce items in this thread, on request, until there is an outcome."""
        outcome.add_done_callback(lambda _: self._wakeups.put(None))
        while not outcome.done():
            with suppress(queue.Empty):
                self._wakeups.get(timeout=_POLL_SECONDS)
            loop = self._requested_by
            if loop is not None:
                self._requested_by = None
                self._produce(loop)

    def _produce(self, loop: asyncio.AbstractEventLoop) -> None:
        items: list[T] = []
        is_exhausted, failure = False, None
        max_items = self._max_ahead - len(self._ready)
        until = time.monotonic() + _FEED_SECONDS
        try:
            while len(items) < max_items and (not items or time.monotonic() < until):
                items.append(next(self._items))
        except StopIteration:
            is_exhausted = True
        except Exception as exc:  # the caller's own: raised where the items are used
            failure = exc

        # At once: the loop may need them before it runs `accept`.
        self._ready.extend(items)

        def accept() -> None:
            self._is_exhausted, self._failure = is_exhausted, failure
            self._is_requested = False
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

        loop.call_soon_threadsafe(accept)


def feed(items: Iterable[T], *, max_ahead: int) -> Iterable[T] | Feed[T]:
    """Return a feed if iterating runs code of the caller, else the iterable itself."""
    return items if type(items) in _BUILTIN_ITERABLES else Feed(items, max_ahead=max_ahead)


def iterate(iterator: AsyncGenerator[T, None], *, feed: object = None) -> Iterator[T]:
    """Iterate from a synchronous caller.

    Each item is one crossing, so it should be a page or a batch. If the iterator takes items of a
    `feed`, they are produced in this thread.

    Leaving the iteration early closes the asynchronous iterator and its pending requests.
    """
    pid = os.getpid()
    _iterating.add(iterator)
    # Closed here only: the loop's hook would close it a second time if the collector finds both in
    # one cycle, such as that of an exception and its frame.
    items = nested(iterator)
    try:
        while True:
            has_item, item = run(_step(items), feed=feed if isinstance(feed, Feed) else None)
            if not has_item:
                return
            yield item  # type: ignore[misc]  # not None if there is one
            del item
            if os.getpid() != pid:
                raise RuntimeError(_BEFORE_FORK)
    finally:
        _iterating.discard(iterator)
        _close_dropped(iterator, iterator.aclose, pid)


def _close_dropped(target: Any, close: Callable[[], Coroutine[Any, Any, Any]], pid: int) -> None:
    """Close an object that was dropped, from any thread and process that the collector runs in."""
    if os.getpid() != pid:
        _park(target)
    elif _bridge.is_closed:
        return  # closed with the loop
    elif not _bridge.start_if_own(close):
        outcome = begin(close())
        # Not longer: the collector may run while this thread holds a lock that the loop needs, such
        # as that of a future that it waits for. The end of the process waits for the rest.
        times = longest_cleanup_of_all()
        seconds = max(times.interrupted_seconds, times.composite_wait_seconds)
        if concurrent.futures.wait([outcome], timeout=seconds).done:
            outcome.result()


def close_when_dropped(store: Store) -> Store:
    """Close the connections of a store when it is collected or the process ends; return it."""
    # Not at exit: `shut_down` closes those that still exist, before it stops the loop.
    weakref.finalize(store, _close_session, sessions_of(store)).atexit = False
    return store


def _close_session(sessions: Sessions) -> None:
    # Not awaited: the collector may run while this thread holds a lock that the loop needs, such as
    # that of a future that it waits for.
    bridge = _own_bridge()
    close = sessions.close_current
    if bridge.serves(sessions) and not (bridge.is_closed or bridge.start_if_own(close)):
        begin(close())


@contextmanager
def entered(manager: AbstractAsyncContextManager[T]) -> Iterator[Held[T]]:
    """Enter an asynchronous context manager, and exit it with the outcome of the body."""
    held = Held(manager)
    try:
        yield held
    except GeneratorExit:
        held.abandon()
        raise
    except BaseException as exc:
        if not held.leave(exc):
            raise
    else:
        held.leave()


class Held(Generic[T]):
    """An asynchronous context manager that a blocking object, such as a file, keeps open.

    Dropped without `leave`, by the garbage collector or with the process, it exits with an error:
    an upload is aborted and its object never published. A forked child only drops it.
    """

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._pid = os.getpid()
        self._manager: AbstractAsyncContextManager[T] | None = None
        self._value = run(manager.__aenter__())
        self._manager = manager
        _held.add(self)

    @property
    def value(self) -> T:
        """The value that the manager returned on entry.

        Raises:
            RuntimeError: This is a forked child of the process that opened it.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(_BEFORE_FORK)
        return self._value

    def leave(self, error: BaseException | None = None) -> bool:
        """Exit the manager, with `error` if one is given; the second call has no effect.

        Returns:
            Whether the manager has suppressed the error.

        Raises:
            RuntimeError: This is a forked child of the process that opened it, and `error` is None.
        """
        if os.getpid() != self._pid and error is not None:
            self.abandon()
            return False
        _ = self.value
        manager, self._manager = self._manager, None
        if manager is None:
            return False
        kind, trace = (type(error), error.__traceback__) if error is not None else (None, None)
        return bool(run(manager.__aexit__(kind, error, trace)))

    def abandon(self) -> None:
        """Exit the manager as if its body had failed, from any thread and process."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        error = RuntimeError("dropped without being closed")
        _close_dropped((manager, self._value), lambda: _leave(manager, error), self._pid)

    __del__ = abandon


async def _leave(manager: AbstractAsyncContextManager[Any], error: Exception) -> None:
    await manager.__aexit__(type(error), error, None)

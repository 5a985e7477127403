r"""The bridge from synchronous callers to the event loop; only it knows threads, loops and fork.

One background thread runs one uvloop loop for the whole process; it starts with the first call. A
call from the loop's own thread is refused, because it would wait for itself; a caller whose thread
runs another loop (a notebook) is served.

    caller's thread:  run(coroutine) -> waits ---------------------------> result, or error
                                    \\                                /
    loop's thread:                   task -> ... -> done, cancelled /

After a fork the child starts over: the thread is not there, and neither may the parent's sockets be
touched. Closing or collecting an inherited session in the child would remove the parent's sockets
from the epoll set that both share, and the parent's next request would hang. So what is inherited
is parked for ever, and the lock is replaced, since another thread may have held it at the fork.

Over 500 lines, because what else knows of threads would have to be trusted with the same care.
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

from aioflux import store as _store
from aioflux._concurrency.async_iteration import nested
from aioflux._concurrency.fan_out import Supply

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

__all__ = [
    "Feed",
    "Held",
    "OwnLock",
    "background_loop",
    "begin",
    "close_when_dropped",
    "entered",
    "feed",
    "iterate",
    "run",
    "shut_down_with_worker",
]

T = TypeVar("T")

_CLEANUP_SECONDS = 30.0
"""Time that cancelled work has to abort its uploads before the caller goes on."""

_ENDING_SECONDS = 2.0
"""Time that such work has at the end of the process, where the caller did not wait for it."""

_WORKER_SHUTDOWN_SECONDS = 10.0
"""Time that a terminated DataLoader worker has to clean up; the main process waits for it."""

_LOOK_UP_SECONDS = 0.5
"""Time between two looks of a waiting caller at signals that came when it was about to wait."""

_FEED_SECONDS = 0.001
_PLAIN: tuple[type, ...] = (
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

_BEFORE_FORK = "what was opened before a fork cannot be used after it; open it again"

_parked: list[Any] = []
"""What a forked child inherited; never closed, never collected."""


class _Bridge:
    """The loop thread of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ending: set[asyncio.Task[Any]] = set()
        self._left_alone: set[concurrent.futures.Future[Any]] = set()
        self._begun: set[concurrent.futures.Future[Any]] = set()
        self.ends_with_worker = False
        self.is_ending = False
        self.is_over = False

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
        """Stop the loop and wait for its thread; what is under way is cancelled first."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or not thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_wind_down(loop), loop)
        thread.join(_CLEANUP_SECONDS)
        if not thread.is_alive():
            loop.close()

    def start_if_own(self, coroutine: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Start a coroutine without waiting where this is the loop's own thread; tell if it is."""
        if self._loop is None or self._thread is not threading.current_thread():
            return False
        task = self._loop.create_task(coroutine())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return True

    def leave_alone(self, outcome: concurrent.futures.Future[Any]) -> None:
        """Remember cancelled work that its caller may not wait for to the end."""
        self._left_alone.add(outcome)
        outcome.add_done_callback(self._left_alone.discard)

    def await_at_exit(self, outcome: concurrent.futures.Future[Any]) -> None:
        """Remember work that the end of the process waits for."""
        self._begun.add(outcome)
        outcome.add_done_callback(self._begun.discard)

    def wait_for_begun(self) -> None:
        """Wait for what was begun."""
        concurrent.futures.wait(list(self._begun))

    def wait_for_cleanup(self) -> None:
        """Wait a little for cancelled work that nobody waits for."""
        concurrent.futures.wait(list(self._left_alone), timeout=_ENDING_SECONDS)

    def serves(self, sessions: _store.Sessions) -> bool:
        """Tell whether there is a session of this loop."""
        return self._loop is not None and self._loop in sessions

    def inherited(self) -> tuple[Any, ...]:
        return self._loop, self._thread, self._ending


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # no wheels for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop that all callers share past what would end the loop of one.

    A SystemExit or KeyboardInterrupt in a task, from code of the caller such as a credentials
    function, is raised where the task is waited for, and out of the loop as well.
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
    # One that another thread is in the middle of refuses; its task is cancelled later.
    await asyncio.gather(*(each.aclose() for each in iterators), return_exceptions=True)


_bridge = _Bridge()
_held: weakref.WeakSet[Held[Any]] = weakref.WeakSet()
_iterating: weakref.WeakSet[AsyncGenerator[Any, None]] = weakref.WeakSet()
"""What blocking objects and iterations hold open; ended before the loop is."""


def _own_bridge() -> _Bridge:
    """Return the bridge of this process.

    Ctrl-C just after a fork is raised in a hook, where it is lost and the hook with it: then the
    child still has the bridge of its parent, whose thread does not run here.
    """
    if _bridge.pid != os.getpid():
        _after_fork_in_child()
    return _bridge


def shut_down() -> None:
    """Close what is under way, and stop the loop: the process is about to end."""
    _own_bridge().wait_for_begun()
    _bridge.is_ending = True
    for held in list(_held):
        held.abandon()
    if iterators := list(_iterating):
        run(_close_all(iterators))
    _bridge.wait_for_cleanup()
    for each in _store.live_stores():
        _close_session(each.sessions)
    _bridge.is_over = True
    _bridge.stop()


def _park(*inherited: object) -> None:
    """Keep objects from ever being closed or collected, at the end of the process too."""
    _parked.append(inherited)
    if sys.implementation.name == "cpython":
        # One reference that nobody gives back. The list alone is taken apart when the process ends,
        # where aiohttp sessions and sockets close themselves.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _after_fork_in_child() -> None:
    global _bridge
    stores = _store.live_stores()
    # Parked before they are forgotten, and the new bridge last: Ctrl-C may come in between.
    _park(_bridge, _bridge.inherited(), [list(each.sessions.items()) for each in stores])
    for each in stores:
        each.forget_sessions()
    _held.clear()
    _iterating.clear()
    _bridge = _Bridge()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(shut_down)


def shut_down_with_worker() -> None:
    """Have `shut_down` run when this process, a DataLoader worker, ends or is terminated.

    A worker runs no hook of `atexit`, and torch answers the SIGTERM that multiprocessing sends to
    those which are left when the main process ends (a traceback or `persistent_workers` keeps them
    alive) with `_exit`. multiprocessing then waits for them without a limit, hence ours.
    """
    from multiprocessing.util import Finalize  # its own hook at exit must run before ours

    bridge = _own_bridge()
    if not bridge.ends_with_worker:
        bridge.ends_with_worker = True
        Finalize(None, shut_down, exitpriority=0)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _shut_down_and_exit)


def _shut_down_and_exit(*_: object) -> None:
    # In a thread: the main thread may hold the bridge's lock, and would wait for itself.
    thread = threading.Thread(target=shut_down, name="aioflux-shutdown")
    thread.start()
    thread.join(_WORKER_SHUTDOWN_SECONDS)
    os._exit(0)  # as torch's handler: another status is an error in the main process


def run(coroutine: Coroutine[Any, Any, T], *, feed: Feed[Any] | None = None) -> T:
    """Run a coroutine on the background loop and return its result.

    Where it takes items of a `feed`, they are produced here meanwhile.

    Ctrl-C (or any other exception that a signal handler raises here) cancels the coroutine and
    waits until it has cleaned up before it goes on to the caller.

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
        else:  # Ctrl-C came before `start` was in line
            coroutine.close()
            outcome.set_exception(asyncio.CancelledError())

    # Ctrl-C may come anywhere from here on.
    try:
        if _own_bridge().is_ending and threading.current_thread().daemon:
            coroutine.close()
            _stand_still()
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
            _bridge.leave_alone(outcome)  # another Ctrl-C ends the wait for it
            concurrent.futures.wait([outcome], timeout=_CLEANUP_SECONDS)
        if _bridge.is_ending and threading.current_thread().daemon:
            _stand_still()
        raise


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the background loop, started on first use, for libraries that ask for a loop.

    Raises:
        RuntimeError: Called on the background loop's own thread.
    """
    return _own_bridge().loop()


def begin(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the background loop, and return without waiting for it.

    The end of the process waits for it. `cancel` of the future cancels it, and its clean-up goes
    on. After a fork the child has no part in it.

    Raises:
        RuntimeError: Called on the background loop's own thread.
    """
    try:
        loop = _own_bridge().loop()
    except BaseException:
        coroutine.close()
        raise
    outcome = asyncio.run_coroutine_threadsafe(coroutine, loop)
    _bridge.await_at_exit(outcome)
    return outcome


def _stand_still() -> NoReturn:
    """Wait in a daemon thread for the interpreter, which is ending, to end it.

    What it used is closed already; an error would only be a traceback that says so.
    """
    while True:
        threading.Event().wait()


def _result(outcome: concurrent.futures.Future[T]) -> T:
    """Wait for the outcome, and look up from time to time.

    A signal that arrives just before the thread blocks interrupts nothing: CPython would run its
    handler only when the wait is over.
    """
    while True:
        try:
            return outcome.result(_LOOK_UP_SECONDS)
        except TimeoutError:  # of the wait, or of the work
            if outcome.done():
                return outcome.result()


async def _step(iterator: AsyncIterator[T]) -> tuple[bool, T | None]:
    # StopAsyncIteration cannot pass through a future as it is.
    try:
        return True, await anext(iterator)
    except StopAsyncIteration:
        return False, None


class OwnLock:
    """A lock among threads of a process; free in a forked child, whoever held it at the fork.

        with own_lock.mine:

    What `with` enters is the interpreter's lock itself: in methods of ours around it Ctrl-C could
    come when it is taken and the block is not entered, or before it is given back.
    """

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()

    @property
    def mine(self) -> threading.Lock:
        """The lock of this process."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        return self._lock


class Feed(Supply[T]):
    """A blocking caller's iterable, as an asynchronous iterator on the background loop.

    The items are taken in the caller's own thread, while it waits in `run`: its generators may
    block, use other stores through their blocking face, and meet no thread but their own. A
    crossing takes what can be had within a millisecond. Up to `max_ahead` items are here ahead of
    their use, and more are asked for when half of them are left, so that nobody waits for them.
    """

    def __init__(self, items: Iterable[T], *, max_ahead: int) -> None:
        self._items = iter(items)
        self._max_ahead = max_ahead
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ready: deque[T] = deque()
        self._asked: asyncio.AbstractEventLoop | None = None
        self._is_asking = False
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self._failure: BaseException | None = None

    async def __anext__(self) -> T:
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            self._ask()
            await self._waiter
        return self._ready.popleft()

    def has_ready(self) -> bool:
        """See base class."""
        if 2 * len(self._ready) <= self._max_ahead:
            self._ask()
        return bool(self._ready)

    def next_ready(self) -> T:
        """See base class."""
        return self._ready.popleft()

    def _ask(self) -> None:
        """Ask the caller's thread for more, unless it was asked, or there is no more."""
        if not (self._is_asking or self._is_over or self._failure):
            self._is_asking = True
            self._asked = asyncio.get_running_loop()
            self._bell.put(None)

    def serve(self, outcome: concurrent.futures.Future[Any]) -> None:
        """Produce items in this thread, as they are asked for, until there is an outcome."""
        outcome.add_done_callback(lambda _: self._bell.put(None))
        while not outcome.done():
            with suppress(queue.Empty):
                self._bell.get(timeout=_LOOK_UP_SECONDS)
            loop = self._asked
            if loop is not None:
                self._asked = None
                self._supply(loop)

    def _supply(self, loop: asyncio.AbstractEventLoop) -> None:
        taken: list[T] = []
        is_over, failure = False, None
        room = self._max_ahead - len(self._ready)
        until = time.monotonic() + _FEED_SECONDS
        try:
            while len(taken) < room and (not taken or time.monotonic() < until):
                taken.append(next(self._items))
        except StopIteration:
            is_over = True
        except Exception as exc:  # the caller's own: raised where the items are used
            failure = exc

        # At once: the loop may come to need them before it comes to what is called on it.
        self._ready.extend(taken)

        def accept() -> None:
            self._is_over, self._failure = is_over, failure
            self._is_asking = False
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

        loop.call_soon_threadsafe(accept)


def feed(items: Iterable[T], *, max_ahead: int) -> Iterable[T] | Feed[T]:
    """Return a feed of an iterable whose items are made by the caller's code, else the iterable."""
    return items if type(items) in _PLAIN else Feed(items, max_ahead=max_ahead)


def iterate(iterator: AsyncGenerator[T, None], *, feed: object = None) -> Iterator[T]:
    """Iterate from a synchronous caller.

    Each item is one crossing, so it should be a page or a batch. Where the iterator takes items of
    a `feed`, they are produced here.

    Leaving the iteration early closes the asynchronous iterator and what it has under way.
    """
    pid = os.getpid()
    _iterating.add(iterator)
    # Closed here alone: the loop would do it, too, where the collector finds both in one cycle,
    # such as that of an error which a frame keeps.
    items = nested(iterator)
    try:
        while True:
            there_is, item = run(_step(items), feed=feed if isinstance(feed, Feed) else None)
            if not there_is:
                return
            yield item  # type: ignore[misc]  # an item where there is one
            del item
            if os.getpid() != pid:
                raise RuntimeError(_BEFORE_FORK)
    finally:
        _iterating.discard(iterator)
        _end(iterator, iterator.aclose, pid)


def _end(what: Any, ending: Callable[[], Coroutine[Any, Any, Any]], pid: int) -> None:
    """End what was dropped: the collector runs in forked children and on the loop's thread, too."""
    if os.getpid() != pid:
        _park(what)
    elif _bridge.is_over:
        return  # ended with the loop
    elif not _bridge.start_if_own(ending):
        run(ending())


def close_when_dropped(store: _store.Store) -> None:
    """Close the connections of a store that nobody holds any more, or when the process ends."""
    # What is held until then is closed before the loop stops, wherever this stands among the hooks.
    weakref.finalize(store, _close_session, store.sessions).atexit = False


def _close_session(sessions: _store.Sessions) -> None:
    if _own_bridge().serves(sessions):
        _end(sessions, lambda: _store.close_session(sessions), os.getpid())


@contextmanager
def entered(manager: AbstractAsyncContextManager[T]) -> Iterator[Held[T]]:
    """Enter an asynchronous context manager, and leave it the way that the body ended."""
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
    """An asynchronous context manager that a blocking object, such as a file, holds open.

    Dropped without `leave`, by the garbage collector or with the process, it is left with an error:
    what is under construction is aborted and never published. A forked child only forgets it.
    """

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._pid = os.getpid()
        self._manager: AbstractAsyncContextManager[T] | None = None
        self._value = run(manager.__aenter__())
        self._manager = manager
        _held.add(self)

    @property
    def value(self) -> T:
        """What the manager gave.

        Raises:
            RuntimeError: This is a forked child of the process that opened it.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(_BEFORE_FORK)
        return self._value

    def leave(self, error: BaseException | None = None) -> bool:
        """Leave the manager, because of `error` where one is given. Leaving twice does nothing.

        Returns:
            Whether the manager has dealt with the error.

        Raises:
            RuntimeError: This is a forked child of the process that opened it, and all went well.
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
        """Leave the manager as if its body had failed, from any thread and process."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        error = RuntimeError("dropped without being closed")
        _end((manager, self._value), lambda: _leave(manager, error), self._pid)

    __del__ = abandon


async def _leave(manager: AbstractAsyncContextManager[Any], error: Exception) -> None:
    await manager.__aexit__(type(error), error, None)

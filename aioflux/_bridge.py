r"""The background event loop for blocking callers: its thread, fork hooks and shutdown.

One thread runs one uvloop loop for the whole process; it starts with the first call. A call from
the loop's own thread raises, because it would wait for itself. The caller's thread may run another
loop, as in a notebook.

    caller's thread:  run(coroutine) -> waits ---------------------------> result, or error
                                    \                                /
    loop's thread:                   task -> ... -> done, cancelled /

After a fork the child does not have this thread, and must not touch the parent's sockets: closing
or collecting an inherited session in the child removes the parent's sockets from the epoll set that
both share, and the parent's next request hangs. So inherited objects are never closed or collected,
and the lock is replaced, because another thread of the parent may have held it at the fork.

Over 500 lines: the loop's thread, the fork hooks and all code that needs both are in this module.
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
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from aioflux._concurrency.async_iteration import aclosing_inner
from aioflux._concurrency.fan_out import BufferedIterator
from aioflux._concurrency.fork_safe_lock import ForkSafeLock
from aioflux._concurrency.loop_threads import new_loop, run_until_stopped
from aioflux._transfer.session import copied, live_sessions, longest_cleanup_of_all
from aioflux.store import sessions_of

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from aioflux._transfer.session import Sessions
    from aioflux.store import Store

__all__ = [
    "BEFORE_FORK",
    "CallCanceller",
    "Feed",
    "ForkSafeLock",
    "OpenContext",
    "background_loop",
    "block_at_exit",
    "close_when_dropped",
    "entered",
    "feed",
    "flatten",
    "iterate",
    "limit_wait_for_workers",
    "run",
    "run_ahead",
    "shut_down_with_worker",
    "submit",
    "wait_for_result",
]

T = TypeVar("T")

_WORKER_SHUTDOWN_SECONDS = 10.0
"""Maximum time for the clean-up of a terminated DataLoader worker. If the worker is still alive one
second later, the main process kills it."""

_POLL_SECONDS = 0.5
"""Interval at which a waiting caller wakes up to handle signals that did not interrupt its wait."""

_FEED_SECONDS = 0.001
"""Time after which a feed produces no more items for one crossing. It always produces one."""

_BUILTIN_ITERABLES: tuple[type, ...] = (
    list,
    tuple,
    set,
    frozenset,
    dict,
    range,
    type({}.keys()),
    type({}.items()),
    str,
    bytes,
)
"""Iterables whose iteration runs no code of the caller, and text, which stores reject."""

BEFORE_FORK = "an object opened before a fork cannot be used after it; open it again"

_parked: list[Any] = []
"""Objects that a forked child has inherited, and must never close or collect."""
parked_in_children: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects that every forked child must never collect."""
calls_in_children: list[Callable[[], None]] = []
"""Functions that every forked child calls."""


class _Call(Generic[T]):
    """A coroutine on the loop, for whose result another thread waits.

    A `concurrent.futures.Future` has a lock that Python code acquires and releases. If Ctrl-C
    arrives there, the lock is kept, and the loop waits for it without end, or KeyboardInterrupt is
    replaced by RuntimeError.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.is_done = self.is_cancelled = False
        self.wakes: queue.SimpleQueue[None] | None = None
        """Another queue that is woken when the coroutine is done."""
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self._ready: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._result: T | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the coroutine; called on the loop."""
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._finish_task)

    def cancel(self) -> None:
        """Cancel the coroutine; called on the loop."""
        if self._task is not None:
            self._task.cancel()
        elif not self.is_done:  # Ctrl-C arrived before `start` was scheduled
            self._coroutine.close()
            self._finish(None, asyncio.CancelledError())

    def wait(self, timeout: float) -> bool:
        """Wait until the coroutine is done, and return whether it is."""
        if not self.is_done:
            with suppress(queue.Empty):
                self._ready.get(timeout=max(0.0, timeout))
                self._ready.put(None)  # for another thread that waits
        return self.is_done

    def result(self) -> T:
        """Return the result, or raise the error, and forget both."""
        result, self._result = self._result, None
        error, self._error = self._error, None
        if error is None:
            return result  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # or its traceback would refer to itself

    def _finish_task(self, task: asyncio.Task[T]) -> None:
        # asyncio runs Python code when a task is freed. The caller's thread must not free it,
        # because a Ctrl-C that arrives in that code is lost.
        self._task = None
        if task.cancelled():
            self._finish(None, asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._finish(None, error)
        else:
            self._finish(task.result(), None)

    def _finish(self, result: T | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self.is_cancelled = isinstance(error, asyncio.CancelledError)
        self.is_done = True
        _bridge.forget(self)
        self._ready.put(None)
        if self.wakes is not None:
            self.wakes.put(None)


class _LoopThread:
    """The bridge: the background thread of a process, its event loop, and the coroutines on it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled: set[_Call[Any]] = set()
        self._closing: set[_Call[Any]] = set()
        self._started: set[concurrent.futures.Future[Any]] = set()
        self.shuts_down_with_worker = False
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
                loop = new_loop()
                self._thread = threading.Thread(
                    target=run_until_stopped, args=(loop,), name="aioflux-loop", daemon=True
                )
                self._thread.start()
                self._loop = loop  # only now: Ctrl-C may interrupt the start of the thread
            return self._loop

    def stop(self) -> None:
        """Cancel all tasks, stop the loop and wait for its thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or not thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all_and_stop(loop), loop)
        thread.join(longest_cleanup_of_all().total_seconds)
        if not thread.is_alive():
            loop.close()

    def start_if_own(self, coroutine: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Start a coroutine if this is the loop's own thread; return whether it was started."""
        if self._loop is None or self._thread is not threading.current_thread():
            return False
        task = self._loop.create_task(coroutine())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def track_cancelled(self, call: _Call[Any]) -> None:
        """Remember a cancelled call, whose caller may stop waiting before it is done."""
        self._cancelled.add(call)
        if call.is_done:
            self.forget(call)

    def track_closing(self, call: _Call[Any]) -> None:
        """Remember a started call, for which the process waits before it ends."""
        self._closing.add(call)
        if call.is_done:
            self.forget(call)

    def forget(self, call: _Call[Any]) -> None:
        """Forget a call that is done."""
        self._cancelled.discard(call)
        self._closing.discard(call)

    def track_started(self, outcome: concurrent.futures.Future[Any]) -> None:
        """Remember a coroutine for which the process waits before it ends."""
        self._started.add(outcome)
        outcome.add_done_callback(self._started.discard)

    def wait_for_started(self) -> None:
        """Wait for all coroutines that `submit` has started, and for what is being closed."""
        concurrent.futures.wait(list(self._started))
        for call in [*self._closing]:
            while not call.wait(_POLL_SECONDS):
                pass

    def wait_for_cancelled(self) -> None:
        """Wait for cancelled coroutines, up to `CleanupTimeouts.interrupted_seconds`."""
        until = time.monotonic() + longest_cleanup_of_all().interrupted_seconds
        for call in [*self._cancelled]:
            call.wait(until - time.monotonic())

    def serves(self, sessions: Sessions) -> bool:
        """Return whether there is a session of a store on this loop."""
        return self._loop in sessions

    def inherited(self) -> tuple[Any, ...]:
        """Return the objects that a forked child must neither close nor collect."""
        return self._loop, self._thread, self._tasks


async def _cancel_all_and_stop(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop.stop()


async def _close_all(iterators: list[AsyncGenerator[Any, None]]) -> None:
    # `aclose` raises if another thread is iterating; the task of that thread is cancelled later.
    await asyncio.gather(*(iterator.aclose() for iterator in iterators), return_exceptions=True)


_bridge = _LoopThread()
_open_contexts: weakref.WeakSet[OpenContext[Any]] = weakref.WeakSet()
_iterating: weakref.WeakSet[AsyncGenerator[Any, None]] = weakref.WeakSet()
"""Open contexts and iterations of blocking callers; closed before the loop is stopped."""


def _current_bridge() -> _LoopThread:
    """Return the bridge of this process, even if Ctrl-C has interrupted the fork hook.

    After an interrupted fork hook, the child still has the bridge of its parent, without a thread.
    """
    if _bridge.pid != os.getpid():
        _after_fork_in_child()
    return _bridge


def shut_down() -> None:
    """Wait for running work, close all sessions and stop the loop, at the end of the process."""
    _current_bridge().wait_for_started()
    _bridge.is_exiting = True
    for context in copied(lambda: iter(_open_contexts)):
        context.abandon()
    if iterators := copied(lambda: iter(_iterating)):
        run(_close_all(iterators))
    _bridge.wait_for_cancelled()
    for sessions in live_sessions():
        _close_session(sessions)
    _bridge.wait_for_started()
    _bridge.is_closed = True
    _bridge.stop()


def _park(*inherited: object) -> None:
    """Keep objects from being closed or collected, even at the end of the process."""
    _parked.append(inherited)
    if sys.implementation.name == "cpython":
        # A reference that is never released. The list is cleared at the end of the process, and
        # aiohttp sessions and sockets would then close themselves.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _after_fork_in_child() -> None:
    global _bridge
    stores = live_sessions()
    # In this order, because Ctrl-C may arrive at any time: park, drop, replace the bridge.
    sessions_by_loop = [sessions.open_sessions() for sessions in stores]
    _park(_bridge, _bridge.inherited(), sessions_by_loop, [*parked_in_children])
    for sessions in stores:
        sessions.forget()
    _open_contexts.clear()
    _iterating.clear()
    _bridge = _LoopThread()
    for call in calls_in_children:
        call()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(shut_down)


def shut_down_with_worker() -> None:
    """Arrange that `shut_down` runs when this process, a DataLoader worker, ends or is terminated.

    A worker does not run `atexit` hooks. At the end of the main process, multiprocessing sends
    SIGTERM to workers that are alive (because of a traceback or `persistent_workers`), and waits
    for them without a limit. The handler of torch calls `_exit` at once; this handler cleans up
    for `_WORKER_SHUTDOWN_SECONDS` at most.
    """
    # Imported only now: exit hooks run in reverse order, and that of multiprocessing must run
    # before `shut_down`, which was registered when this module was imported.
    from multiprocessing.util import Finalize

    bridge = _current_bridge()
    if not bridge.shuts_down_with_worker:
        bridge.shuts_down_with_worker = True
        Finalize(None, shut_down, exitpriority=0)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _shut_down_and_exit)


def limit_wait_for_workers() -> None:
    """Limit the time for which this process waits for its DataLoader workers before it ends.

    A worker inside a C call does not run the signal handler of `shut_down_with_worker`, and
    multiprocessing would wait for it without a limit. Applies to all daemonic child processes.
    """
    from multiprocessing.util import Finalize

    bridge = _current_bridge()
    if not bridge.limits_workers:
        bridge.limits_workers = True
        Finalize(None, _terminate_workers, exitpriority=0)  # runs before the join of children


def _terminate_workers() -> None:
    from multiprocessing import active_children

    workers = [child for child in active_children() if child.daemon]
    for worker in workers:
        worker.terminate()
    kill_at = time.monotonic() + _WORKER_SHUTDOWN_SECONDS + 1.0
    for worker in workers:
        worker.join(max(0.0, kill_at - time.monotonic()))
        if worker.is_alive():
            worker.kill()


def _shut_down_and_exit(*_: object) -> None:
    # In a thread, because the interrupted main thread may hold the bridge's lock.
    thread = threading.Thread(target=shut_down, name="aioflux-shutdown")
    thread.start()
    thread.join(_WORKER_SHUTDOWN_SECONDS)
    os._exit(0)  # as torch's handler does: the main process raises for another status


def run(coroutine: Coroutine[Any, Any, T], *, feed: object = None) -> T:
    """Run a coroutine on the background loop and return its result.

    If the coroutine iterates a `Feed`, its items are produced in this thread meanwhile. Another
    `feed` is ignored.

    Ctrl-C, or another exception of a signal handler, cancels the coroutine. It is raised in the
    caller after the clean-up of the coroutine.

    Raises:
        RuntimeError: Called on the background loop's own thread.
    """
    loop: asyncio.AbstractEventLoop | None = None
    # From here on, Ctrl-C at any point closes or cancels the coroutine.
    try:
        if _current_bridge().is_exiting and threading.current_thread().daemon:
            coroutine.close()
            _block_forever()
        call = _Call(coroutine)
        loop = _bridge.loop()
        loop.call_soon_threadsafe(call.start)
        canceller: CallCanceller | None = getattr(_of_thread, "canceller", None)
        if canceller is not None:
            canceller.start_call(call, partial(loop.call_soon_threadsafe, call.cancel))
        if isinstance(feed, Feed):
            feed.serve(call)
        # A signal that arrives just before the thread blocks does not interrupt the wait, and
        # CPython runs its handler only when the thread wakes up.
        while not call.wait(_POLL_SECONDS):
            pass
        return call.result()
    except BaseException:
        if loop is None:
            coroutine.close()
        elif not call.is_done:
            loop.call_soon_threadsafe(call.cancel)
            _bridge.track_cancelled(call)  # another Ctrl-C may interrupt the wait below
            call.wait(longest_cleanup_of_all().total_seconds)
        if _bridge.is_exiting and threading.current_thread().daemon:
            _block_forever()
        raise


_of_thread = threading.local()
"""`canceller`: the canceller of the calls of a thread."""


class CallCanceller:
    """Cancels the blocking calls of one thread from another thread.

        with canceller: ...  # in the thread that makes the calls
        canceller.cancel()  # in another thread, once

    `cancel` cancels the call in progress, or otherwise the next call. The call raises
    CancelledError after its clean-up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: tuple[_Call[Any], Callable[[], object]] | None = None
        self._is_pending = False

    def __enter__(self) -> None:
        _of_thread.canceller = self

    def __exit__(self, *_: object) -> None:
        _of_thread.canceller = None

    def start_call(self, call: _Call[Any], cancel: Callable[[], object]) -> None:
        """Register a call of this thread, until it is done."""
        with self._lock:
            is_pending, self._is_pending = self._is_pending, False
            if is_pending and self._call is not None and self._call[0].is_done:
                # The cancel may have been too late for the previous call.
                is_pending = not self._call[0].is_cancelled
            self._call = call, cancel
        if is_pending:
            cancel()

    def cancel(self) -> None:
        """Cancel the call in progress, or otherwise the next call."""
        with self._lock:
            self._is_pending, call = True, self._call
            if call is None or call[0].is_done:
                self._call = None
                return
        call[1]()


class _End:
    """The end of an iteration in another thread, with its error."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def run_ahead(
    items: Generator[T, None, None], *, max_ahead: int, stop: Callable[[], None]
) -> Generator[T, None, None]:
    """Yield the items of a generator that runs in a thread, up to `max_ahead` items ahead.

    If the iteration ends early, the blocking call of the thread is cancelled, and the thread closes
    the generator and ends.

    Args:
        items: The generator; it is closed in its thread.
        max_ahead: Largest number of items that wait for the caller.
        stop: Called when the iteration ends, before the wait for the thread.
    """
    ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
    slots: queue.SimpleQueue[None] = queue.SimpleQueue()
    canceller, pid, is_stopped = CallCanceller(), os.getpid(), False
    # Local names: at the end of the interpreter, the names of modules are None.
    getpid, is_finalizing = os.getpid, sys.is_finalizing

    def produce() -> None:
        error = None
        try:
            with closing(items), canceller:  # `close` is not cancelled
                for item in items:
                    ready.put(item)
                    slots.get()
                    if is_stopped:
                        return
        except BaseException as exc:  # raised in the caller's thread
            error = exc
        finally:
            ready.put(_End(error))

    for _ in range(max_ahead - 1):
        slots.put(None)
    # A daemon, because an iteration that is never finished must not keep the process alive.
    thread = threading.Thread(target=produce, name="aioflux-batches", daemon=True)
    try:
        thread.start()
        while True:
            try:
                item = ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(item, _End):
                break
            slots.put(None)
            yield item
            del item
            if os.getpid() != pid:
                raise RuntimeError(BEFORE_FORK)
        if item.error is not None:
            raise item.error
    finally:
        # A forked child does not have the thread, and at the end of the interpreter it is frozen.
        if getpid() == pid and not is_finalizing():
            is_stopped = True
            stop()
            canceller.cancel()
            slots.put(None)
            if thread.is_alive():
                thread.join()


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the background loop, started on first use, for libraries that need an event loop.

    Raises:
        RuntimeError: Called on the background loop's own thread.
    """
    return _current_bridge().loop()


def submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the background loop, and return its future without waiting.

    The process waits for the coroutine before it ends. `cancel` of the future cancels the
    coroutine, which can still clean up. After a fork only the parent continues the coroutine.

    Raises:
        RuntimeError: Called on the background loop's own thread.
    """
    try:
        loop = _current_bridge().loop()
    except BaseException:
        coroutine.close()
        raise
    outcome = asyncio.run_coroutine_threadsafe(coroutine, loop)
    _bridge.track_started(outcome)
    return outcome


def _block_forever() -> NoReturn:
    """Block a daemon thread until the exiting interpreter kills it.

    Its stores are closed already. An error would only print a traceback during the exit.
    """
    while True:
        threading.Event().wait()


def block_at_exit() -> None:
    """Block a daemon thread, in which an executor has rejected a call, if the interpreter exits.

    Executors reject calls when the main thread ends, exit hooks run when other threads have, too.
    """
    deadline = time.monotonic() + 5.0
    while threading.current_thread().daemon and time.monotonic() < deadline:
        if _bridge.is_exiting:
            _block_forever()
        time.sleep(0.01)


def wait_for_result(future: concurrent.futures.Future[T]) -> T:
    """Wait for a future of an executor, and wake up every `_POLL_SECONDS` to run signal handlers.

    `future.result` may replace the KeyboardInterrupt that interrupts it by a RuntimeError.
    """
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    future.add_done_callback(done.put)
    while True:
        try:
            done.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue
        return future.result()


async def _step(iterator: AsyncIterator[T]) -> tuple[bool, T | None]:
    """Return True and the next item, or False and None at the end."""
    try:
        return True, await anext(iterator)
    except StopAsyncIteration:
        return False, None


class Feed(BufferedIterator[T]):
    """A blocking caller's iterable, as an asynchronous iterator on the background loop.

    Items are produced in the caller's thread, while it waits in `run`. So the iterable may be a
    generator that blocks, uses other blocking stores, or must not run in another thread. One
    crossing passes the items that are produced within a millisecond; a waiting loop gets the first
    of them at once. Up to `max_ahead` items are buffered; more are requested when half are used.
    """

    def __init__(self, items: Iterable[T], *, max_ahead: int) -> None:
        self._items = iter(items)
        self._max_ahead = max_ahead
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ready: deque[T] = deque()
        self._requested_by: asyncio.AbstractEventLoop | None = None
        self._is_requested = False
        self._free_bytes = 0  # of `intake`, at the last request
        self._is_full = False
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
            if not self._ready:  # an item that was produced before does not wake this waiter
                await self._waiter
        return self.next_ready()

    def has_ready(self) -> bool:
        """See base class."""
        if 2 * len(self._ready) <= self._max_ahead and not self._is_full:
            self._request()
        return bool(self._ready)

    def next_ready(self) -> T:
        """See base class."""
        item = self._ready.popleft()
        return item if self.intake is None else self.intake.hold(item)

    def _request(self) -> None:
        """Wake the caller's thread to produce items, unless it is awake or has no more items."""
        if not (self._is_requested or self._is_exhausted or self._failure):
            self._is_requested = True
            if self.intake is not None:
                # Here, because only this thread acquires and releases bytes of the budget.
                num_buffered = sum(map(self.intake.size_of, tuple(self._ready)))
                self._free_bytes = self.intake.budget.free_bytes - num_buffered
            self._requested_by = asyncio.get_running_loop()
            self._wakeups.put(None)

    def serve(self, call: _Call[Any]) -> None:
        """Produce items in this thread on request, until `call` is done."""
        call.wakes = self._wakeups
        while not call.is_done:
            with suppress(queue.Empty):
                self._wakeups.get(timeout=_POLL_SECONDS)
            loop = self._requested_by
            if loop is not None:
                self._requested_by = None
                self._produce(loop)

    def _produce(self, loop: asyncio.AbstractEventLoop) -> None:
        is_exhausted, failure, self._is_full = False, None, False
        intake, free_bytes = self.intake, self._free_bytes
        woken: asyncio.Future[None] | None = None
        until = time.monotonic() + _FEED_SECONDS
        try:
            for _ in range(self._max_ahead - len(self._ready)):
                item = next(self._items)
                if intake is not None:
                    item = intake.parse(item)
                    free_bytes -= intake.size_of(item)
                    self._is_full = free_bytes <= 0
                self._ready.append(item)
                del item  # the next item may take long
                if self._is_full or time.monotonic() >= until:
                    break
                # The iterable may wait until this item is processed before it returns the next.
                waiter = self._waiter
                if waiter is not None and waiter is not woken and not waiter.done():
                    loop.call_soon_threadsafe(self._wake)
                    woken = waiter
        except StopIteration:
            is_exhausted = True
        except Exception as exc:  # from the caller's iterable; `__anext__` raises it
            failure = exc

        def accept() -> None:
            self._is_exhausted, self._failure = is_exhausted, failure
            self._is_requested = False
            self._wake()

        loop.call_soon_threadsafe(accept)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def feed(items: Iterable[T], *, max_ahead: int) -> Iterable[T] | Feed[T]:
    """Return a feed if the iteration runs code of the caller, else the iterable itself."""
    return items if type(items) in _BUILTIN_ITERABLES else Feed(items, max_ahead=max_ahead)


def iterate(iterator: AsyncGenerator[T, None], *, feed: object = None) -> Iterator[T]:
    """Iterate over an asynchronous generator in a blocking caller.

    Each item costs a crossing, so an item should be a page or a batch. If the generator iterates a
    `feed`, the items of the feed are produced in this thread.

    If the iteration is left early, the generator is closed and its pending requests are cancelled.
    """
    # A local name: at the end of the interpreter, the names of modules are None.
    pid, is_finalizing = os.getpid(), sys.is_finalizing
    _iterating.add(iterator)
    # With `aclosing_inner` the event loop does not register `iterator`, so that only the `finally`
    # below closes it. Otherwise the loop would close it, too, if this generator and `iterator` are
    # collected at once, in a reference cycle such as that of an exception and its frame.
    items = aclosing_inner(iterator)
    try:
        while True:
            has_item, item = run(_step(items), feed=feed)
            if not has_item:
                return
            yield item  # type: ignore[misc]  # not None if there is one
            del item
            if os.getpid() != pid:
                raise RuntimeError(BEFORE_FORK)
    finally:
        if not is_finalizing():  # `shut_down` has closed it
            _iterating.discard(iterator)
            _close_dropped(iterator, iterator.aclose, pid)


def flatten(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of batches. A forked child gets no more items, but a RuntimeError."""
    bridge = _current_bridge()
    for batch in batches:
        for item in batch:
            yield item
            if bridge is not _bridge:  # 4 ns; `os.getpid` takes 200 ns
                raise RuntimeError(BEFORE_FORK)
        batch = item = None  # release the memory before the next batch arrives


def _close_dropped(target: Any, close: Callable[[], Coroutine[Any, Any, Any]], pid: int) -> None:
    """Close an object that is no longer used, from any thread. A forked child parks it instead."""
    if os.getpid() != pid:
        _park(target)
    elif _bridge.is_closed:
        return  # closed with the loop
    elif not _bridge.start_if_own(close):
        loop = _current_bridge().loop()
        call = _Call(close())
        loop.call_soon_threadsafe(call.start)
        _bridge.track_closing(call)  # after the start: Ctrl-C in between leaves nothing to wait for
        # Wait with a limit: the garbage collector may run in a thread that holds a lock that the
        # loop needs, such as the lock of a future. The process waits for `close` before it ends.
        times = longest_cleanup_of_all()
        if call.wait(max(times.interrupted_seconds, times.composite_wait_seconds)):
            call.result()


def close_when_dropped(store: Store) -> Store:
    """Arrange that a store's connections are closed when it is collected; return the store."""
    # Without `atexit`: `shut_down` closes the stores that still exist, before it stops the loop.
    weakref.finalize(store, _close_session, sessions_of(store)).atexit = False
    return store


def _close_session(sessions: Sessions) -> None:
    # Do not wait: the garbage collector may run in a thread that holds a lock that the loop needs,
    # such as the lock of a future.
    bridge = _current_bridge()
    close = sessions.close_current
    if bridge.serves(sessions) and not (bridge.is_closed or bridge.start_if_own(close)):
        submit(close())


@contextmanager
def entered(manager: AbstractAsyncContextManager[T]) -> Iterator[OpenContext[T]]:
    """Use an asynchronous context manager in a `with` statement of a blocking caller."""
    context = OpenContext(manager)
    try:
        yield context
    except GeneratorExit:
        context.abandon()
        raise
    except BaseException as exc:
        if not context.exit(exc):
            raise
    else:
        context.exit()


class OpenContext(Generic[T]):
    """An asynchronous context manager that a blocking object, such as a file, keeps open.

    If it is dropped without `exit`, by the garbage collector or at the end of the process, the
    manager exits with an error: an upload is aborted, and its object is not published. A forked
    child drops it without an exit.
    """

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._pid = os.getpid()
        self._manager: AbstractAsyncContextManager[T] | None = None
        self._value = run(manager.__aenter__())
        self._manager = manager
        _open_contexts.add(self)

    @property
    def value(self) -> T:
        """The value that the manager has returned on entry.

        Raises:
            RuntimeError: This process is a forked child of the process that opened the context.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(BEFORE_FORK)
        return self._value

    def exit(self, error: BaseException | None = None) -> bool:
        """Exit the manager, with `error` if it is given. A second call has no effect.

        Returns:
            Whether the manager has suppressed the error.

        Raises:
            RuntimeError: This process is a forked child, and `error` is None.
        """
        if os.getpid() != self._pid and error is not None:
            self.abandon()
            return False
        _ = self.value
        manager, self._manager = self._manager, None
        # The weak reference is dropped now, because a Ctrl-C in its callback would be lost.
        _open_contexts.discard(self)
        if manager is None:
            return False
        kind, trace = (type(error), error.__traceback__) if error is not None else (None, None)
        return bool(run(manager.__aexit__(kind, error, trace)))

    def abandon(self) -> None:
        """Exit the manager with an error, from any thread; a forked child only drops it."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        error = RuntimeError("dropped without being closed")
        _close_dropped((manager, self._value), lambda: _exit(manager, error), self._pid)

    __del__ = abandon


async def _exit(manager: AbstractAsyncContextManager[Any], error: Exception) -> None:
    await manager.__aexit__(type(error), error, None)

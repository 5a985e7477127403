"""Crossing from blocking callers to the background loop, within one process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import inspect
import queue
import subprocess
import sys
import threading
import time
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import _bridge, sync
from aioflux._concurrency.fan_out import bounded_map

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import FrameType


async def thread_name() -> str:
    return threading.current_thread().name


@pytest.fixture
def store() -> Iterator[sync.Store]:
    with sync.open_store(f"memory://bridge-{uuid.uuid4().hex}") as opened:
        yield opened


def test_work_is_done_on_one_background_thread() -> None:
    assert _bridge.run(thread_name()) == "aioflux-loop"
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(lambda _: _bridge.run(thread_name()), range(50)))
    assert set(names) == {"aioflux-loop"}
    running = [each for each in threading.enumerate() if each.name == "aioflux-loop"]
    assert len(running) == 1
    assert running[0].daemon


async def test_a_thread_with_a_running_loop_is_served() -> None:
    assert _bridge.run(thread_name()) == "aioflux-loop"


def test_the_loops_own_thread_is_refused(store: sync.Store) -> None:
    async def wait_for_itself() -> None:
        store.head("a")

    with pytest.raises(RuntimeError, match="await the same method"):
        _bridge.run(wait_for_itself())


def test_errors_keep_their_type_and_fields(store: sync.Store) -> None:
    with pytest.raises(aioflux.NotFoundError) as raised:
        store.get("missing")
    assert raised.value.uri.endswith("/missing")
    assert raised.value.__traceback__ is not None


def test_work_that_is_cancelled_from_within_does_not_hang_the_caller() -> None:
    async def cancel_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        _bridge.run(cancel_itself())


def test_many_threads_share_one_store(store: sync.Store) -> None:
    for at in range(20):
        store.put(f"{at}", bytes([at]))
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda at: store.get(f"{at % 20}"), range(200)))
    assert got == [bytes([at % 20]) for at in range(200)]


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_an_exit_in_a_task_is_its_callers_alone(ending: type[BaseException]) -> None:
    begun, goes_on = threading.Event(), asyncio.Event()

    async def other() -> str:
        begun.set()
        await goes_on.wait()
        return "done"

    async def leave() -> None:
        asyncio.get_running_loop().call_soon(goes_on.set)  # in line when the loop is left
        raise ending

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(_bridge.run, other())
        assert begun.wait(60)
        with pytest.raises(ending):
            _bridge.run(leave())
        assert waiting.result(60) == "done"
    assert _bridge.run(thread_name()) == "aioflux-loop"


@pytest.mark.parametrize("ordered", [True, False])
def test_an_exit_among_many_ends_the_iteration(ordered: bool) -> None:
    async def work(item: int) -> int:
        if item == 2:
            sys.exit(3)
        return item

    results = bounded_map(work, range(100), max_in_flight=4, ordered=ordered)
    with pytest.raises(SystemExit):
        list(_bridge.iterate(results))


async def soon() -> int:
    await asyncio.sleep(0)
    return 1


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Make a call that Ctrl-C hits at event `at` of the crossing; return whether it had one."""
    locking = {threading.__file__, concurrent.futures._base.__file__}
    watched = {"run", "serve", "wait", "result"}
    seen = 0

    def trace(frame: FrameType, _: str, __: object) -> Callable[..., Any] | None:
        nonlocal seen
        code = frame.f_code
        is_watched = code.co_filename == _bridge.__file__ and code.co_name in watched
        if not (is_watched or code.co_filename in locking):
            return None
        seen += 1
        if seen == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen >= at


@pytest.mark.parametrize("feed", [None, lambda: _bridge.Feed([1], max_ahead=1)])
def test_ctrl_c_at_any_line_of_a_call(feed: Callable[[], _bridge.Feed[int]] | None) -> None:
    """Even before the work is in line, it is over at once and nothing is left unawaited."""
    assert _bridge.run(soon()) == 1
    unawaited = []
    hit, at = True, 0
    while hit:
        at += 1
        work = soon()
        begun = time.monotonic()
        try:
            hit = interrupted(partial(_bridge.run, work, feed=feed() if feed else None), at)
        except KeyboardInterrupt:
            hit = True
        assert time.monotonic() - begun < 60, at
        if inspect.getcoroutinestate(work) != inspect.CORO_CLOSED:
            unawaited.append(at)
            work.close()
    # The first lines only define; the interpreter looks at no signal there.
    assert unawaited == list(range(1, len(unawaited) + 1))
    assert len(unawaited) < 10 < at
    assert _bridge.run(soon()) == 1


def test_the_loop_frees_the_tasks_of_calls() -> None:
    # The caller's thread would run Python code of asyncio for it, in which Ctrl-C is lost.
    freed_by = []

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        weakref.finalize(task, lambda: freed_by.append(threading.current_thread().name))

    for _ in range(50):
        _bridge.run(work())
    _bridge.run(soon())
    assert set(freed_by) == {"aioflux-loop"}


def test_the_memory_of_a_failed_call_is_freed() -> None:
    class Memory:
        pass

    kept: list[weakref.ref[Memory]] = []

    async def fail() -> None:
        memory = Memory()
        kept.append(weakref.ref(memory))
        raise LookupError

    gc.disable()
    try:
        with suppress(LookupError):
            _bridge.run(fail())
        assert kept[0]() is None
    finally:
        gc.enable()


def test_every_error_of_an_executor_is_raised() -> None:
    def fail() -> None:
        raise queue.Empty

    with ThreadPoolExecutor(1) as threads, pytest.raises(queue.Empty):
        _bridge.wait_for_result(threads.submit(fail))


class Steps:
    """An asynchronous iterator that notes how it ends."""

    def __init__(self) -> None:
        self.closed = False

    async def run(self) -> AsyncIterator[int]:
        try:
            for step in range(5):
                yield step
        finally:
            await asyncio.sleep(0)
            self.closed = True


@pytest.mark.parametrize("is_in_progress", [True, False], ids=["in progress", "next"])
def test_another_thread_cancels_one_call(is_in_progress: bool) -> None:
    canceller, cleaned, started = _bridge.CallCanceller(), threading.Event(), threading.Event()

    async def wait() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    def call() -> str:
        with canceller:
            with pytest.raises(asyncio.CancelledError):
                _bridge.run(wait())
            assert cleaned.is_set() == started.is_set()
            return _bridge.run(thread_name())

    with ThreadPoolExecutor(1) as threads:
        if not is_in_progress:
            canceller.cancel()
        result = threads.submit(call)
        if is_in_progress:
            assert started.wait(60)
            canceller.cancel()
        assert result.result() == "aioflux-loop", "only one call is cancelled"


def test_a_cancel_at_the_end_of_a_call_cancels_the_next_call() -> None:
    canceller, started, ends = _bridge.CallCanceller(), threading.Event(), threading.Event()

    async def end() -> str:
        started.set()
        # Blocks the loop, so that the cancel is scheduled before the end and runs after it.
        ends.wait(60)
        return "ended"

    def call() -> None:
        with canceller:
            assert _bridge.run(end()) == "ended"
            with pytest.raises(asyncio.CancelledError):
                _bridge.run(asyncio.sleep(3600))
            assert _bridge.run(thread_name()) == "aioflux-loop", "only one call is cancelled"

    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(call)
        assert started.wait(60)
        canceller.cancel()
        ends.set()
        result.result()


def test_leaving_an_iteration_early_closes_it() -> None:
    steps = Steps()
    for step in _bridge.iterate(steps.run()):
        if step == 2:
            break
    assert steps.closed


def test_an_iteration_that_ends_is_closed() -> None:
    steps = Steps()
    assert list(_bridge.iterate(steps.run())) == [0, 1, 2, 3, 4]
    assert steps.closed


def test_an_exception_in_the_body_is_seen_by_the_manager() -> None:
    seen: list[BaseException] = []

    @asynccontextmanager
    async def manager() -> AsyncIterator[str]:
        try:
            yield "opened"
        except ZeroDivisionError as exc:
            seen.append(exc)
            raise

    with pytest.raises(ZeroDivisionError), _bridge.entered(manager()):
        raise ZeroDivisionError
    assert len(seen) == 1


def test_a_manager_may_swallow_the_exception() -> None:
    @asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        with suppress(ZeroDivisionError):
            yield
        left.append("after the exception")

    left: list[str] = []
    with _bridge.entered(manager()):
        raise ZeroDivisionError
    assert left == ["after the exception"]


def test_generators_run_in_the_callers_thread(store: sync.Store) -> None:
    threads: set[str] = set()
    local = contextvars.ContextVar[int]("local")
    local.set(7)

    def pairs() -> Iterator[tuple[str, bytes]]:
        for at in range(500):
            threads.add(threading.current_thread().name)
            assert local.get() == 7
            yield f"{at:03}", bytes([at % 251])

    assert len(store.put_many(pairs())) == 500
    assert threads == {threading.current_thread().name}


def test_generators_may_use_stores_themselves(store: sync.Store) -> None:
    for at in range(300):
        store.put(f"src/{at:03}", bytes([at % 251]))
    copied = store.put_many(
        (key.replace("src", "dst"), data) for key, data in store.get_many(store.list("src/"))
    )
    assert len(copied) == 300
    assert store.get("dst/299") == bytes([299 % 251])
    batches = store.fetch_batches(meta for meta in store.list("dst/"))
    assert sum(map(len, batches)) == 300
    result = store.delete_many(meta.key for meta in store.list("src/"))
    assert len(result.deleted) == 300


def test_a_failing_generator_fails_the_call_with_its_own_error(store: sync.Store) -> None:
    store.put("a", b"1")

    def keys() -> Iterator[str]:
        yield "a"
        raise LookupError("mine")

    pairs = store.get_many(keys())
    assert next(pairs) == ("a", b"1")
    with pytest.raises(LookupError, match="mine"):
        next(pairs)


def test_a_generator_may_be_as_quick_as_it_likes(store: sync.Store) -> None:
    """The caller's thread answers before the loop has begun to wait; switching often shows it."""
    store.put("a", b"1")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        # One key for each crossing: a thousand chances to answer too early.
        pairs = store.get_many(key for key in ["a"] * 20_000)
        assert sum(len(data) for _, data in pairs) == 20_000
    finally:
        sys.setswitchinterval(before)


def test_asynchronous_iterables_feed_the_asynchronous_face() -> None:
    async def copy() -> int:
        async with aioflux.open_store(f"memory://bridge-{uuid.uuid4().hex}") as store:
            for at in range(50):
                await store.put(f"a/{at}", b"x")
            pairs = store.get_many(store.list("a/"))
            moved = store.put_many((f"b{key}", data) async for key, data in pairs)
            return len(await moved)

    assert asyncio.run(copy()) == 50


def test_one_store_serves_two_loops(server: object) -> None:
    store = aioflux.open_store("gs://bucket/p", endpoint_url=server.url)  # type: ignore[attr-defined]

    async def use(number: int) -> bytes:
        await store.put(f"{number}", bytes([number]) * 100)
        return await store.get(f"{number}")

    async def use_and_close(number: int) -> bytes:
        try:
            return await use(number)
        finally:
            await store.aclose()

    with sync.Store(store) as blocking:
        blocking.put("0", b"0")
        assert asyncio.run(use_and_close(1)) == b"\x01" * 100
    with pytest.raises(ValueError, match="closed"):
        asyncio.run(use(2))


def test_a_closed_store_says_so(store: sync.Store) -> None:
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.get("a")
    with pytest.raises(ValueError, match="closed"):
        list(store.list())


@pytest.mark.usefixtures("quick_collection")
def test_an_iteration_in_a_cycle_is_closed_once(
    store: sync.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a loop that raises what it was given: the error's frame holds both."""
    keys = ["a", "missing", *["a"] * 100]
    store.put("a", b"1")

    def fail() -> None:
        batches = store.try_fetch_batches(keys)
        for batch in batches:
            for _, data in batch:
                if not isinstance(data, bytes):
                    raise data

    for _ in range(20):
        with pytest.raises(aioflux.NotFoundError):
            fail()
    gc.collect()
    store.head("a")  # after all that the loop was given
    assert [record.getMessage() for record in caplog.records] == []


def test_a_dropped_iteration_waits_for_a_limited_time() -> None:
    """The collector may drop one while this thread holds a lock that the loop needs.

    In a process of its own, because the limit is the longest of all stores that are not closed.
    """
    script = """
import threading
from aioflux import _bridge, sync
from aioflux.options import CleanupTimeouts, Timeouts

cleanup = CleanupTimeouts(interrupted_seconds=0.1, composite_wait_seconds=0.1)
with sync.open_store("memory://dropped", timeouts=Timeouts(cleanup=cleanup)) as store:
    for key in "abc":
        store.put(key, b"1")
    pages = store.list_pages(page_size=1)
    next(pages)
    needed = threading.Lock()
    with needed:
        _bridge.background_loop().call_soon_threadsafe(needed.acquire)
        del pages
    assert store.get("a") == b"1"
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=250, check=False)
    assert ended.returncode == 0


# --- work that is begun and not waited for --------------------------------------------------


def test_begun_work_goes_on_while_the_caller_does() -> None:
    async def work() -> int:
        return await asyncio.wait_for(gate.wait(), 60) and 7

    async def make() -> asyncio.Event:
        return asyncio.Event()

    gate = _bridge.run(make())
    outcome = _bridge.submit(work())
    assert not outcome.done()

    async def open_gate() -> None:
        gate.set()

    _bridge.run(open_gate())
    assert outcome.result(60) == 7


def test_an_error_of_begun_work_is_its_outcome() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _bridge.submit(work()).result(60)


def test_begun_work_that_is_cancelled_cleans_up() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.append(True)

    outcome = _bridge.submit(work())
    _bridge.run(asyncio.sleep(0))
    outcome.cancel()
    until = time.monotonic() + 60
    while not cleaned:
        assert time.monotonic() < until
        _bridge.run(asyncio.sleep(0.01))


def test_nothing_begins_on_the_loops_own_thread() -> None:
    async def nested() -> None:
        _bridge.submit(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="own event loop"):
        _bridge.run(nested())


def test_the_end_of_the_process_waits_for_begun_work() -> None:
    script = """
import asyncio
from aioflux import _bridge

async def work():
    await asyncio.sleep(0.1)
    print("done")

_bridge.submit(work())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True
    )
    assert ended.stdout == "done\n"

"""Deadlines of many calls with one timer: who is ended, when, and what that is taken for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import RetryPolicy, TransientError
from aioflux._transfer.admission import Deadlines
from tests.transfer.clock import loop_time
from tests.transfer.scripted_service import ScriptedService

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.transfer.clock import Clock

pytestmark = pytest.mark.usefixtures("clock")

SECONDS = 2.0**-4  # see `Clock`
SOON = 5.0
"""Time in which everything here ends."""


def now() -> float:
    return asyncio.get_running_loop().time()


class Call:
    """A call that waits without end, as `Session.call` makes one."""

    def __init__(self, deadlines: Deadlines, *, started_at: float | None = None) -> None:
        self.is_expired: bool | None = None
        self.ended = 0.0
        self.started_at = now() if started_at is None else started_at
        self._deadlines = deadlines
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self._deadlines.add(self.task, self.started_at)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_expired = self._deadlines.pop_expired(self.task)
            if not self.is_expired:
                raise
        finally:
            self._deadlines.remove(self.task)
            self.ended = now()


class Watched:
    """A runner whose requests never end by themselves."""

    def __init__(self, deadlines: Deadlines, *, num_requests: int = 1) -> None:
        self.started_at = now()
        self.expired_after: list[float] = []
        self.all_expired = asyncio.Event()
        self._deadlines = deadlines
        self._num_left = num_requests
        deadlines.add_sequence(self)

    def expire(self) -> None:
        started_at, self.started_at = self.started_at, now()
        self.expired_after.append(self.started_at - started_at)
        self._num_left -= 1
        if not self._num_left:
            self._deadlines.remove_sequence(self)
            self.all_expired.set()


def catching_timers(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    """Keep the timers that deadlines make on the running loop from here on."""
    loop = asyncio.get_running_loop()
    made: list[asyncio.TimerHandle] = []
    call_later: Callable[..., asyncio.TimerHandle] = loop.call_later

    def keeping(seconds: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        timer = call_later(seconds, callback, *arguments)
        if isinstance(getattr(callback, "__self__", None), Deadlines):
            made.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", keeping)
    return made


async def test_a_late_task_is_ended_once_with_an_error() -> None:
    deadlines = Deadlines(SECONDS, clock=loop_time)
    call = Call(deadlines)
    async with asyncio.timeout(SOON):
        await call.task
    assert call.is_expired
    assert call.ended - call.started_at >= SECONDS
    assert not deadlines.pop_expired(call.task)
    assert call.task.cancelling() == 0


async def test_each_has_its_own_time() -> None:
    """Those that began earlier end earlier, and none early."""
    deadlines = Deadlines(2 * SECONDS, clock=loop_time)
    calls = []
    for _ in range(5):
        calls += [Call(deadlines) for _ in range(20)]
        await asyncio.sleep(SECONDS / 4)
    async with asyncio.timeout(SOON):
        await asyncio.gather(*(call.task for call in calls))
    assert all(call.is_expired and call.ended - call.started_at >= 2 * SECONDS for call in calls)
    assert [call.ended for call in calls] == sorted(call.ended for call in calls)
    assert calls[0].ended < calls[-1].started_at + 2 * SECONDS


async def test_who_has_left_is_left_alone() -> None:
    deadlines = Deadlines(SECONDS, clock=loop_time)
    task = asyncio.current_task()
    assert task is not None
    for _ in range(3):
        deadlines.add(task, now())
        await asyncio.sleep(0)
        deadlines.remove(task)
    await asyncio.sleep(3 * SECONDS)
    assert task.cancelling() == 0


async def test_thousands_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = Deadlines(60, clock=loop_time)
    made = catching_timers(monkeypatch)
    calls = [Call(deadlines) for _ in range(1000)]
    watched = [Watched(deadlines) for _ in range(1000)]
    await asyncio.sleep(0)
    assert len(made) == 1
    for call in calls:
        call.task.cancel()
    for runner in watched:
        deadlines.remove_sequence(runner)
    ends = await asyncio.gather(*(call.task for call in calls), return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert not any(call.is_expired for call in calls)
    deadlines.close()
    assert made[0].cancelled()


async def test_the_timer_ends_with_those_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = Deadlines(SECONDS, clock=loop_time)
    made = catching_timers(monkeypatch)
    runner = Watched(deadlines)
    deadlines.remove_sequence(runner)
    await asyncio.sleep(3 * SECONDS)
    assert len(made) == 1
    assert not runner.expired_after
    late = Watched(deadlines)
    async with asyncio.timeout(SOON):
        await late.all_expired.wait()


async def test_a_runner_is_watched_request_by_request() -> None:
    deadlines = Deadlines(SECONDS, clock=loop_time)
    runners = [Watched(deadlines, num_requests=3) for _ in range(3)]
    async with asyncio.timeout(SOON):
        for runner in runners:
            await runner.all_expired.wait()
    assert all(len(runner.expired_after) == 3 for runner in runners)
    assert all(seconds >= SECONDS for runner in runners for seconds in runner.expired_after)


async def test_tasks_and_runners_are_watched_together() -> None:
    """Whichever of them is due first, the timer comes for it."""
    deadlines = Deadlines(3 * SECONDS, clock=loop_time)
    first = Watched(deadlines)
    await asyncio.sleep(SECONDS)
    call = Call(deadlines)
    await asyncio.sleep(SECONDS)
    last = Watched(deadlines)
    async with asyncio.timeout(SOON):
        await first.all_expired.wait()
        assert not call.task.done()
        await call.task
        assert not last.expired_after
        await last.all_expired.wait()
    assert call.is_expired


async def test_a_closed_timer_ends_no_task() -> None:
    deadlines = Deadlines(SECONDS, clock=loop_time)
    runner = Watched(deadlines)
    deadlines.close()
    deadlines.close()
    await asyncio.sleep(3 * SECONDS)
    assert not runner.expired_after


# --- cancellation by somebody else ---------------------------------------------------------


async def test_cancellation_before_the_deadline_of_the_same_turn_is_cancellation(
    clock: Clock,
) -> None:
    deadlines, loop = Deadlines(SECONDS, clock=loop_time), asyncio.get_running_loop()
    call = Call(deadlines)
    await asyncio.sleep(0)

    def be_late() -> None:
        # What is called soon comes before the timers that are due in the next turn.
        clock.now += 2 * SECONDS
        loop.call_soon(call.task.cancel)

    loop.call_soon(be_late)
    with pytest.raises(asyncio.CancelledError):
        await call.task
    assert call.is_expired is False
    assert call.task.cancelling() == 1


async def test_cancellation_after_the_deadline_of_the_same_turn_is_cancellation() -> None:
    deadlines = Deadlines(SECONDS, clock=loop_time)
    call = Call(deadlines)

    class Canceller(Watched):
        """Called before the tasks are: the timer comes for both."""

        def expire(self) -> None:
            asyncio.get_running_loop().call_soon(call.task.cancel)
            super().expire()

    Canceller(deadlines).started_at = call.started_at
    with pytest.raises(asyncio.CancelledError):
        await call.task
    assert call.is_expired is False
    assert call.task.cancelling() == 1


async def test_a_deadline_that_passes_in_a_cancelled_clean_up_leaves_it_cancelled() -> None:
    deadlines = Deadlines(SECONDS, clock=loop_time)
    reached = asyncio.Event()

    async def run() -> bool:
        task = asyncio.current_task()
        assert task is not None
        deadlines.add(task, now())
        try:
            try:
                await asyncio.Event().wait()
            finally:
                reached.set()
                await asyncio.sleep(SOON)  # ended by the deadline
        except asyncio.CancelledError:
            if deadlines.pop_expired(task):
                return True
            raise
        finally:
            deadlines.remove(task)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(SOON / 2) as limit:
        await reached.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not limit.expired()


async def test_one_who_was_cancelled_before_has_a_deadline_too() -> None:
    """Such as the clean-up of a task that was cancelled: requests of it end in time."""
    deadlines = Deadlines(SECONDS, clock=loop_time)
    calls: list[Call] = []

    async def clean_up() -> bool | None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            deadlines.add(task, now())
            try:
                await asyncio.sleep(SOON)
            except asyncio.CancelledError:
                return deadlines.pop_expired(task)
            finally:
                deadlines.remove(task)
        return None

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    assert await task is True
    assert not calls


async def test_the_error_of_a_late_attempt_names_the_object() -> None:
    scripted = ScriptedService("late")
    store = scripted.new_store(retry=RetryPolicy(deadline_seconds=SECONDS), max_in_flight_bytes=100)
    session = store.session

    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TransientError, match=r"/a came before the deadline .*1 attempt") as raised:
        await session.call("a", never, num_bytes=10)
    assert raised.value.uri.endswith("/a")
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)
    assert store.is_clean()
    stats = store.stats
    assert (stats.num_requests, stats.num_failures, stats.num_in_flight) == (1, 1, 0)


async def test_an_answer_in_the_turn_of_the_deadline_leaves_no_cancellation_behind() -> None:
    """The attempt ends by itself, though it was cancelled: what follows must not be."""
    scripted = ScriptedService("late-answer")
    store = scripted.new_store(retry=RetryPolicy(deadline_seconds=SECONDS), max_in_flight_bytes=100)
    session = store.session

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done"
        return ""

    assert await session.call("a", stubborn) == "done"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_call_within_a_call_leaves_the_outer_one_its_deadline() -> None:
    """As where an attempt finds out what became of another before it answers."""
    scripted = ScriptedService("within")
    store = scripted.new_store(retry=RetryPolicy(deadline_seconds=SECONDS), max_in_flight_bytes=100)
    session = store.session

    async def answer() -> int:
        return 1

    async def outer() -> None:
        assert await session.call("inner", answer) == 1
        await asyncio.Event().wait()

    async with asyncio.timeout(20):
        with pytest.raises(TransientError, match=r"/outer came before the deadline"):
            await session.call("outer", outer)
    assert store.is_clean()

"""Threads of a command, and the notice of long retries."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import RetryPolicy, TransientError
from aioflux._transfer.retry import with_retry
from aioflux.cli._cp.local_files import FileThreads
from aioflux.cli._event_loop import run as run_command
from aioflux.cli._output import call_in_daemon_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def test_long_retries_are_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Short ones are not."""

    def work(num_failures: int) -> Callable[[], Coroutine[Any, Any, int]]:
        now = [0.0]

        async def sleep(seconds: float) -> None:
            now[0] += seconds

        async def attempt(number: int) -> int:
            if number <= num_failures:
                raise TransientError("could not list gs://b/: \x1b[2J no\nconnection")
            return 0

        return lambda: with_retry(
            attempt, RetryPolicy(), clock=lambda: now[0], sleep=sleep, jitter=lambda: 0.9
        )

    assert run_command(work(1)) == 0
    assert capsys.readouterr().err == ""
    assert run_command(work(7)) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("Still retrying: ")
    assert line.isprintable()
    assert "could not list gs://b/: \\x1b[2J no\\nconnection" in line


async def test_a_cancelled_call_ends_when_its_thread_has_ended() -> None:
    threads = FileThreads()
    begun, went_on, ended = threading.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        begun.set()
        threads.stop.wait(60)  # set by the cancellation
        # The loop runs twice meanwhile: a caller that does not wait would have returned by then.
        loop.call_soon_threadsafe(loop.call_soon, went_on.set)
        went_on.wait(60)
        ended.set()

    call = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()


async def test_a_cancelled_call_whose_thread_fails_is_cancelled() -> None:
    threads = FileThreads()
    begun = threading.Event()

    def work() -> None:
        begun.set()
        threads.stop.wait(60)
        raise ValueError("too late")

    call = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_results_and_errors_of_threads_are_those_of_the_call() -> None:
    def fail() -> None:
        raise ValueError("said")

    for run in (FileThreads().run, call_in_daemon_thread):
        assert await run(int, "7") == 7
        with pytest.raises(ValueError, match="said"):
            await run(fail)


async def test_a_cancelled_call_does_not_wait_for_a_daemon_thread() -> None:
    begun, released = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        released.wait(60)

    call = asyncio.create_task(call_in_daemon_thread(work))
    await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not released.is_set()
    released.set()

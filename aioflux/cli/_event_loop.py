"""A command on an event loop of its own: signals end it in order, threads do what blocks.

    SIGINT, SIGTERM, SIGHUP -> the command's task is cancelled -> it cleans up -> Stopped

While it cleans up, a second signal is only answered; the third ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from aioflux.cli._text import complain, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

__all__ = ["Stopped", "Threads", "in_daemon", "run"]

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_SIGNALS = 3
_NOTICE_SECONDS = 3.0
"""Time that a request is retried before a line says so, in seconds."""


class Stopped(Exception):  # noqa: N818  it is no error that the user sees
    """A signal ended the command, which has cleaned up; SIGPIPE stands for a broken pipe.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}")
        self.number = number


def run(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run the coroutine of a command to its end and return its exit status.

    Raises:
        Stopped: A signal ended it, or nobody reads its output any more.
    """
    try:
        with _telling_of_retries(), asyncio.Runner(loop_factory=_new_loop) as runner:
            status = runner.run(_until_signal(work))
        sys.stdout.flush()
    except BrokenPipeError:
        raise Stopped(signal.SIGPIPE) from None
    return status


class _RetryNotice(logging.Handler):
    """Writes one line to stderr when a request has been retried for some seconds.

    A server that does not answer would otherwise mean silence until all attempts are over.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._is_written = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_written and getattr(record, "elapsed_seconds", 0.0) >= _NOTICE_SECONDS:
            self._is_written = True
            complain(f"still trying: {one_line(record.getMessage())}")


@contextmanager
def _telling_of_retries() -> Iterator[None]:
    """Write a notice of long retries meanwhile."""
    logger, notice = logging.getLogger("aioflux.retry"), _RetryNotice()
    level = logger.level
    logger.addHandler(notice)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(notice)
        logger.setLevel(level)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # no wheels for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _until_signal(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work())
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
        elif len(received) < _MAX_SIGNALS:
            complain("cleaning up; once more ends at once and may leave something behind")
        else:
            os._exit(128 + number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Stopped(received[0]) from None


class Threads:
    """A few threads for what blocks; cancellation waits until a thread has cleaned up.

    Attributes:
        stop: Set when a call was cancelled; long calls look at it between their steps.
    """

    def __init__(self, num_threads: int = 4) -> None:
        self.stop = threading.Event()
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="aioflux")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread; it is over when this returns, however it returns."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.stop.set()
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            with suppress(Exception):  # who waited for the result is gone
                future.exception()
            raise


async def in_daemon(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may block without end, such as a read of a terminal.

    Cancellation does not wait for it, and neither does the end of the process.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # a result without an error

    def call() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except Exception as exc:  # raised where the result is awaited
            error = exc
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=call, daemon=True).start()
    return await outcome

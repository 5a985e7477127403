"""The run of a command on an event loop, which a signal cancels.

    SIGINT, SIGTERM, SIGHUP -> the command's task is cancelled -> it cleans up -> EndedBySignal

During clean-up a second signal prints a notice; the third one ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import uvloop

from aioflux.cli._output import print_notice
from aioflux.cli._settings import settings
from aioflux.cli._text import one_line

if TYPE_CHECKING:
    from aioflux.store import Store

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_SIGNALS = 3
_FOREIGN_LOGGERS = ("azure", "botocore", "google")
_DROPPED = logging.NullHandler()
_NOTICE_SECONDS = 3.0
"""A notice is printed when a request has been retried for this long."""


class EndedBySignal(Exception):  # noqa: N818  shown to the user as an exit status only
    """A signal cancelled the command, which has cleaned up.

    SIGPIPE is used if standard output is a pipe that its reader has closed.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}")
        self.number = number


class Resources(AsyncExitStack):
    """Stores, which are closed at the end of the command.

    Attributes:
        stores: Open stores by uri.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stores: dict[str, Store] = {}


resources: ContextVar[Resources] = ContextVar("resources")
"""The resources of the running command."""


def run(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run the coroutine of a command and return its exit status.

    Raises:
        EndedBySignal: A signal cancelled the command, or the reader of its output closed the pipe.
    """
    try:
        with (
            _logs(),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            status = runner.run(_run_until_signal(work))
        sys.stdout.flush()
    except BrokenPipeError:
        raise EndedBySignal(signal.SIGPIPE) from None
    return status


class _RetryNotice(logging.Handler):
    """Log handler that prints warnings, and one line after some seconds of retries."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)  # each retry; INFO has the first ones, and counts
        self._is_printed = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:  # the store has no connection
            print_notice(one_line(record.getMessage()))
        elif not self._is_printed and getattr(record, "elapsed_seconds", 0.0) >= _NOTICE_SECONDS:
            self._is_printed = True
            print_notice(f"Still retrying: {one_line(record.getMessage())}")


class _LogPrinter(logging.Handler):
    """Log handler that prints each record in one line, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        print_notice(f"{record.levelname} {record.name}: {one_line(record.getMessage())}")


@contextmanager
def _logs() -> Iterator[None]:
    """Attach a handler to the loggers of the package, and drop the logs of foreign libraries.

    Their messages are also in the errors: azure-identity writes 12 lines without a login.
    """
    if not settings.debug:
        for name in _FOREIGN_LOGGERS:
            logging.getLogger(name).addHandler(_DROPPED)
    handler: logging.Handler = _RetryNotice()
    logger = logging.getLogger("aioflux.retry")
    if settings.log_level:
        handler, logger = _LogPrinter(settings.log_level), logging.getLogger("aioflux")
    level = logger.level
    logger.addHandler(handler)
    if not logger.isEnabledFor(handler.level):
        logger.setLevel(handler.level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def _run_and_close(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    async with Resources() as opened:
        resources.set(opened)
        return await work()


async def _run_until_signal(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(_run_and_close(work))
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
        elif len(received) < _MAX_SIGNALS:
            print_notice(
                "Cleaning up; press Ctrl-C again to exit now, which can leave unfinished uploads"
            )
        else:
            os._exit(128 + number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise EndedBySignal(received[0]) from None

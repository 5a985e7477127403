"""Standard output and stderr of the commands: lines, errors, and the exit status.

Standard output is written by a thread, so that a slow reader does not delay the handling of
signals. The thread writes to the descriptor: a thread that is blocked in `sys.stdout` would hold
its lock, for which the interpreter waits at exit.
"""

from __future__ import annotations

import asyncio
import codecs
import concurrent.futures
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aioflux._local_files import write_all
from aioflux.cli._settings import DEBUG, settings
from aioflux.cli._text import describe
from aioflux.errors import AiofluxError

T = TypeVar("T")

UNENCODABLE = "aioflux.unencodable"
"""Name of an error handler for encodings. It writes bytes that are not valid text (PEP 383)
unchanged. It replaces a character that the encoding lacks by an escape sequence."""

MAX_LINES = 10
"""Most lines of one kind that a command prints to stderr."""


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    code = ord(error.object[error.start])
    if 0xDC80 <= code <= 0xDCFF:
        return bytes([code - 0xDC00]), error.start + 1
    return ascii(chr(code))[1:-1], error.start + 1


codecs.register_error(UNENCODABLE, _replace)


def print_notice(message: str) -> None:
    """Write one line to stderr."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def print_question(text: str) -> None:
    """Write a question to stderr, without the end of the line."""
    print(text, end="", file=sys.stderr, flush=True)  # noqa: T201


def print_error(error: Exception | str) -> None:
    """Write an error to stderr: in one line, or as a traceback with `--debug`."""
    if isinstance(error, str):
        print_notice(f"Error: {error}")
    elif settings.debug:
        traceback.print_exception(error)
    elif isinstance(error, (AiofluxError, OSError, ValueError)):
        print_error(describe(error))
    else:
        kind = type(error).__name__
        print_error(f"unexpected {kind}: {error} (set {DEBUG}=1 for the traceback)")


class Report:
    """Failures of one command: `fail` prints only the first ten, `printing` prints all."""

    def __init__(self) -> None:
        self.num_failed = 0
        self._num_hidden = 0

    def fail(self, error: Exception | str) -> None:
        """Count a failure, and print it if it is one of the first ten."""
        self.num_failed += 1
        if self.num_failed <= MAX_LINES:
            print_error(error)
        else:
            self._num_hidden += 1

    @asynccontextmanager
    async def printing(self) -> AsyncIterator[None]:
        """Count and print the error of the body, and go on after it."""
        try:
            yield
        except (AiofluxError, ValueError) as exc:
            self.num_failed += 1
            print_error(exc)

    def finish(self, summary: str = "") -> int:
        """Print the number of failures not printed and the summary; return the exit status."""
        if self._num_hidden:
            print_notice(f"and {self._num_hidden:,} more failures")
        if summary and not settings.quiet:
            failed = f"; {self.num_failed:,} failed" if self.num_failed else ""
            print_notice(f"{summary}{failed}")
        return 1 if self.num_failed else 0


async def print_lines(text: str) -> None:
    """Write lines to standard output; an empty text writes nothing."""
    if text:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        await write_stdout(f"{text}\n".encode(encoding, UNENCODABLE))


async def write_stdout(data: bytes | bytearray | memoryview) -> None:
    """Write all bytes to standard output, and wait until the system has accepted them.

    Raises:
        OSError: Standard output is closed or full.
    """
    await call_in_daemon_thread(_write_stdout, data)


def _write_stdout(data: bytes | bytearray | memoryview) -> None:
    try:
        write_all(1, data)
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, "standard output") from exc


async def call_in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may block forever, such as a read from a terminal.

    Cancelling the call and exiting the process do not wait for the function.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    # Running, so that cancelling the caller does not cancel `outcome`, which the thread sets later.
    outcome.set_running_or_notify_cancel()

    def call() -> None:
        try:
            outcome.set_result(function(*arguments))
        except Exception as exc:  # raised where the result is awaited
            outcome.set_exception(exc)

    threading.Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(outcome)

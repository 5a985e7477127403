"""Standard output and stderr of the commands: lines, errors, and the exit status.

Standard output is written in a thread, so that signals are handled while its reader is slow; not
through `sys.stdout`, whose lock a thread that is still blocked would hold at exit.
"""

from __future__ import annotations

import asyncio
import codecs
import concurrent.futures
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

from aioflux.cli._text import describe
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

__all__ = [
    "DEBUG",
    "UNENCODABLE",
    "Report",
    "call_in_daemon_thread",
    "print_error",
    "print_lines",
    "print_notice",
    "write_all",
    "write_stdout",
]

T = TypeVar("T")

DEBUG = "AIOFLUX_DEBUG"
"""Environment variable that turns tracebacks on."""

UNENCODABLE = "aioflux.unencodable"
"""Error handler of encodings: writes bytes of names that are not valid text unchanged, and
characters that the encoding lacks as escapes."""

_MAX_LINES = 10


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


def print_error(error: Exception | str) -> None:
    """Write an error to stderr: in one line, or as a traceback if AIOFLUX_DEBUG is set."""
    if isinstance(error, str):
        print_notice(f"Error: {error}")
    elif os.environ.get(DEBUG, "0") not in {"", "0"}:
        traceback.print_exception(error)
    elif isinstance(error, (AiofluxError, OSError, ValueError)):
        print_error(describe(error))
    else:
        kind = type(error).__name__
        print_error(f"unexpected {kind}: {error} (set {DEBUG}=1 for the traceback)")


class Report:
    """Failures of one command: the first lines are printed, the rest are counted."""

    def __init__(self) -> None:
        self.num_failed = 0
        self._num_hidden = 0

    def fail(self, error: Exception | str) -> None:
        """Count a failure, and print it if it is one of the first ten."""
        self.num_failed += 1
        if self.num_failed <= _MAX_LINES:
            print_error(error)
        else:
            self._num_hidden += 1

    async def for_each(self, arguments: Iterable[T], act: Callable[[T], Awaitable[None]]) -> None:
        """Call `act` with each argument; print every failure, and continue with the next one."""
        for argument in arguments:
            try:
                await act(argument)
            except (AiofluxError, ValueError) as exc:
                self.num_failed += 1
                print_error(exc)

    def finish(self, summary: str = "") -> int:
        """Print the number of other failures and the summary; return the exit status."""
        if self._num_hidden:
            print_notice(f"and {self._num_hidden:,} more failures")
        if summary:
            failed = f"; {self.num_failed:,} failed" if self.num_failed else ""
            print_notice(f"{summary}{failed}")
        return 1 if self.num_failed else 0


async def print_lines(text: str) -> None:
    """Write lines to standard output; an empty text writes nothing."""
    if text:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        await write_stdout(f"{text}\n".encode(encoding, UNENCODABLE))


async def write_stdout(data: bytes | bytearray | memoryview) -> None:
    """Write all bytes to standard output, waiting for its reader.

    Raises:
        OSError: It cannot be written to.
    """
    await call_in_daemon_thread(_write_stdout, data)


def _write_stdout(data: bytes | bytearray | memoryview) -> None:
    try:
        write_all(1, data)
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, "standard output") from exc


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write all bytes to a descriptor, which may take less at once."""
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


async def call_in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may block forever, such as a read from a terminal.

    Neither a cancellation nor the end of the process waits for it.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only left

    def call() -> None:
        try:
            outcome.set_result(function(*arguments))
        except Exception as exc:  # raised where the result is awaited
            outcome.set_exception(exc)

    threading.Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(outcome)

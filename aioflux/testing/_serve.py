"""The server in the main thread until a signal: `aioflux serve`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.testing.gcs_server import GCSServer

_EXIT_STATUSES = {signal.SIGTERM: 0, signal.SIGINT: 128 + signal.SIGINT}


def serve(server: GCSServer, ready: Callable[[], None], *, until_stdin_closes: bool = False) -> int:
    """Serve from the main thread until SIGINT or SIGTERM.

    Args:
        server: Server to run.
        ready: Called once the socket listens.
        until_stdin_closes: Stop at the end of standard input, too: when the parent process ends.

    Returns:
        The exit status: 0 after SIGTERM or the end of standard input, 130 after Ctrl-C.

    Raises:
        OSError: The address cannot be bound.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server, ready, until_stdin_closes=until_stdin_closes))


async def _serve(server: GCSServer, ready: Callable[[], None], *, until_stdin_closes: bool) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin)
            end(0)

    for number, status in _EXIT_STATUSES.items():
        loop.add_signal_handler(number, end, status)
    async with server:
        if until_stdin_closes:
            loop.add_reader(sys.stdin, read)
        ready()
        return await ended

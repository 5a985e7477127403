"""The process of a keeper: `python -m aioflux.compat.nebula._node_daemon_process <descriptor>`.

It is started by the first trainer of a run, with the socket that it listens on, and outlives it:
what was handed to it is saved, and kept in memory a while for the trainer that is started next.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Final

from aioflux.compat.nebula._node_daemon import Keeper

__all__ = ["lock_path", "main"]

_log = logging.getLogger("aioflux")

_NICENESS: Final = 5
"""The training goes first where there are too few processors for both."""

_LOOK_SECONDS: Final = 0.5
"""Time between two looks at the clock."""

_EMPTY_LINGER_SECONDS: Final = 5.0
"""How long it stays when it holds nothing."""


async def _accept(listening: socket.socket, keeper: Keeper) -> None:
    """Serve all who come, each by a task of its own."""
    loop = asyncio.get_running_loop()
    serving: set[asyncio.Task[None]] = set()
    while True:
        try:
            sock, _ = await loop.sock_accept(listening)
        except OSError as exc:  # too many open files, say: who waits in line is heard later
            _log.warning("a trainer has to wait: %s", exc)
            await asyncio.sleep(_LOOK_SECONDS)
            continue
        if not _is_ours(sock):
            sock.close()
            continue
        task = loop.create_task(keeper.serve(sock))
        serving.add(task)
        task.add_done_callback(serving.discard)


async def _run(listening: socket.socket, lock: int) -> None:
    """Serve whoever comes, until nobody has for a while."""
    loop = asyncio.get_running_loop()
    keeper = Keeper()
    listening.setblocking(False)
    accepting = loop.create_task(_accept(listening, keeper))
    alone = time.monotonic()
    has_stderr = True
    while True:
        await keeper.changed(_LOOK_SECONDS)
        if not keeper.is_idle:
            alone = time.monotonic()
            continue
        if has_stderr and keeper.has_served:
            _let_stderr_go()
            has_stderr = False
        is_over = keeper.is_stopping or time.monotonic() - alone >= (
            keeper.linger_seconds if keeper.shelf.versions else _EMPTY_LINGER_SECONDS
        )
        if is_over and _is_locked(lock):
            break  # who comes now waits for the lock, and starts another
    accepting.cancel()
    await keeper.close()
    path = listening.getsockname()
    for each in (path, lock_path(path)):
        with suppress(FileNotFoundError):
            os.unlink(each)
    listening.close()


def lock_path(path: str) -> str:
    """Return the path of the lock of whoever starts or ends the keeper of a socket."""
    return f"{path}.lock"


def _let_stderr_go() -> None:
    """Let whoever reads what the training prints see its end: all is saved, or told."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _allow_many_files() -> None:
    """Have room for a descriptor of each part; the limit of most systems is 1024 of them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_ours(sock: socket.socket) -> bool:
    """Tell whether the same user is at the other end; the directory admits no other, either."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(told[4:8], sys.byteorder) == os.getuid()


def main() -> None:
    """Serve the socket whose descriptor is named on the command line."""
    # Ctrl-C and a scheduler's SIGTERM mean the trainers; their end is ours.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    _allow_many_files()
    if os.fork():
        os._exit(0)  # whoever started it need not wait for its end, nor be told of it
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        path = lock_path(listening.getsockname())
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        asyncio.run(_run(listening, lock))


if __name__ == "__main__":
    main()

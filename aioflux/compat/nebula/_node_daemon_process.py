"""Process of the node daemon: `python -m aioflux.compat.nebula._node_daemon_process <descriptor>`.

The first trainer of a run starts it with a listening socket. It outlives the trainers: it saves
what they have handed over, and keeps that in memory for a while for the next trainer.
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

from aioflux.compat.nebula._node_daemon import NodeDaemon

__all__ = ["lock_path", "main"]

_log = logging.getLogger("aioflux")

_NICENESS: Final = 5
"""The training has priority if there are too few processors for both."""

_POLL_SECONDS: Final = 0.5
"""Interval at which the clock is checked."""

_EMPTY_LINGER_SECONDS: Final = 5.0
"""Time for which it runs with empty memory."""


async def accept_trainers(listening: socket.socket, daemon: NodeDaemon) -> None:
    """Serve each connection in a task."""
    loop = asyncio.get_running_loop()
    serving: set[asyncio.Task[None]] = set()
    while True:
        try:
            sock, _ = await loop.sock_accept(listening)
        except OSError as exc:  # too many open files: connections wait in the backlog
            _log.warning("a trainer has to wait: %s", exc)
            await asyncio.sleep(_POLL_SECONDS)
            continue
        if not _is_same_user(sock):
            sock.close()
            continue
        task = loop.create_task(daemon.serve(sock))
        serving.add(task)
        task.add_done_callback(serving.discard)


async def _run(listening: socket.socket, lock: int) -> None:
    """Serve trainers, until none has been connected for a while."""
    loop = asyncio.get_running_loop()
    daemon = NodeDaemon()
    listening.setblocking(False)
    accepting = loop.create_task(accept_trainers(listening, daemon))
    idle_since = time.monotonic()
    has_stderr = True
    while True:
        await daemon.changed(_POLL_SECONDS)
        if not daemon.is_idle:
            idle_since = time.monotonic()
            continue
        if has_stderr and daemon.has_served:
            _close_stderr()
            has_stderr = False
        is_over = daemon.is_stopping or time.monotonic() - idle_since >= (
            daemon.linger_seconds if daemon.memory.versions else _EMPTY_LINGER_SECONDS
        )
        if is_over and _is_locked(lock):
            break  # a trainer that connects now waits for the lock, and starts another daemon
    accepting.cancel()
    await daemon.close()
    path = listening.getsockname()
    for each in (path, lock_path(path)):
        with suppress(FileNotFoundError):
            os.unlink(each)
    listening.close()


def lock_path(path: str) -> str:
    """Return the path of the lock that starting and stopping the daemon of a socket needs."""
    return f"{path}.lock"


def _close_stderr() -> None:
    """Close the inherited stderr, so that a reader of the training's output sees its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def _allow_many_files() -> None:
    """Raise the limit of descriptors, often 1024: each part needs one."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_same_user(sock: socket.socket) -> bool:
    """Return whether the peer runs as the same user; the directory admits no other, either."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


def main() -> None:
    """Serve the socket whose descriptor is named on the command line."""
    # Ctrl-C and SIGTERM of a scheduler are for the trainers, after whose end the daemon exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    _allow_many_files()
    if os.fork():
        os._exit(0)  # the daemon is not a child of the trainer
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        path = lock_path(listening.getsockname())
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        asyncio.run(_run(listening, lock))


if __name__ == "__main__":
    main()

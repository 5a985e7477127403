"""Process of the node daemon: `python -m aioflux.compat.nebula._node_daemon_process <descriptor>`.

The first trainer on a node starts the process, and passes it a listening socket. After the last
trainer has disconnected, the process saves the remaining checkpoints, and keeps checkpoints in
memory for some time, so that a restarted training can load them.
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

_log = logging.getLogger("aioflux")

_NICENESS: Final = 5
"""Niceness of the process, so that the training has priority if processors are scarce."""

_POLL_SECONDS: Final = 0.5
"""Interval at which to check the time, and to retry a failed accept."""

_EMPTY_LINGER_SECONDS: Final = 5.0
"""Time from the last disconnect to the exit if the memory is empty."""


async def accept_trainers(listening: socket.socket, daemon: NodeDaemon) -> None:
    """Accept connections of the same user, and serve each in its own task."""
    loop = asyncio.get_running_loop()
    serving: set[asyncio.Task[None]] = set()
    while True:
        try:
            sock, _ = await loop.sock_accept(listening)
        except OSError as exc:  # For example too many open files; connections wait in the backlog.
            _log.warning("cannot accept the connection of a trainer, will retry: %s", exc)
            await asyncio.sleep(_POLL_SECONDS)
            continue
        if not _is_same_user(sock):
            sock.close()
            continue
        task = loop.create_task(daemon.serve(sock))
        serving.add(task)
        task.add_done_callback(serving.discard)


async def _run(listening: socket.socket, lock: int) -> None:
    """Serve trainers, and return when the daemon was stopped or has been idle for long enough."""
    loop = asyncio.get_running_loop()
    daemon = NodeDaemon()
    listening.setblocking(False)
    accepting = loop.create_task(accept_trainers(listening, daemon))
    idle_since = time.monotonic()
    has_stderr = True
    while True:
        await daemon.wait_for_change(_POLL_SECONDS)
        if not daemon.is_idle:
            idle_since = time.monotonic()
            continue
        if has_stderr and daemon.has_served:
            _close_stderr()
            has_stderr = False
        must_exit = daemon.is_stopping or time.monotonic() - idle_since >= (
            daemon.linger_seconds if daemon.memory.versions else _EMPTY_LINGER_SECONDS
        )
        if must_exit and _try_lock(lock):
            break  # A trainer that connects now waits for the lock, then starts another daemon.
    accepting.cancel()
    await daemon.close()
    socket_path = listening.getsockname()
    for path in (socket_path, lock_path(socket_path)):
        with suppress(FileNotFoundError):
            os.unlink(path)
    listening.close()


def lock_path(path: str) -> str:
    """Return the path of the lock file for the daemon of a socket; see `DaemonClient`."""
    return f"{path}.lock"


def _close_stderr() -> None:
    """Replace the inherited stderr: a reader of the training's stderr waits until it is closed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def _allow_many_files() -> None:
    """Raise the limit of open files to the hard limit, because each part needs a descriptor."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_same_user(sock: socket.socket) -> bool:
    """Return whether the peer is a process of this user; True if the system cannot say.

    The permissions of the socket's directory exclude other users, too.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


def main() -> None:
    """Run the daemon for the listening socket whose descriptor is the first argument."""
    # Ctrl-C and a scheduler's SIGTERM are for the trainers. The daemon still has to save
    # checkpoints, and exits by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    _allow_many_files()
    if os.fork():
        os._exit(0)  # The forked process, which is not a child of the trainer, is the daemon.
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        path = lock_path(listening.getsockname())
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        asyncio.run(_run(listening, lock))


if __name__ == "__main__":
    main()

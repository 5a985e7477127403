"""DaemonClient: the connection of a trainer to the node daemon, one request at a time.

The first trainer starts the daemon, under a lock. It creates the listening socket itself, so that
other trainers can connect before the daemon is ready.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from aioflux import _bridge
from aioflux.checkpoint._save.uploader_messages import MAX_FDS, MAX_READ_BYTES, Inbox, send
from aioflux.compat.nebula._node_daemon import NodeDaemon
from aioflux.compat.nebula._node_daemon_process import lock_path
from aioflux.compat.nebula._settings import credential_variables, socket_path
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.compat.nebula._settings import Settings

__all__ = ["DaemonClient"]

_BACKLOG: Final = 512

_EXIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.01
"""Longest wait for the daemon to exit, and the interval at which it is checked."""


class DaemonClient:
    """Requests of one process to the daemon of its node."""

    def __init__(self, settings: Settings) -> None:
        # Pickled here, so that a store that does not pickle is an error of `init`.
        self._hello = pickle.dumps(settings)
        self._is_private = settings.is_private
        self._uri = settings.uri
        self._identity = settings.identity
        self._lock = _bridge.ForkSafeLock()
        self._sock: socket.socket | None = None
        self._inbox = Inbox()
        self._pid = os.getpid()
        self.generation = 0
        """Number of connections: segments of an earlier one are unknown to the next."""

    def call(self, name: str, *arguments: object, fds: tuple[int, ...] = ()) -> Any:
        """Send a request and return the answer; start a daemon if there is none.

        Raises:
            CheckpointError: The daemon died meanwhile; what it had in memory is lost.
        """
        with self._lock.current:
            if self._sock is None or self._pid != os.getpid():
                self._connect(may_start=True)
            return self._call(name, arguments, fds)[0]

    def call_if_running(self, name: str, *arguments: object) -> tuple[Any, list[int]]:
        """Send a request; return the answer and descriptors, or None if no daemon is running."""
        with self._lock.current:
            is_connected = self._sock is not None and self._pid == os.getpid()
            if not is_connected and (self._is_private or not self._connect(may_start=False)):
                return None, []
            return self._call(name, arguments, ())

    def stop(self) -> None:
        """Let the daemon exit; the last trainer waits for that."""
        is_last = self.call_if_running("stop")[0]
        self.close()
        if not is_last or self._is_private:
            return
        path = socket_path(self._identity, os.environ)
        deadline = time.monotonic() + _EXIT_SECONDS
        while os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        with self._lock.current:
            self._drop()

    def _call(
        self, name: str, arguments: tuple[object, ...], fds: tuple[int, ...]
    ) -> tuple[Any, list[int]]:
        sock = self._sock
        assert sock is not None
        try:
            send(sock, (name, *arguments), fds)
            (kind, reply), received = self._receive(sock)
        except OSError as exc:
            self._drop()
            raise CheckpointError(
                f"the node daemon of {self._uri or 'this node'} died, and what only its memory "
                f"had is lost; save again ({exc})"
            ) from exc
        except BaseException:  # interrupted: the next request would receive this answer
            self._drop()
            raise
        if kind == "error":
            raise reply
        return reply, received

    def _receive(self, sock: socket.socket) -> tuple[Any, list[int]]:
        while True:
            data, fds, _, _ = socket.recv_fds(sock, MAX_READ_BYTES, MAX_FDS)
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            for message in self._inbox.feed(data, fds):
                received, self._inbox.fds = self._inbox.fds, []
                return message, received

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        for fd in self._inbox.fds:
            os.close(fd)
        self._inbox = Inbox()
        if sock is not None:
            sock.close()

    def _connect(self, *, may_start: bool) -> bool:
        """Connect; return False if no daemon is running and `may_start` is False."""
        if self._pid != os.getpid():  # forked: the parent continues to use its connection
            self._sock, self._inbox, self._pid = None, Inbox(), os.getpid()
        self.generation += 1
        if self._is_private:
            self._sock = _start_in_process()
        else:
            path = socket_path(self._identity, os.environ)
            if not may_start and not os.path.exists(path):
                return False
            with _locked(path):
                self._sock = _try_connect(path)
                if self._sock is None and not may_start:
                    return False
                if self._sock is None:
                    self._sock = _start(path)
                self._send_hello()
                return True
        self._send_hello()
        return True

    def _send_hello(self) -> None:
        settings = pickle.loads(self._hello)  # noqa: S301  our own
        # A running daemon has the credentials of an earlier training, which may have expired. They
        # are sent like everything else: over a socket of this user.
        self._call("hello", (settings, credential_variables(os.environ)), ())


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock that starting and stopping a daemon needs."""
    while True:
        lock = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_named(lock, lock_path(path)):
                yield
                return
        finally:
            os.close(lock)


def _is_named(fd: int, path: str) -> bool:
    """Return whether a path still leads to an open file: a daemon that exits removes its lock."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _try_connect(path: str) -> socket.socket | None:
    """Return a connection to the daemon; None if it is not running."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


def _start(path: str) -> socket.socket:
    """Start a daemon, and return a connection to it."""
    with suppress(FileNotFoundError):  # left by one that was killed
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(_BACKLOG)
        # It forks the daemon, so that that is no child of this process, and exits.
        subprocess.run(  # noqa: S603  ourselves
            [
                sys.executable,
                "-m",
                "aioflux.compat.nebula._node_daemon_process",
                str(listening.fileno()),
            ],
            # The daemon imports functions that return tokens from the same path.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(listening.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
        sock = _try_connect(path)
    if sock is None:
        raise CheckpointError(f"could not connect to the node daemon at {path}")
    return sock


def _start_in_process() -> socket.socket:
    """Run a daemon on the background loop: other processes cannot see memory:// objects."""
    ours, theirs = socket.socketpair()
    # Not awaited: it ends with the process, as its objects do.
    asyncio.run_coroutine_threadsafe(_serve_in_process(theirs), _bridge.background_loop())
    return ours


async def _serve_in_process(sock: socket.socket) -> None:
    daemon = NodeDaemon()
    try:
        await daemon.serve(sock)
    finally:
        await daemon.close()

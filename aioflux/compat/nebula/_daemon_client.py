"""Client of the node daemon for trainers, the processes that save or load checkpoints.

The first trainer starts the daemon, under a lock. This trainer creates the listening socket, so
that all trainers can connect before the daemon is ready.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from aioflux import _bridge
from aioflux.checkpoint._save.process_uploader import MAX_FDS, MAX_READ_BYTES, Inbox, send
from aioflux.compat.nebula._node_daemon import NodeDaemon
from aioflux.compat.nebula._node_daemon_process import lock_path
from aioflux.compat.nebula._settings import credential_variables, socket_path
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from aioflux.compat.nebula._settings import Settings

_BACKLOG: Final = 512

_EXIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.01
"""Maximum time to wait for the daemon to exit, and interval between checks."""


class DaemonClient:
    """Connection of one process to the daemon of its node, for one request at a time."""

    def __init__(self, settings: Settings) -> None:
        # Pickle the settings now: a store that cannot be pickled raises in `init`.
        self._pickled_settings = pickle.dumps(settings)
        self._is_private = settings.is_private
        self._uri = settings.uri
        self._identity = settings.identity
        self._lock = _bridge.ForkSafeLock()
        self._sock: socket.socket | None = None
        self._inbox = Inbox()
        self._pid = os.getpid()
        self.generation = 0
        """Changes with each connection, because segment numbers are valid for one connection."""

    def call(self, name: str, *arguments: object, fds: tuple[int, ...] = ()) -> Any:
        """Send a request and return the response; start the daemon if it is not running.

        Raises:
            CheckpointError: The daemon died during the request, and its memory is lost.
            Exception: The error of the request in the daemon.
        """
        with self._lock.current:
            if self._sock is None or self._pid != os.getpid():
                self._connect(may_start=True)
            return self._call(name, arguments, fds)[0]

    def call_if_running(self, name: str, *arguments: object) -> tuple[Any, list[int]]:
        """Send a request; return response and descriptors, or `(None, [])` without a daemon."""
        with self._lock.current:
            is_connected = self._sock is not None and self._pid == os.getpid()
            if not is_connected and (self._is_private or not self._connect(may_start=False)):
                return None, []
            return self._call(name, arguments, ())

    def stop(self) -> None:
        """Disconnect, and let the daemon exit after its last trainer.

        The last trainer waits until the daemon has exited, at most 30 s.
        """
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
            self._disconnect()

    def _call(
        self, name: str, arguments: tuple[object, ...], fds: tuple[int, ...]
    ) -> tuple[Any, list[int]]:
        sock = self._sock
        assert sock is not None
        try:
            send(sock, (name, *arguments), fds)
            (kind, reply), received = self._receive(sock)
        except OSError as exc:
            self._disconnect()
            raise CheckpointError(
                f"the node daemon of {self._uri or 'this node'} died, and checkpoints that were "
                f"only in its memory are lost; save again ({exc})"
            ) from exc
        except BaseException:  # Interrupted: the next request would receive the wrong response.
            self._disconnect()
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

    def _disconnect(self) -> None:
        sock, self._sock = self._sock, None
        for fd in self._inbox.fds:
            os.close(fd)
        self._inbox = Inbox()
        if sock is not None:
            sock.close()

    def _connect(self, *, may_start: bool) -> bool:
        """Connect; return False if no daemon is running and `may_start` is False."""
        if self._pid != os.getpid():  # In a forked child, the connection belongs to the parent.
            self._sock, self._inbox, self._pid = None, Inbox(), os.getpid()
        self.generation += 1
        if self._is_private:
            self._sock = _start_in_process()
        else:
            path = socket_path(self._identity, os.environ)
            if not may_start and not os.path.exists(path):
                return False
            with _daemon_lock(path):
                self._sock = _try_connect(path)
                if self._sock is None and not may_start:
                    return False
                if self._sock is None:
                    self._sock = _start_daemon(path)
                self._send_hello()
                return True
        self._send_hello()
        return True

    def _send_hello(self) -> None:
        settings = pickle.loads(self._pickled_settings)  # noqa: S301  pickled by `__init__`
        # Send the credentials: a running daemon may have expired ones of an earlier training. Only
        # this user can connect to the socket.
        self._call("hello", (settings, credential_variables(os.environ)), ())


@contextmanager
def _daemon_lock(path: str) -> Iterator[None]:
    """Hold the lock that a trainer needs to connect, and the daemon to exit."""
    while True:
        lock = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_same_file(lock, lock_path(path)):
                yield
                return
        finally:
            os.close(lock)


def _is_same_file(fd: int, path: str) -> bool:
    """Return whether an open file is still the file at a path; an exiting daemon removes it."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _try_connect(path: str) -> socket.socket | None:
    """Return a connection to the daemon, or None if it is not running."""
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


def _start_daemon(path: str) -> socket.socket:
    """Start a daemon, and return a connection to it."""
    with suppress(FileNotFoundError):  # A killed daemon does not remove its socket.
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(_BACKLOG)
        # This subprocess forks the daemon and exits: the daemon is not a child of the trainer.
        subprocess.run(  # noqa: S603  a module of this package
            [
                sys.executable,
                "-m",
                "aioflux.compat.nebula._node_daemon_process",
                str(listening.fileno()),
            ],
            # With this path the daemon can import the credential functions of the caller.
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
    """Run a daemon on the background event loop: memory:// objects exist in this process only."""
    client_sock, daemon_sock = socket.socketpair()
    # The future is not awaited: daemon and objects exist until the process exits.
    asyncio.run_coroutine_threadsafe(_serve_in_process(daemon_sock), _bridge.background_loop())
    return client_sock


async def _serve_in_process(sock: socket.socket) -> None:
    daemon = NodeDaemon()
    try:
        await daemon.serve(sock)
    finally:
        await daemon.close()

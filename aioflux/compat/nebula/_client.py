"""A trainer's end of the keeper: one connection, one request at a time.

Where no keeper is there the first trainer starts one, under a lock, and listens for it until it can
itself: whoever connects meanwhile waits in line.
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
from aioflux.compat.nebula._node_daemon import Keeper
from aioflux.compat.nebula._node_daemon_process import lock_path
from aioflux.compat.nebula._settings import meeting_path, signing_variables
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.compat.nebula._settings import Settings

__all__ = ["Client"]

_BACKLOG: Final = 512

_END_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.01
"""How long the end of a keeper is waited for, and the time between two looks."""


class Client:
    """Requests of one process to the keeper of its node."""

    def __init__(self, settings: Settings) -> None:
        # Pickled here, so that a store that does not pickle is told of at once.
        self._hello = pickle.dumps(settings)
        self._is_private = settings.is_private
        self._uri = settings.uri
        self._place = settings.place
        self._lock = _bridge.OwnLock()
        self._sock: socket.socket | None = None
        self._inbox = Inbox()
        self._pid = os.getpid()
        self.generation = 0
        """Counts connections: pieces of memory of an earlier one are not known to the next."""

    def call(self, name: str, *arguments: object, fds: tuple[int, ...] = ()) -> Any:
        """Ask for something, and return the answer; a keeper is started where there is none.

        Raises:
            CheckpointError: The keeper ended meanwhile; what it held in memory is lost.
        """
        with self._lock.mine:
            if self._sock is None or self._pid != os.getpid():
                self._connect(is_started=True)
            return self._call(name, arguments, fds)[0]

    def ask(self, name: str, *arguments: object) -> tuple[Any, list[int]]:
        """Ask for something where a keeper is there, and return the answer and descriptors.

        Returns:
            The answer; None where no keeper is there.
        """
        with self._lock.mine:
            is_connected = self._sock is not None and self._pid == os.getpid()
            if not is_connected and (self._is_private or not self._connect(is_started=False)):
                return None, []
            return self._call(name, arguments, ())

    def stop(self) -> None:
        """Let the keeper end; wait for that, where this is the last trainer."""
        is_last = self.ask("stop")[0]
        self.close()
        if not is_last or self._is_private:
            return
        path, deadline = meeting_path(self._place, os.environ), time.monotonic() + _END_SECONDS
        while os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Leave the keeper to itself."""
        with self._lock.mine:
            self._drop()

    def _call(
        self, name: str, arguments: tuple[object, ...], fds: tuple[int, ...]
    ) -> tuple[Any, list[int]]:
        sock = self._sock
        assert sock is not None
        try:
            send(sock, (name, *arguments), fds)
            (kind, reply), received = self._hear(sock)
        except OSError as exc:
            self._drop()
            raise CheckpointError(
                f"the process that keeps checkpoints of {self._uri or 'this node'} in memory "
                f"ended, and what was only there is lost; save again ({exc})"
            ) from exc
        except BaseException:  # interrupted: the answer would be taken for that of the next
            self._drop()
            raise
        if kind == "error":
            raise reply
        return reply, received

    def _hear(self, sock: socket.socket) -> tuple[Any, list[int]]:
        while True:
            data, fds, _, _ = socket.recv_fds(sock, MAX_READ_BYTES, MAX_FDS)
            if not data:
                raise ConnectionResetError("it closed the connection")
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

    def _connect(self, *, is_started: bool) -> bool:
        """Have a connection; return whether there is one."""
        if self._pid != os.getpid():  # forked: the parent goes on with its own
            self._sock, self._inbox, self._pid = None, Inbox(), os.getpid()
        self.generation += 1
        if self._is_private:
            self._sock = _start_inside()
        else:
            path = meeting_path(self._place, os.environ)
            if not is_started and not os.path.exists(path):
                return False
            with _locked(path):
                self._sock = _reach(path)
                if self._sock is None and not is_started:
                    return False
                if self._sock is None:
                    self._sock = _start(path)
                self._greet()
                return True
        self._greet()
        return True

    def _greet(self) -> None:
        settings = pickle.loads(self._hello)  # noqa: S301  our own
        # A keeper that is there already was started with those of an earlier training, which may
        # have ended because they had. It hears of them as of all else: over a socket of this user.
        self._call("hello", (settings, signing_variables(os.environ)), ())


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock of whoever starts or ends a keeper."""
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
    """Tell whether an open file is still the one of its path: a keeper that ends takes it away."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _reach(path: str) -> socket.socket | None:
    """Return a connection to the keeper, None where there is none."""
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
    """Start a keeper, and return a connection to it."""
    with suppress(FileNotFoundError):  # of one that was killed
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(_BACKLOG)
        # It leaves a child of its own behind, which is nobody's here, and ends.
        subprocess.run(  # noqa: S603  ourselves
            [
                sys.executable,
                "-m",
                "aioflux.compat.nebula._node_daemon_process",
                str(listening.fileno()),
            ],
            # A function that returns tokens is found where this process finds it.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(listening.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
        sock = _reach(path)
    if sock is None:
        raise CheckpointError(f"the keeper at {path} could not be reached")
    return sock


def _start_inside() -> socket.socket:
    """Serve this process from its own background loop: nobody else sees its memory:// objects."""
    ours, its = socket.socketpair()
    # Nobody waits for it: it goes when the process does, and its objects with it.
    asyncio.run_coroutine_threadsafe(_serve_inside(its), _bridge.background_loop())
    return ours


async def _serve_inside(sock: socket.socket) -> None:
    keeper = Keeper()
    try:
        await keeper.serve(sock)
    finally:
        await keeper.close()

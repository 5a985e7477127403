"""Messages between a trainer and its uploader: pickles with their length before, over a socket.

Descriptors of arenas travel with the message that names them. One process started the other: the
pickles are their own.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MAX_FDS", "MAX_READ_BYTES", "Inbox", "encode", "portable", "send"]

_HEAD: Final = struct.Struct(">Q")

MAX_READ_BYTES: Final = 1024 * 1024
MAX_FDS: Final = 16


def encode(message: Any) -> bytes:
    """Return a message as bytes."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


def send(target: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send a message, and descriptors with it; blocks until all is in the socket's buffer."""
    data = encode(message)
    sent = socket.send_fds(target, [data], list(fds)) if fds else 0
    target.sendall(memoryview(data)[sent:])


class Inbox:
    """The bytes that have arrived, cut into messages."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.fds: list[int] = []
        """Descriptors that have arrived and were not taken yet."""

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> Iterator[Any]:
        """Add bytes, and yield the messages that are complete with them."""
        self._data += data
        self.fds += fds
        while len(self._data) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._data)
            end = _HEAD.size + size
            if len(self._data) < end:
                return
            message = bytes(memoryview(self._data)[_HEAD.size : end])
            del self._data[:end]
            yield pickle.loads(message)  # noqa: S301  see above


def portable(error: BaseException) -> BaseException:
    """Return an error that pickles: itself, or one with its class and message."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:
        return CheckpointError(f"{type(error).__name__}: {error}")
    return error

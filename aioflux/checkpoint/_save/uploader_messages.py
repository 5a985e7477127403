"""Messages between a trainer and its uploader process: length and pickle, over a socket.

The descriptor of an arena is sent with the message that names the arena. Unpickling is safe here:
the trainer started the uploader process, and no other process has the socket.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

from aioflux.errors import CheckpointError

_HEAD: Final = struct.Struct(">Q")

MAX_READ_BYTES: Final = 1024 * 1024
MAX_FDS: Final = 16


def encode(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


def send(target: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send a message with descriptors; blocks until the socket's buffer has all bytes."""
    data = encode(message)
    sent = socket.send_fds(target, [data], list(fds)) if fds else 0
    target.sendall(memoryview(data)[sent:])


class Inbox:
    """Decoder of received bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.fds: list[int] = []
        """Received descriptors. The handler of a message removes the descriptors it uses."""

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> Iterator[Any]:
        """Add received bytes, and yield the messages that are complete."""
        self._data += data
        self.fds += fds
        while len(self._data) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._data)
            end = _HEAD.size + size
            if len(self._data) < end:
                return
            message = bytes(memoryview(self._data)[_HEAD.size : end])
            del self._data[:end]
            yield pickle.loads(message)  # noqa: S301  see the module's docstring


def picklable_error(error: BaseException) -> BaseException:
    """Return the error; if it cannot be pickled, a CheckpointError with its class and message."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:
        return CheckpointError(f"{type(error).__name__}: {error}")
    return error

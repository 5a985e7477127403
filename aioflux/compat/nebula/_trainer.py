"""A trainer as the keeper knows it: a socket, and the pieces of memory between the two."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioflux.checkpoint._save.uploader_messages import MAX_FDS, MAX_READ_BYTES, Inbox, encode

if TYPE_CHECKING:
    from aioflux.compat.nebula._memory_tier import Piece

__all__ = ["Trainer"]


@dataclass(slots=True)
class Trainer:
    """One process that saves or loads."""

    number: int
    """Of those that were ever connected."""
    sock: socket.socket
    """Where it is heard; does not block."""
    inbox: Inbox = field(default_factory=Inbox)
    """What has come of a message."""
    gone: list[int] = field(default_factory=list)
    """Pieces of its own that were given up, which it was not told yet."""
    lent: list[Piece] = field(default_factory=list)
    """Pieces that it looks at."""

    async def receive(self) -> tuple[bytes, list[int]]:
        """Return what has arrived, bytes and descriptors; nothing at the end."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, MAX_READ_BYTES, MAX_FDS)
            except BlockingIOError:
                is_ready = loop.create_future()
                loop.add_reader(self.sock.fileno(), _set, is_ready)
                try:
                    await is_ready
                finally:
                    loop.remove_reader(self.sock.fileno())
            else:
                return data, fds

    async def answer(self, reply: Any, fds: list[int]) -> None:
        """Send the answer to a request, with descriptors."""
        data = memoryview(encode(reply))
        if fds:  # it waits for them: there is room
            sent = socket.send_fds(self.sock, [data], fds)
            data = data[sent:]
        await asyncio.get_running_loop().sock_sendall(self.sock, data)


def _set(is_ready: asyncio.Future[None]) -> None:
    if not is_ready.done():
        is_ready.set_result(None)

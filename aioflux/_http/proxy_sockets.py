"""The sockets of an aiohttp session, seen to their end.

aiohttp forgets a TLS connection once it has told it to close, and its session's `close` does not
wait for one: whose request was cancelled in a handshake or before its answer waits for its peer,
and where the loop ends first, the socket is left open with nobody to close it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from aiohttp import ClientSession

__all__ = ["Sockets"]

_SETTLE_SECONDS: Final = 1.0
_STEP_SECONDS: Final = 0.001


class Sockets:
    """Makes the sockets of one session (`socket_factory`) and closes all of them with it."""

    def __init__(self) -> None:
        self._made: list[socket.socket] = []

    def make(self, address: tuple[Any, ...]) -> socket.socket:
        """Make a socket for an address as `getaddrinfo` tells it."""
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        self._made = [*self._open(), made]
        return made

    @property
    def num_open(self) -> int:
        """Sockets that are open."""
        return len(self._open())

    async def aclose(self, session: ClientSession) -> None:
        """Close a session, end what it left open, and wait until all is closed, a second at most.

        Raises:
            asyncio.CancelledError: The wait was cancelled; what is open is being closed.
        """
        await session.close()
        for left in self._open():
            # To its transport this is the end of the stream, upon which it closes at once.
            with contextlib.suppress(OSError):
                left.shutdown(socket.SHUT_RDWR)
        for _ in range(int(_SETTLE_SECONDS / _STEP_SECONDS)):
            if not self._open():
                return
            await asyncio.sleep(_STEP_SECONDS)

    def _open(self) -> list[socket.socket]:
        return [made for made in self._made if made.fileno() >= 0]

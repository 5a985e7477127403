"""Memory between the kernel and a large destination that it copies to slowly.

The kernel copies a page at a time with `rep movsb`. AMD processors with the feature "fsrm" (Zen 3
and later) take three times as long where the destination lies up to 31 bytes behind the source in
its page: 1 GiB over loopback cost 1.2 s of CPU time in place of 0.4. So lies, of all places, memory
that malloc has mapped (16 bytes behind the start of a page: a large bytearray), when a server sends
from the page cache. To receive into a small buffer first, which stays in the cache of the
processor, and to copy it from there costs 0.1 s.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from pathlib import Path
from typing import Final

__all__ = ["Bounce", "bounce_for"]

_PAGE_BYTES: Final = 4096
_SLOW_BYTES: Final = 32
_LEAST_BYTES: Final = 4 * 1024 * 1024
_ROOM_BYTES: Final = 256 * 1024
_DISTANCE_BYTES: Final = 64
"""How far behind the source in its page it is copied to: past what is slow."""


def bounce_for(destination: memoryview) -> Bounce | None:
    """Return a bounce for a body, if its destination is one that is slow to copy to.

    Args:
        destination: Takes the body, whose first byte is taken for the first of a page: ranges of
            large objects begin so.
    """
    if destination.nbytes < _LEAST_BYTES or not _is_affected():
        return None
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(destination))
    return Bounce() if 0 < address % _PAGE_BYTES < _SLOW_BYTES else None


class Bounce:
    """A small buffer that is always well placed."""

    __slots__ = ("_shift", "_view")

    def __init__(self) -> None:
        memory = bytearray(_ROOM_BYTES + _PAGE_BYTES)
        self._view = memoryview(memory)
        self._shift = _DISTANCE_BYTES - ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))

    def room(self, done: int, left: int) -> memoryview:
        """Return memory for the next bytes of a body.

        Args:
            done: Bytes of the body that came before.
            left: Bytes of it that are to come.
        """
        at = (done + self._shift) % _PAGE_BYTES
        return self._view[at : at + min(left, _ROOM_BYTES)]


@lru_cache
def _is_affected() -> bool:
    """Whether this is such a processor."""
    if sys.platform != "linux":
        return False
    try:
        with Path("/proc/cpuinfo").open() as told:
            # The first processor speaks for all.
            return _is_told_slow(told.read(4096))
    except OSError:
        return False


def _is_told_slow(told: str) -> bool:
    return "AuthenticAMD" in told and " fsrm" in told

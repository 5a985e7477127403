"""Memory for the bodies of uploads."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque

_LARGE_BYTES = 4 << 20
_BLOCK_BYTES = 2 << 20  # blocks are whole multiples of it: the size of a huge page
_IDLE_BYTES = 1 << 30

_idle: deque[mmap.mmap] = deque()
"""Blocks that nobody uses, the one of longest ago first; each step on it is atomic, since blocks
come back in whatever thread drops the last view of them."""
_servers: set[int] = set()
"""Ids of the servers that run; once none does, nothing is kept."""


def keep_for(server: object) -> None:
    """Keep blocks that come back, as long as a server runs."""
    _servers.add(id(server))


def release_of(server: object) -> None:
    """Give the memory back to the system where this was the last server that ran."""
    _servers.discard(id(server))
    if not _servers:
        _idle.clear()


def allocate(size: int) -> bytearray | memoryview:
    """Return memory that the caller owns, with whatever bytes in it.

    Large bodies lie in blocks of huge pages, where there are any, and blocks are used again:
    filling 32 MiB takes 3 ms then. With a page fault for every 4 KiB it takes 24 ms, and 100 ms
    where a virtual machine's host gives its memory only now: more than what clients are compared
    by.
    """
    if size < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(size)
    block = _take(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES)
    # The array is what all views of the memory keep alive, and nothing else does.
    lease = (ctypes.c_char * size).from_buffer(block)
    weakref.finalize(lease, _give_back, block).atexit = False
    return memoryview(lease).cast("B")


def is_owned(buffer: object) -> bool:
    """Judge whether nobody but the server can change a buffer, so that it may be kept as it is."""
    if isinstance(buffer, memoryview):
        return isinstance(buffer.obj, ctypes.Array)
    return isinstance(buffer, bytes | bytearray)


def _take(size: int) -> mmap.mmap:
    """Return an idle block of a size, or a new one."""
    for _ in range(len(_idle)):
        try:
            block = _idle.popleft()
        except IndexError:  # another thread was faster
            break
        if len(block) == size:
            return block
        _idle.append(block)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _give_back(block: mmap.mmap) -> None:
    if not _servers:
        return
    _idle.append(block)
    try:
        while sum(map(len, tuple(_idle))) > _IDLE_BYTES:
            _idle.popleft()
    except IndexError:
        pass

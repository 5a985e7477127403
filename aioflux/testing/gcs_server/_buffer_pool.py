"""Memory for the bodies of uploads, reused while a server runs."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque

_LARGE_BYTES = 4 << 20
_BLOCK_BYTES = 2 << 20  # blocks are whole multiples of it: the size of a huge page
_IDLE_BYTES = 1 << 30

_idle: deque[mmap.mmap] = deque()
"""Unused blocks, the oldest first. Each operation on it is atomic, since blocks come back in
whatever thread drops the last view of them."""
_servers: set[int] = set()
"""Ids of the running servers; without any, no block is kept."""


def start_reuse(server: object) -> None:
    """Keep unused blocks as long as a server runs."""
    _servers.add(id(server))


def stop_reuse(server: object) -> None:
    """Release unused blocks if this was the last running server."""
    _servers.discard(id(server))
    if not _servers:
        _idle.clear()


def allocate(size: int) -> bytearray | memoryview:
    """Return uninitialised memory that the caller owns.

    Large bodies use blocks of huge pages, if the system has them, and blocks are reused: filling
    32 MiB then takes 3 ms. With a page fault for every 4 KiB it takes 24 ms, and 100 ms if the host
    of a virtual machine allocates the memory only then: more than clients under test differ by.
    """
    if size < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(size)
    block = _acquire(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES)
    # Only views of the memory keep the array alive.
    array = (ctypes.c_char * size).from_buffer(block)
    weakref.finalize(array, _release, block).atexit = False
    return memoryview(array).cast("B")


def is_owned(buffer: object) -> bool:
    """Return whether only the server can change a buffer, so that it needs no copy."""
    if isinstance(buffer, memoryview):
        return isinstance(buffer.obj, ctypes.Array)
    return isinstance(buffer, bytes | bytearray)


def _acquire(size: int) -> mmap.mmap:
    """Return an unused block of a size, or a new one."""
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


def _release(block: mmap.mmap) -> None:
    if not _servers:
        return
    _idle.append(block)
    try:
        while sum(map(len, tuple(_idle))) > _IDLE_BYTES:
            _idle.popleft()
    except IndexError:
        pass

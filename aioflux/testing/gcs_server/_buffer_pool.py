"""Pool of memory for the bodies of uploads."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from contextlib import suppress

_LARGE_BYTES = 4 << 20
_BLOCK_BYTES = 2 << 20  # size of a huge page; the size of a block is a multiple


class BufferPool:
    """Pool of memory blocks. Between `start` and `stop` it keeps unused blocks for reuse.

    Args:
        max_idle_bytes: Maximum total size of the unused blocks.
    """

    def __init__(self, *, max_idle_bytes: int = 1 << 30) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._keeps_blocks = False
        # Unused blocks, the oldest first. Only atomic methods of the deque are used: a block
        # returns to the pool in the thread that drops its last view, which may be any thread.
        self._idle: deque[mmap.mmap] = deque()

    @property
    def idle_bytes(self) -> int:
        """Total size of the unused blocks."""
        return sum(map(len, tuple(self._idle)))

    def start(self) -> None:
        """Keep unused blocks from now on."""
        self._keeps_blocks = True

    def stop(self) -> None:
        """Free all unused blocks, and keep none from now on."""
        self._keeps_blocks = False
        self._idle.clear()

    def allocate(self, size: int) -> bytearray | memoryview:
        """Return memory with undefined content.

        Memory for a large body is a block of huge pages, if the system supports them. It returns to
        the pool when its last view is dropped, and is used again. Then filling 32 MiB takes 3 ms.
        With new memory in 4 KiB pages it takes 24 ms, and 100 ms if the host of a virtual machine
        must allocate the pages: in a benchmark, more than the differences between clients.
        """
        if size < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
            return bytearray(size)
        block = self._acquire(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES)
        # The views keep the array alive, and the array keeps the block out of the pool.
        array = (ctypes.c_char * size).from_buffer(block)
        weakref.finalize(array, self._release, block).atexit = False
        return memoryview(array).cast("B")

    def _acquire(self, size: int) -> mmap.mmap:
        """Return an unused block of this size, or a new block."""
        with suppress(IndexError):  # another thread took the last block
            for _ in range(len(self._idle)):
                block = self._idle.popleft()
                if len(block) == size:
                    return block
                self._idle.append(block)
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _release(self, block: mmap.mmap) -> None:
        if not self._keeps_blocks:
            return
        self._idle.append(block)
        with suppress(IndexError):
            while self.idle_bytes > self._max_idle_bytes:
                self._idle.popleft()


def is_owned(buffer: object) -> bool:
    """Return whether only the server can change a buffer. A blob must copy any other buffer."""
    if isinstance(buffer, memoryview):
        return isinstance(buffer.obj, ctypes.Array)
    return isinstance(buffer, bytes | bytearray)

"""Memory for response bodies: uninitialised bytearrays, `bytes` objects without a copy, and reuse.

`bytes(bytearray(n))` zeroes the memory and copies it, which takes 6 us at 100 KiB instead of 1.7 us
here, and causes page faults at larger sizes. CPython allows C code to create an uninitialised
object with PyBytes_FromStringAndSize and a null pointer, and to fill it before other code refers to
it. This module does the same through ctypes.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections import deque
from contextlib import suppress
from typing import Final, cast

LEAST_POOLED_BYTES: Final = 1024 * 1024 + 1
"""Size from which on objects are reused. The allocator reuses the memory of smaller ones."""
_THRESHOLD_BYTES: Final = 31 * 1024 * 1024
"""Size of a block whose release raises the thresholds of glibc; they ignore more than 32 MiB."""
IDLE_SECONDS: Final = 1.0
"""Time after which a pool that is not used releases its memory."""

_HAS_GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()

# A prototype of its own: `argtypes` set on a function of `pythonapi` would apply to all modules.
_allocator = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
_new_bytes = _allocator(("PyBytes_FromStringAndSize", ctypes.pythonapi))
_new_bytearray = _allocator(("PyByteArray_FromStringAndSize", ctypes.pythonapi))
_PAYLOAD_OFFSET = bytes.__basicsize__ - 1
_HASH_BYTES = ctypes.sizeof(ctypes.c_ssize_t)
# One array type for every length: creating a ctypes array type takes 10 us.
_Window = ctypes.c_ubyte * (1 << 46)


def new_buffer(size: int) -> bytearray:
    """Return `bytearray(size)`, whose memory is not zeroed."""
    return cast("bytearray", _new_bytearray(None, size))


class BytesBuffer:
    """A bytes object under construction.

    Attributes:
        recv_view: Writable memory of the object and of the NUL byte after it, which CPython
            appends to every bytes object. A recv that leaves this extra byte free has emptied the
            socket, so that the event loop need not call recv again. The view keeps the object
            alive, so that a late write of a closing connection writes to valid memory. Nothing may
            be written after `finish` has returned the object.

    Args:
        size: Size of the object in bytes.
        reused: An object of this size that no other code references; a new object by default.
    """

    __slots__ = ("_data", "recv_view")

    def __init__(self, size: int, reused: bytes | None = None) -> None:
        self._data: bytes | bytearray
        if size == 0:
            self._data = bytearray(size)
            self.recv_view = memoryview(self._data)
            return
        if reused is None:
            data = _new_bytes(None, size)
        else:
            data = reused
            # The hash of the object is cached before the payload; -1 means that it is not known.
            ctypes.c_ssize_t.from_address(id(data) + _PAYLOAD_OFFSET - _HASH_BYTES).value = -1
        window = _Window.from_address(id(data) + _PAYLOAD_OFFSET)
        # The window refers to the object, and keeps it alive.
        vars(window)["owner"] = data
        self._data = data
        self.recv_view = memoryview(window).cast("B")[: size + 1]

    @property
    def view(self) -> memoryview:
        """Writable memory of the object, without the NUL byte."""
        return self.recv_view[: len(self._data)]

    def restore_end(self) -> None:
        """Write the NUL byte again, after a byte was received into it."""
        if len(self.recv_view) > len(self._data):
            self.recv_view[-1] = 0

    def finish(self, size: int | None = None) -> bytes:
        """Return the object.

        Args:
            size: Number of bytes received; by default the size of the object. If the object is
                larger, its first `size` bytes are copied.
        """
        data = self._data if size is None or size == len(self._data) else self._data[:size]
        return data if isinstance(data, bytes) else bytes(data)


class BytesPool:
    """Large results whose memory is used again when the caller has released them.

    The allocator returns large memory to the kernel, and each page of new memory costs a page
    fault: 1.7 of 5.2 ms of CPU for 16 MiB. The pool therefore keeps a reference to the last results
    that were offered. It writes to one of them again only when no other reference to it exists, as
    `zip` and `enumerate` of CPython do with their result tuple. Views of an object, such as
    memoryviews and NumPy arrays, reference it.

    Objects of another size than the last one offered are not kept, since they would not be used.
    If nothing is offered for `IDLE_SECONDS`, all memory is released within the same time again.

    Args:
        max_bytes: Largest number of bytes that the pool references.
    """

    def __init__(self, max_bytes: int) -> None:
        # malloc of glibc keeps up to twice as much free memory at the end of each heap as the
        # largest mapped block that was freed so far (M_MMAP_THRESHOLD in mallopt(3)). Programs with
        # large arrays have freed such a block; this frees one without touching its pages. Otherwise
        # objects that are not pooled return to the kernel: a GET of 1 MiB caused 75 page faults, a
        # quarter to a third of its CPU time, and one of 100 KiB 1 to 9.
        with suppress(MemoryError):  # the address space of the process may be limited
            new_buffer(_THRESHOLD_BYTES)
        self._max_bytes = max_bytes
        self._offered: deque[bytes] = deque()
        self._is_idle = False
        self._timer: asyncio.TimerHandle | None = None

    def allocate(self, size: int) -> BytesBuffer:
        """Return the memory of a released object of this size, or else new memory."""
        offered = self._offered
        if offered and len(offered[0]) == size:
            for index in range(len(offered)):
                if sys.getrefcount(offered[index]) == _UNSHARED:
                    reused = offered[index]
                    del offered[index]
                    return BytesBuffer(size, reused)
        return BytesBuffer(size)

    def offer(self, data: bytes) -> None:
        """Use the memory of `data` again, as soon as no other code references `data`."""
        size, offered = len(data), self._offered
        # Without the GIL, `getrefcount` does not count all references of other threads.
        if not _HAS_GIL or not LEAST_POOLED_BYTES <= size <= self._max_bytes:
            return
        if offered and len(offered[0]) != size:
            offered.clear()
        offered.append(data)
        if len(offered) * size > self._max_bytes:
            offered.popleft()
        self._is_idle = False
        if self._timer is None:
            self._start_timer()

    def clear(self) -> None:
        """Release all memory."""
        self._offered.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        if self._is_idle:
            self.clear()
        else:
            self._is_idle = True
            self._start_timer()


_probe = deque([bytes(2)])
_UNSHARED: Final = sys.getrefcount(_probe[0])
"""Value of `sys.getrefcount` for an object that only a deque references."""

"""Memory for response bodies: uninitialised bytearrays, and `bytes` objects without a copy.

`bytes(bytearray(n))` zeroes the memory and copies it, which takes 6 us at 100 KiB instead of 1.7 us
here, and causes page faults at larger sizes. CPython allows C code to create an uninitialised
object with PyBytes_FromStringAndSize and a null pointer, and to fill it before other code refers to
it. This module does the same through ctypes.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BytesBuffer", "new_buffer"]

_CPYTHON = sys.implementation.name == "cpython"

if _CPYTHON:
    _new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
    _new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    _new_bytes.restype = ctypes.py_object
    _PAYLOAD_OFFSET = bytes.__basicsize__ - 1
    # One array type for every length: creating a ctypes array type takes 10 us.
    _Window = ctypes.c_ubyte * (1 << 46)


def _make_allocator() -> Callable[[int], bytearray]:
    """Return a function like `bytearray(n)` that does not zero the memory."""
    allocate = ctypes.pythonapi.PyByteArray_FromStringAndSize
    # A new prototype: the function of `pythonapi` is shared with other modules.
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    function = prototype(ctypes.cast(allocate, ctypes.c_void_p).value or 0)
    return lambda size: cast("bytearray", function(None, size))


new_buffer = _make_allocator()


class BytesBuffer:
    """A bytes object under construction.

    Attributes:
        recv_view: Writable memory of the object and of the NUL byte after it, which CPython
            appends to every bytes object. A recv that leaves this extra byte free has emptied the
            socket, so that the event loop need not call recv again. The view keeps the object
            alive, so that a late write of a closing connection writes to valid memory. Nothing may
            be written after `finish` has returned the object.
    """

    __slots__ = ("_data", "recv_view")

    def __init__(self, size: int) -> None:
        self._data: bytes | bytearray
        if not _CPYTHON or size == 0:
            self._data = bytearray(size)
            self.recv_view = memoryview(self._data)
            return
        data = _new_bytes(None, size)
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

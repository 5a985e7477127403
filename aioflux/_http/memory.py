"""Memory that a body is received into: uninitialised bytearrays, and `bytes` without a copy.

`bytes(bytearray(n))` costs a copy and the zeroing before it, 6 microseconds at 100 KiB against 1.7
here, and page faults above. CPython lets C code create an uninitialised object and fill it before
anything else refers to it (PyBytes_FromStringAndSize with a null pointer); the same is done here
through ctypes.
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
    # One type for every length: a ctypes array type per length would cost 10 microseconds each.
    _Window = ctypes.c_ubyte * (1 << 46)


def _make_allocator() -> Callable[[int], bytearray]:
    """Return `bytearray(n)` without the zeroing: every byte is received over before it is read."""
    allocate = ctypes.pythonapi.PyByteArray_FromStringAndSize
    # A prototype of our own: attributes set on the function of pythonapi would be shared by all.
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    function = prototype(ctypes.cast(allocate, ctypes.c_void_p).value or 0)
    return lambda size: cast("bytearray", function(None, size))


new_buffer = _make_allocator()


class BytesBuffer:
    """A bytes object under construction.

    Attributes:
        recv_view: Writable memory of the object, and of the NUL byte with which CPython ends every
            bytes object: a recv into more memory than needed need not be repeated to see that
            nothing is left. The view keeps the object alive, so that a late write of a closing
            connection does no harm to the process; but nothing may be written once `finish` has
            returned the object.
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
        # Any ctypes object takes attributes; this one ties the lifetimes together.
        vars(window)["owner"] = data
        self._data = data
        self.recv_view = memoryview(window).cast("B")[: size + 1]

    @property
    def view(self) -> memoryview:
        """Writable memory of the object alone."""
        return self.recv_view[: len(self._data)]

    def restore_end(self) -> None:
        """Write the NUL byte again, after something was received over it."""
        if len(self.recv_view) > len(self._data):
            self.recv_view[-1] = 0

    def finish(self, size: int | None = None) -> bytes:
        """Return the object.

        Args:
            size: Bytes received, if fewer than its size: costs a copy.
        """
        data = self._data if size is None or size == len(self._data) else self._data[:size]
        return data if isinstance(data, bytes) else bytes(data)

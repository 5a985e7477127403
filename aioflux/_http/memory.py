"""Memory that the kernel can fill and that becomes `bytes` without a copy.

`bytes(bytearray(n))` costs a copy and the zeroing before it, 6 microseconds at 100 KiB against 1.7
here, and page faults above. CPython lets C code create an uninitialised bytes object and fill it
before anybody else sees it (PyBytes_FromStringAndSize with a null pointer); the same is done here
through ctypes.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["BytesBuffer"]

_CPYTHON = sys.implementation.name == "cpython"

if _CPYTHON:
    _new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
    _new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    _new_bytes.restype = ctypes.py_object
    _PAYLOAD_OFFSET = bytes.__basicsize__ - 1
    # One type for every length: a ctypes array type per length would cost 10 microseconds each.
    _Window = ctypes.c_ubyte * (1 << 46)


class BytesBuffer:
    """A bytes object under construction.

    Attributes:
        room: Writable memory of the object, and of the byte behind it that ends every bytes object
            of CPython: a recv that has room for more than there is need not be tried again to see
            that nothing is left. It keeps the object alive, so that a late write by a closing
            connection is harmless to the process; but nobody may write once `finish` has handed the
            object out.
    """

    __slots__ = ("_data", "room")

    def __init__(self, size: int) -> None:
        self._data: bytes | bytearray
        if not _CPYTHON or size == 0:
            self._data = bytearray(size)
            self.room = memoryview(self._data)
            return
        data = _new_bytes(None, size)
        window = _Window.from_address(id(data) + _PAYLOAD_OFFSET)
        # Any ctypes object takes attributes; this one ties the lifetimes together.
        vars(window)["owner"] = data
        self._data = data
        self.room = memoryview(window).cast("B")[: size + 1]

    @property
    def view(self) -> memoryview:
        """Writable memory of the object alone."""
        return self.room[: len(self._data)]

    def seal(self) -> None:
        """Put back the byte that ends the object, where something was received into it."""
        if len(self.room) > len(self._data):
            self.room[-1] = 0

    def finish(self, size: int | None = None) -> bytes:
        """Hand the object out.

        Args:
            size: Bytes that came, where they are fewer than there is room for: costs a copy.
        """
        data = self._data if size is None or size == len(self._data) else self._data[:size]
        return data if isinstance(data, bytes) else bytes(data)

"""Where the bytes of a body go: buffers for bodies received, pieces of bodies sent."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, cast

from aioflux._http.codec import ChunkedDecoder
from aioflux._http.errors import ProtocolError

__all__ = [
    "MAX_ERROR_BODY_BYTES",
    "Buffer",
    "Destination",
    "StreamedBody",
    "as_destination",
    "as_views",
    "check_length",
    "new_buffer",
    "place",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

Destination: TypeAlias = memoryview | type[bytes] | Callable[[int], memoryview]
"""Where the body of a 2xx response goes: memory, what gives memory for a length in bytes, or
`bytes` for an object of that class.

The function is called once, as soon as the length is known, and never for another status.
"""

MAX_ERROR_BODY_BYTES: Final = 1024 * 1024
"""Bytes kept of a body that is not of a 2xx response; what follows is dropped."""


def _make_allocator() -> Callable[[int], bytearray]:
    """`bytearray(n)` without the zeroes: every byte is received over before anyone sees it."""
    allocate = ctypes.pythonapi.PyByteArray_FromStringAndSize
    # A prototype of our own: attributes set on the shared pythonapi function reach everybody.
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    function = prototype(ctypes.cast(allocate, ctypes.c_void_p).value or 0)
    return lambda size: cast("bytearray", function(None, size))


new_buffer = _make_allocator()


def as_views(body: Sequence[Buffer] | Buffer | None) -> list[memoryview]:
    """Flat byte views of a body's memory, in order, empty ones left out.

    Raises:
        TypeError: A part is no buffer.
        ValueError: A part's memory is not contiguous.
    """
    if body is None:
        return []
    if isinstance(body, (bytes, bytearray, memoryview)):
        body = (body,)
    views = []
    for part in body:
        view = memoryview(part)
        if not view.c_contiguous:
            raise ValueError("a request body must lie in contiguous memory")
        if view.nbytes:
            views.append(view.cast("B"))
    return views


def as_destination(into: memoryview) -> memoryview:
    """Flat byte view of the memory that a response body is received into.

    Raises:
        ValueError: The memory is read-only or not contiguous.
    """
    if into.readonly or not into.c_contiguous:
        raise ValueError("`into` must be writable contiguous memory")
    return into if into.format == "B" and into.ndim == 1 else into.cast("B")


def check_length(num_bytes: int, into: Destination | None, max_body_bytes: int | None) -> None:
    """Refuse a body that is longer than its destination or its limit, before any of it is taken.

    Raises:
        ProtocolError: It is.
    """
    if isinstance(into, memoryview) and num_bytes > len(into):
        raise ProtocolError(f"body of {num_bytes} bytes is over the {len(into)} bytes of `into`")
    if max_body_bytes is not None and num_bytes > max_body_bytes:
        raise ProtocolError(f"body of {num_bytes} bytes is over the {max_body_bytes} bytes allowed")


def place(into: Destination, num_bytes: int) -> memoryview:
    """Memory for a body of exactly this many bytes.

    Raises:
        ValueError: The caller's function gave less, or memory that cannot be written.
    """
    if isinstance(into, memoryview):
        return into[:num_bytes]
    memory = as_destination(cast("Callable[[int], memoryview]", into)(num_bytes))
    if len(memory) < num_bytes:
        raise ValueError(f"`into` gave {len(memory)} bytes of memory for a body of {num_bytes}")
    return memory[:num_bytes]


class StreamedBody:
    """A body of unknown length: chunked, or until the connection closes.

    Attributes:
        num_bytes: Bytes of payload so far.
        is_done: The framing said that this was all; never so for a body until close.
        is_truncated: The rest was dropped, because a limit was reached.
    """

    __slots__ = (
        "_allocate",
        "_decoder",
        "_into",
        "_is_bytes",
        "_max_bytes",
        "_own",
        "_truncate",
        "is_done",
        "is_truncated",
        "num_bytes",
    )

    def __init__(
        self, *, status: int, chunked: bool, into: Destination | None, max_body_bytes: int | None
    ) -> None:
        self.num_bytes = 0
        self.is_done = False
        self.is_truncated = False
        self._decoder = ChunkedDecoder() if chunked else None
        self._own = bytearray()
        self._truncate = not 200 <= status < 300
        if self._truncate:
            into, max_body_bytes = None, MAX_ERROR_BODY_BYTES
        self._is_bytes = into is bytes
        if self._is_bytes:
            into = None
        self._into = into if isinstance(into, memoryview) else None
        self._allocate = None if isinstance(into, memoryview) else into
        limits = [] if max_body_bytes is None else [max_body_bytes]
        if self._into is not None:
            limits.append(len(self._into))
        self._max_bytes = min(limits, default=None)

    @property
    def num_placed(self) -> int:
        """Bytes of payload that are in the caller's memory by now."""
        return 0 if self._into is None else self.num_bytes

    def finish(self) -> Buffer:
        """What was received, in the caller's memory or in a buffer of its own."""
        if self._is_bytes:
            return bytes(self._own)
        if self._allocate is not None:
            memory = place(self._allocate, self.num_bytes)
            memory[:] = self._own
            return memory
        return self._own if self._into is None else self._into[: self.num_bytes]

    def feed(self, data: bytes | bytearray, start: int, end: int) -> int:
        """Take in `data[start:end]`; return where the body stopped.

        Raises:
            ProtocolError: The framing is not valid, or the body is longer than allowed.
        """
        if self._decoder is None:
            self._store(memoryview(data)[start:end])
            return end
        pieces: list[memoryview] = []
        try:
            stop = self._decoder.feed(data, start, end, pieces)
        finally:
            # What came before a fault is payload, and counts for a caller who resumes.
            for piece in pieces:
                self._store(piece)
        self.is_done = self.is_truncated or self._decoder.is_done
        return stop

    def _store(self, piece: memoryview) -> None:
        """Append a piece of payload, as far as the limit allows."""
        end = self.num_bytes + len(piece)
        if self._max_bytes is not None and end > self._max_bytes:
            if not self._truncate:
                raise ProtocolError(f"response body is over the {self._max_bytes} bytes allowed")
            self.is_done = self.is_truncated = True
            end = self._max_bytes
            piece = piece[: end - self.num_bytes]
        if self._into is None:
            self._own += piece
        else:
            self._into[self.num_bytes : end] = piece
        self.num_bytes = end

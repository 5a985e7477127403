"""Memory of request bodies, destinations of response bodies, and bodies of unknown length."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, cast

import google_crc32c

from aioflux._http.codec import ChunkedDecoder
from aioflux._http.errors import ProtocolError
from aioflux._values.checksums import address_of, crc32c

Buffer: TypeAlias = bytes | bytearray | memoryview

Destination: TypeAlias = memoryview | type[bytes] | Callable[[int], memoryview]
"""Destination of the body of a 2xx response: memory, a function that returns memory for a length in
bytes, or the class `bytes` to receive a new object of that class.

The function is called once, as soon as the length of the body is known.
"""

MAX_METADATA_BYTES: Final = 1024 * 1024
"""Maximum size of a body that is not the bytes of an object or a page of a listing. The rest of the
body of a response that is not 2xx is dropped."""


_PIECE_BYTES: Final = 256 * 1024
"""Number of received bytes that are added to a checksum at once. Pieces of 64 KiB take 10 % more
time; larger pieces are not in the cache of every processor."""
_Piece = ctypes.c_ubyte * _PIECE_BYTES


class HashedMemory:
    """A destination whose crc32c is computed while the body is received.

    Received bytes are still in the processor's cache: the crc32c of 16 MiB takes 0.55 ms in pieces
    of 256 KiB that were just received, and 1.2 ms after all of them were received.

    A `Connection` calls `start` and `update`. Other receivers only call the object itself, as a
    function that returns memory, and `crc32c` then reads all of the body.

    Args:
        memory: Memory, or a function that returns memory for a length in bytes.
    """

    __slots__ = ("_address", "_body", "_crc32c", "_num_hashed", "memory")

    def __init__(self, memory: memoryview | Callable[[int], memoryview]) -> None:
        self.memory = as_destination(memory) if isinstance(memory, memoryview) else memory
        self._body: memoryview | None = None

    def __call__(self, num_bytes: int) -> memoryview:
        """Return memory for a body."""
        self._body = None
        return memory_for(self.memory, num_bytes)

    def start(self, body: memoryview) -> None:
        """Start a body that will fill the memory `body`. An earlier body is forgotten."""
        self._body = None
        if body.nbytes >= _PIECE_BYTES:
            self._body, self._num_hashed, self._crc32c = body, 0, 0
            with address_of(body) as self._address:
                pass  # The address stays valid, because `body` keeps the memory in place.

    def update(self, num_received: int) -> None:
        """Add the whole pieces of the first `num_received` bytes that were not added yet."""
        if self._body is None:
            return
        while num_received - self._num_hashed >= _PIECE_BYTES:
            piece = _Piece.from_address(self._address + self._num_hashed)
            self._crc32c = google_crc32c.extend(self._crc32c, piece)
            self._num_hashed += _PIECE_BYTES

    def crc32c(self, body: memoryview) -> int:
        """Return the crc32c of `body`, which is the complete body of the last response."""
        if self._body is None:
            return crc32c(body)
        return crc32c(body[self._num_hashed :], self._crc32c)


def as_views(body: Sequence[Buffer] | Buffer | None) -> list[memoryview]:
    """Return one-dimensional byte views of the parts of a request body, without empty parts.

    Raises:
        TypeError: A part is not a buffer.
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
    """Return a one-dimensional byte view of the memory that a response body is received into.

    Raises:
        ValueError: The memory is read-only or not contiguous.
    """
    if into.readonly or not into.c_contiguous:
        raise ValueError("`into` must be writable contiguous memory")
    return into if into.format == "B" and into.ndim == 1 else into.cast("B")


def check_length(num_bytes: int, into: Destination | None, max_body_bytes: int | None) -> None:
    """Check the length of a body before the body is received.

    Raises:
        ProtocolError: The body is longer than its destination or than `max_body_bytes`.
    """
    if isinstance(into, memoryview) and num_bytes > len(into):
        raise ProtocolError(f"body of {num_bytes} bytes is over the {len(into)} bytes of `into`")
    if max_body_bytes is not None and num_bytes > max_body_bytes:
        raise ProtocolError(f"body of {num_bytes} bytes is over the {max_body_bytes} bytes allowed")


def memory_for(into: Destination, num_bytes: int) -> memoryview:
    """Return the memory for a body of exactly `num_bytes` bytes.

    Raises:
        ValueError: The function `into` returned less memory, or read-only memory.
    """
    if isinstance(into, memoryview):
        return into[:num_bytes]
    memory = as_destination(cast("Callable[[int], memoryview]", into)(num_bytes))
    if len(memory) < num_bytes:
        raise ValueError(f"`into` returned {len(memory)} bytes of memory for a body of {num_bytes}")
    return memory[:num_bytes]


class StreamedBody:
    """A body of unknown length: chunked, or up to the close of the connection.

    Attributes:
        num_bytes: Bytes of payload received so far.
        is_done: The last chunk was received, or the body of an error response exceeded
            `MAX_METADATA_BYTES`. The close of the connection does not set it.
        is_truncated: The body of an error response exceeded `MAX_METADATA_BYTES`, and the rest is
            dropped.
    """

    def __init__(
        self, *, status: int, chunked: bool, into: Destination | None, max_body_bytes: int | None
    ) -> None:
        self.num_bytes = 0
        self.is_done = False
        self.is_truncated = False
        self._decoder = ChunkedDecoder() if chunked else None
        self._buffer = bytearray()
        self._truncate = not 200 <= status < 300
        if self._truncate:
            into, max_body_bytes = None, MAX_METADATA_BYTES
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
    def num_in_destination(self) -> int:
        """Bytes of payload that were written to memory of the caller."""
        return 0 if self._into is None else self.num_bytes

    def finish(self) -> Buffer:
        """Return the received body, in the destination or in a new buffer."""
        if self._is_bytes:
            return bytes(self._buffer)
        if self._allocate is not None:
            memory = memory_for(self._allocate, self.num_bytes)
            memory[:] = self._buffer
            return memory
        return self._buffer if self._into is None else self._into[: self.num_bytes]

    def feed(self, data: bytes | bytearray, start: int, end: int) -> int:
        """Receive `data[start:end]`, and return the offset in `data` after the last byte used.

        Raises:
            ProtocolError: The framing is invalid, or the body is longer than its limit.
        """
        if self._decoder is None:
            self._store(memoryview(data)[start:end])
            return end
        pieces: list[memoryview] = []
        try:
            stop = self._decoder.feed(data, start, end, pieces)
        finally:
            # Payload before invalid framing is valid: the caller may resume after it.
            for piece in pieces:
                self._store(piece)
        self.is_done = self.is_truncated or self._decoder.is_done
        return stop

    def _store(self, piece: memoryview) -> None:
        """Store a piece of payload, up to the limit."""
        end = self.num_bytes + len(piece)
        if self._max_bytes is not None and end > self._max_bytes:
            if not self._truncate:
                raise ProtocolError(f"response body is over the {self._max_bytes} bytes allowed")
            self.is_done = self.is_truncated = True
            end = self._max_bytes
            piece = piece[: end - self.num_bytes]
        if self._into is None:
            self._buffer += piece
        else:
            self._into[self.num_bytes : end] = piece
        self.num_bytes = end

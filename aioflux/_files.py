"""Base classes of binary files over one object: buffered writes, and a position for reads.

write -> buffer of 1 MiB -> ObjectWriter on the event loop
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, Protocol

from aioflux import _bridge

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from aioflux._values.meta import ObjectMeta
    from aioflux.store import ObjectWriter

    class RawBinaryFile(io.RawIOBase, BinaryIO):
        """`io.RawIOBase` for type checkers: `torch.load` and others are annotated with `IO`."""

    class _BufferedBinaryFile(io.BufferedIOBase, BinaryIO):
        pass

else:
    RawBinaryFile, _BufferedBinaryFile = io.RawIOBase, io.BufferedIOBase

__all__ = ["Holder", "PositionedFile", "RawBinaryFile", "WritableFile"]

_PENDING_BYTES = 1024 * 1024
"""Small writes are buffered up to this size before they cross to the event loop: torch.save makes
several for each tensor, and a crossing costs 35-125 us."""


class Holder(Protocol):
    """The part of `_bridge.Held` that a writable file uses."""

    @property
    def value(self) -> ObjectWriter:
        """The object under construction."""

    def leave(self, error: BaseException | None = None, /) -> bool:
        """Store the object, or abort it if there is an error."""


class WritableFile(_BufferedBinaryFile):
    """A file whose bytes are uploaded while more are written; subclasses define `close`."""

    def __init__(self, held: Holder, uri: str, *, num_written: int = 0) -> None:
        self._uri = uri
        self._held = held
        self._pending = bytearray()
        self._num_written = num_written  # above 0 when appending
        self._failure: BaseException | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        self._require_open()
        return self._num_written

    def write(self, data: ReadableBuffer, /) -> int:
        """Write the bytes of `data`, whose memory may be reused afterwards; return their number.

        Raises:
            StorageError: An earlier part could not be stored. Every later write, and `close`, raise
                the same.
        """
        self._require_open()
        self._raise_failure()
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        try:
            self._write_view(view)
        except BaseException as exc:
            self._failure = exc
            raise
        self._num_written += view.nbytes
        return view.nbytes

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(f"the file that writes {self._uri} is closed")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write_view(self, view: memoryview) -> None:
        if len(self._pending) + view.nbytes > _PENDING_BYTES:
            self._send_pending()
        if view.nbytes >= _PENDING_BYTES:
            _bridge.run(self._held.value.write(view))
        else:
            self._pending += view

    def _send_pending(self) -> None:
        if self._pending:
            _bridge.run(self._held.value.write(self._pending))
            self._pending.clear()


class PositionedFile(io.RawIOBase):
    """A seekable file over an object of a known size, without its reads."""

    def __init__(self, meta: ObjectMeta) -> None:
        self.meta = meta
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position, which may be beyond the end, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.meta.size}
        if whence not in base:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence!r}")
        position = base[whence] + offset
        if position < 0:
            raise ValueError(f"cannot seek to byte {position} of {self.meta.uri}")
        self._position = position
        return position

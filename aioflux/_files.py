"""What binary files over one object share: gathered writes, and a position to read from.

write -> small pieces gathered, 1 MiB -> ObjectWriter on the event loop
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Protocol

from aioflux import _bridge

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from aioflux._values.meta import ObjectMeta
    from aioflux.store import ObjectWriter

__all__ = ["Holder", "PositionedFile", "WritableFile"]

_PENDING_BYTES = 1024 * 1024
"""Small writes are gathered up to here before they cross to the event loop: torch.save makes
several for each tensor, and a crossing costs 35-125 us."""


class Holder(Protocol):
    """What `_bridge.Held` is to a file that is written."""

    @property
    def value(self) -> ObjectWriter:
        """The object under construction."""

    def leave(self, error: BaseException | None = None, /) -> bool:
        """Store it, or with an error abort it."""


class WritableFile(io.BufferedIOBase):
    """A file whose bytes go to one object while more is written; how it ends, subclasses say."""

    def __init__(self, held: Holder, uri: str) -> None:
        self._uri = uri
        self._held = held
        self._pending = bytearray()
        self._num_written = held.value.tell()  # what an appending file begins with
        self._failure: BaseException | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        self._require_open()
        return self._num_written

    def write(self, data: ReadableBuffer, /) -> int:
        """Take the bytes of `data`, whose memory may be used again then; return how many they are.

        Raises:
            StorageError: What was written before could not be stored. Every later write, and
                `close`, raise the same.
        """
        self._require_open()
        self._raise_failure()
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        try:
            self._take(view)
        except BaseException as exc:
            self._failure = exc
            raise
        self._num_written += view.nbytes
        return view.nbytes

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self._uri} is written through a closed file")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take(self, view: memoryview) -> None:
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
    """A file over an object of a known size: where it is read is its own business."""

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
        """Return where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position, also one beyond the end, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.meta.size}
        if whence not in base:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence!r}")
        position = base[whence] + offset
        if position < 0:
            raise ValueError(f"cannot seek to byte {position} of {self.meta.uri}")
        self._position = position
        return position

"""ObjectStream: one object as a binary file, which prefetches ranges if it is read in order.

records -> io.BufferedReader: one crossing for many small reads
        -> _RawStream: in order   -> ObjectReader on the event loop: prefetched, bounded, verified
                       with seeks -> requests for exactly the bytes to read
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from aioflux._files import PositionedFile

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from _typeshed import WriteableBuffer

    from aioflux import sync
    from aioflux._values.meta import ObjectMeta

_BUFFER_BYTES = 1024 * 1024
"""Buffer for small reads: a crossing costs 35-125 us, as much as copying 1 MiB."""


class _RawStream(PositionedFile):
    """Unbuffered file below an `ObjectStream`. A read is short only at the end of the object."""

    def __init__(self, store: sync.Store, meta: ObjectMeta, prefetch_bytes: int) -> None:
        super().__init__(meta)
        self._store = store
        self._prefetch_bytes = prefetch_bytes
        self._is_in_order = True
        self._manager: AbstractContextManager[sync.ObjectReader] | None = None
        self._reader: sync.ObjectReader | None = None

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self.closed:
            raise ValueError(f"cannot read {self.meta.uri}: the stream is closed; open it again")
        view = memoryview(buffer).cast("B")[: max(0, self.meta.size - self._position)]
        if not view:
            return 0
        reader = self._sequential_reader()
        if reader is not None:
            filled = reader.readinto(view)
        else:
            filled = self._store.get_into(self.meta, view, start=self._position)
        self._position += filled
        return filled

    def prefetch(self) -> None:
        """Request the next ranges without waiting, unless a read was out of order."""
        reader = self._sequential_reader()
        if reader is not None:
            reader.prefetch()

    def _sequential_reader(self) -> sync.ObjectReader | None:
        """Return the reader that prefetches ranges; None after the first read out of order."""
        if not self._is_in_order:
            return None
        if self._position != (0 if self._reader is None else self._reader.tell()):
            self._is_in_order = False
            self._close_reader()
            return None
        if self._reader is None:
            self._manager = self._store.open_reader(
                self.meta, read_ahead_bytes=self._prefetch_bytes
            )
            self._reader = self._manager.__enter__()
        return self._reader

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._close_reader()

    def abort(self) -> None:
        """Close without verifying the bytes that were read."""
        if not self.closed:
            super().close()
            self._close_reader(GeneratorExit())

    def _close_reader(self, error: BaseException | None = None) -> None:
        manager, self._manager, self._reader = self._manager, None, None
        if manager is not None:
            manager.__exit__(None if error is None else type(error), error, None)

    def __del__(self) -> None:
        """Do nothing: garbage collection may run on any thread, and the reader closes itself."""


class ObjectStream(io.BufferedReader):
    """A readable and seekable binary file with the bytes of an object; see `open_stream`."""

    raw: _RawStream

    @property
    def meta(self) -> ObjectMeta:
        """Metadata of the object."""
        return self.raw.meta

    def prefetch(self) -> None:
        """Request the next ranges without waiting, unless a read was out of order."""
        self.raw.prefetch()

    def abort(self) -> None:
        """Close without verifying the bytes that were read."""
        self.raw.abort()

    def __repr__(self) -> str:
        return f"<ObjectStream {self.meta.uri}>"

    def __del__(self) -> None:
        """Do nothing: garbage collection may run on any thread, and the reader closes itself."""


def open_stream(store: sync.Store, meta: ObjectMeta, *, prefetch_bytes: int) -> ObjectStream:
    """Open an object as a binary file, pinned to the generation of `meta`.

    Opening sends no request. While the file is read in order from its beginning, ranges are
    prefetched, and the crc32c is compared before the last range is returned. After the first read
    out of order, nothing is prefetched: a read of the attribute `raw` requests exactly its bytes,
    and a buffered read requests at least 1 MiB (or `prefetch_bytes` if less). So a format with a
    table of contents, such as Parquet, transfers only the ranges that it needs.

    `close` before the end of the object verifies the bytes that were read in the way that
    `TransferOptions.verify_ranges` sets; `abort` verifies nothing.

    Args:
        store: Store of the object; `meta.key` is relative to it.
        meta: Metadata of the object from a listing.
        prefetch_bytes: Largest number of prefetched bytes, in at least two ranges.
    """
    buffer_bytes = min(_BUFFER_BYTES, prefetch_bytes)
    return ObjectStream(_RawStream(store, meta, prefetch_bytes), buffer_bytes)

"""open_stream: one object as a binary file, with ranges read ahead where it is read in order.

records -> io.BufferedReader: many small reads without a crossing each
        -> _Raw: in order   -> ObjectReader on the event loop: ranges ahead, bounded, verified
                 by jumps   -> exactly the bytes that are asked for
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

__all__ = ["ObjectStream", "open_stream"]

_BUFFER_BYTES = 1024 * 1024
"""What one crossing brings for small reads: it costs 35-125 us, as much as copying 1 MiB does."""


class _Raw(PositionedFile):
    """The unbuffered file below an `ObjectStream`: a read brings all that it asks for."""

    def __init__(self, store: sync.Store, meta: ObjectMeta, read_ahead_bytes: int) -> None:
        super().__init__(meta)
        self._store = store
        self._read_ahead_bytes = read_ahead_bytes
        self._is_in_order = read_ahead_bytes > 0
        self._opened: AbstractContextManager[sync.ObjectReader] | None = None
        self._reader: sync.ObjectReader | None = None

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self.closed:
            raise ValueError(f"{self.meta.uri} is read from a closed stream")
        view = memoryview(buffer).cast("B")[: max(0, self.meta.size - self._position)]
        if not view:
            return 0
        reader = self._ordered_reader()
        if reader is not None:
            filled = reader.readinto(view)
        else:
            filled = self._store.get_into(self.meta, view, start=self._position)
        self._position += filled
        return filled

    def prefetch(self) -> None:
        """Begin to fetch what is next, without waiting, as long as nobody has jumped."""
        reader = self._ordered_reader() if self.meta.size else None
        if reader is not None:
            reader.prefetch()

    def _ordered_reader(self) -> sync.ObjectReader | None:
        """Return what reads in order and ahead, as long as nobody has jumped."""
        if not self._is_in_order:
            return None
        if self._position != (0 if self._reader is None else self._reader.tell()):
            self._is_in_order = False
            self._leave()
            return None
        if self._reader is None:
            self._opened = self._store.open_reader(
                self.meta, read_ahead_bytes=self._read_ahead_bytes
            )
            self._reader = self._opened.__enter__()
        return self._reader

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._leave()

    def abandon(self) -> None:
        """Close without a second look at what was read, whose reader does not care any more."""
        if not self.closed:
            super().close()
            self._leave(GeneratorExit())

    def _leave(self, error: BaseException | None = None) -> None:
        opened, self._opened, self._reader = self._opened, None, None
        if opened is not None:
            opened.__exit__(None if error is None else type(error), error, None)

    def __del__(self) -> None:
        """Leave the ending to the reader: a file closes itself here, on whatever thread that is."""


class ObjectStream(io.BufferedReader):
    """A file that `open_stream` opened: readable and seekable."""

    raw: _Raw

    @property
    def meta(self) -> ObjectMeta:
        """Metadata of the object."""
        return self.raw.meta

    def prefetch(self) -> None:
        """Begin to fetch the first ranges, without waiting for them: somebody will read soon."""
        self.raw.prefetch()

    def abandon(self) -> None:
        """Close it in the middle; what was read is not verified once more."""
        self.raw.abandon()

    def __repr__(self) -> str:
        return f"<ObjectStream {self.meta.uri}>"

    def __del__(self) -> None:
        """Leave the ending to the reader: a file closes itself here, on whatever thread that is."""


def open_stream(store: sync.Store, meta: ObjectMeta, *, read_ahead_bytes: int) -> ObjectStream:
    """Open an object as a binary file, pinned to the generation of `meta`. Sends nothing yet.

    Read from the beginning on, in order, it fetches ranges ahead: one is read while others arrive.
    Its crc32c is compared before the last range is handed out. From the first jump on it reads
    exactly what is asked for, by `read` of its attribute `raw`, or in blocks of 1 MiB through the
    buffer: a file format with a table of contents, such as Parquet, costs the ranges that it needs.
    Closed in the middle, it verifies what was read as `TransferOptions.verify_ranges` says, unless
    it is closed by `abandon`.

    Args:
        store: Where the object is; `meta.key` is relative to it.
        meta: The object, as it was listed.
        read_ahead_bytes: The most that is held ahead, in two ranges or more; 0 for exact reads from
            the start.

    Raises:
        ValueError: `read_ahead_bytes` is negative.
    """
    if read_ahead_bytes < 0:
        raise ValueError(f"read_ahead_bytes must not be negative, as {read_ahead_bytes} is")
    buffer_bytes = min(_BUFFER_BYTES, max(meta.size, 1), read_ahead_bytes or _BUFFER_BYTES)
    return ObjectStream(_Raw(store, meta, read_ahead_bytes), buffer_bytes)

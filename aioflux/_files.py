"""Base classes of blocking binary files that read or write one object.

write -> buffer of 1 MiB -> ObjectWriter on the event loop
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, BinaryIO, Protocol

from aioflux import _bridge

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from aioflux._values.meta import ObjectMeta
    from aioflux.store import ObjectWriter

    class RawBinaryFile(io.RawIOBase, BinaryIO):
        """`io.RawIOBase` that type checkers also accept as `IO`, which `torch.load` requires."""

    class _BufferedBinaryFile(io.BufferedIOBase, BinaryIO):
        pass

else:
    RawBinaryFile, _BufferedBinaryFile = io.RawIOBase, io.BufferedIOBase

__all__ = ["PositionedFile", "RawBinaryFile", "WritableFile", "WriterContext"]

_BUFFER_BYTES = 1024 * 1024
"""Size of the buffer of small writes. `torch.save` writes several times for each tensor, and a
crossing to the event loop costs 35-125 us."""


class WriterContext(Protocol):
    """Context of an open `ObjectWriter`: the methods of `_bridge.OpenContext` that a file uses."""

    @property
    def value(self) -> ObjectWriter:
        """The object under construction."""

    def exit(self, error: BaseException | None = None, /) -> bool:
        """Publish the object, or abort the upload if `error` is given."""


class WritableFile(_BufferedBinaryFile):
    """A file that is uploaded while it is written. Subclasses implement `close` and `abort`."""

    def __init__(self, context: WriterContext, uri: str, *, num_written: int = 0) -> None:
        self._uri = uri
        self._context = context
        self._buffer = bytearray()
        self._num_written = num_written  # above 0 when appending
        self._failure: BaseException | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next write, in bytes."""
        self._require_open()
        return self._num_written

    def write(self, data: ReadableBuffer, /) -> int:
        """Write the bytes of `data`, and return their number. The memory may be reused afterwards.

        Raises:
            StorageError: A part of the object could not be stored. Later writes and `close` raise
                the same error.
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

    def abort(self, reason: BaseException | None = None) -> None:
        """Close the file and abort the upload; `reason` receives a note if the abort fails."""
        raise NotImplementedError

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        failure = self._failure
        self.abort(error)
        # Raise the error of the failed write. torch.save replaces it, even Ctrl-C, by a
        # RuntimeError about positions in a zip file.
        if failure is not None and error is not failure:
            raise failure from error

    def __del__(self) -> None:
        # The default calls `close`, which publishes the object. Without a close, `OpenContext`
        # aborts the upload.
        if not self.closed:
            warnings.warn(
                f"{self._uri} was never closed, so it is not stored; open it with `with`",
                RuntimeWarning,
                source=self,
                stacklevel=2,
            )

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(f"the file of {self._uri} is closed")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write_view(self, view: memoryview) -> None:
        if len(self._buffer) + view.nbytes > _BUFFER_BYTES:
            self._send_buffer()
        if view.nbytes >= _BUFFER_BYTES:
            _bridge.run(self._context.value.write(view))
        else:
            self._buffer += view

    def _send_buffer(self) -> None:
        if self._buffer:
            _bridge.run(self._context.value.write(self._buffer))
            self._buffer.clear()


class PositionedFile(io.RawIOBase):
    """Base class of a seekable file over one object. Subclasses implement the reads."""

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
        """Set the position, which may be beyond the end of the object, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.meta.size}
        if whence not in base:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence!r}")
        position = base[whence] + offset
        if position < 0:
            raise ValueError(f"cannot seek to byte {position} of {self.meta.uri}")
        self._position = position
        return position

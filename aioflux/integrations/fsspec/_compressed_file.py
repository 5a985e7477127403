"""A compressing file of another library and the file of the object below it, as one."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["CompressedFile"]


class CompressedFile(io.BufferedIOBase):
    """A file that closes both: compressing files leave the file below them open."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __repr__(self) -> str:
        return f"<CompressedFile over {self._inner!r}>"

    def readable(self) -> bool:
        """Return whether the file below is."""
        return bool(self._inner.readable())

    def writable(self) -> bool:
        """Return whether the file below is."""
        return bool(self._inner.writable())

    def seekable(self) -> bool:
        """Return whether the decompressing file is."""
        return bool(self._outer.seekable())

    def read(self, size: int | None = -1, /) -> bytes:
        """Read decompressed bytes."""
        return bytes(self._outer.read(-1 if size is None else size))

    def read1(self, size: int = -1, /) -> bytes:
        """Read some decompressed bytes."""
        return self.read(io.DEFAULT_BUFFER_SIZE if size < 0 else size)

    def write(self, data: Any, /) -> int:
        """Write bytes to be compressed."""
        self._outer.write(data)
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position in the decompressed bytes."""
        return int(self._outer.seek(offset, whence))

    def tell(self) -> int:
        """Return the position in the decompressed bytes."""
        return int(self._outer.tell())

    def close(self) -> None:
        """Close both; a written object becomes visible."""
        if self.closed:
            return
        super().close()
        try:
            self._outer.close()
        except BaseException as exc:
            if self._inner.writable():
                self._inner.discard(exc)
            raise
        self._inner.close()

    def discard(self, reason: BaseException | None = None) -> None:
        """Close both, and abort the upload."""
        super().close()
        self._inner.discard(reason)
        with suppress(ValueError, OSError):  # it can no longer write its trailer
            self._outer.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._inner.writable():
            self.discard(error)
        else:
            self.close()

    def __del__(self) -> None:
        # Without `close`, nothing is stored.
        if not self.closed and not self._inner.closed and self._inner.writable():
            self.discard()

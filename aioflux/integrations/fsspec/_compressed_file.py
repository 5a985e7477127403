"""CompressedFile: a compressing file of some library and the object's file below, as one."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["CompressedFile"]


class CompressedFile(io.BufferedIOBase):
    """Closes both: what compresses leaves the file that it was given open."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __repr__(self) -> str:
        return f"<CompressedFile over {self._inner!r}>"

    def readable(self) -> bool:
        """Tell whether the file below is."""
        return bool(self._inner.readable())

    def writable(self) -> bool:
        """Tell whether the file below is."""
        return bool(self._inner.writable())

    def seekable(self) -> bool:
        """Tell whether what decompresses can."""
        return bool(self._outer.seekable())

    def read(self, size: int | None = -1, /) -> bytes:
        """Read decompressed bytes."""
        return bytes(self._outer.read(-1 if size is None else size))

    def read1(self, size: int = -1, /) -> bytes:
        """Read some decompressed bytes."""
        return self.read(io.DEFAULT_BUFFER_SIZE if size < 0 else size)

    def write(self, data: Any, /) -> int:
        """Take bytes to be compressed."""
        self._outer.write(data)
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position of the decompressed bytes."""
        return int(self._outer.seek(offset, whence))

    def tell(self) -> int:
        """Return the position in the decompressed bytes."""
        return int(self._outer.tell())

    def close(self) -> None:
        """Close both; what was written becomes visible."""
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
        """Close both, and drop what was written."""
        super().close()
        self._inner.discard(reason)
        with suppress(ValueError, OSError):  # it cannot write its end any more
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
        # Dropped without `close`, nothing is stored.
        if not self.closed and not self._inner.closed and self._inner.writable():
            self.discard()

"""WriteFile: fsspec's writable file, whose bytes become one object when it is closed, not before.

In a transaction `close` keeps them back, and `commit` makes the object visible.
"""

from __future__ import annotations

import io
import sys
import warnings
from typing import TYPE_CHECKING, Any

from aioflux._files import WritableFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

    from aioflux import _bridge
    from aioflux.store import ObjectWriter

__all__ = ["Deferred", "TextFile", "WriteFile"]

_BLOCK_ENDS = ("fsspec.core", "pandas.io.common", "pyarrow.parquet.core")
"""Modules whose `with` blocks close a file without telling it of the exception that ended them."""


def _failure_of_block() -> BaseException | None:
    """Return the exception because of which a library closes a file at the end of its block.

    `with fsspec.open(url, "wb") as file` ends in OpenFile.__exit__, which only calls `close`. Code
    that closes a file while some other exception is handled means to store it.
    """
    error = sys.exception()
    frame: FrameType | None = sys._getframe(2) if error is not None else None  # noqa: SLF001
    for _ in range(3):
        if frame is None:
            break
        if frame.f_code.co_name == "__exit__" and frame.f_globals["__name__"] in _BLOCK_ENDS:
            given = [*frame.f_locals.values(), *frame.f_locals.get("args", ())]
            return error if any(each is error for each in given) else None
        frame = frame.f_back
    return None


class WriteFile(WritableFile):
    """A file that `open(path, "wb")` of an `AiofluxFileSystem` returns: not readable or seekable.

    Parts leave while more is written; memory is bounded by `TransferOptions.max_buffered_bytes` and
    1 MiB. The object becomes visible, whole, when `close` returns. An exception in a `with` block
    (that of `fsspec.open`, too), an error of a write, `discard`, or a file that is never closed
    publish nothing and abort the upload.
    """

    def __init__(
        self,
        system: Any,
        path: str,
        uri: str,
        held: _bridge.Held[ObjectWriter],
        *,
        mode: str,
        autocommit: bool,
    ) -> None:
        super().__init__(held, uri)
        self.fs = system
        self.path = path
        self.mode = mode  # type: ignore[misc]  # read-only in typing.IO
        self.autocommit = autocommit
        self._is_over = False

    @property
    def full_name(self) -> str:
        """The path with its protocol."""
        name: str = self.fs.unstrip_protocol(self.path)
        return name

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._num_written

    def __repr__(self) -> str:
        return f"<WriteFile {self._uri}>"

    def flush(self, force: bool = False) -> None:
        """Do nothing: what was written becomes visible on `close`, and not in pieces before."""
        self._require_open()

    def close(self) -> None:
        """Store what was written and, outside of a transaction, make it visible.

        Raises:
            StorageError: It could not be stored: nothing is visible and nothing stays.
        """
        if self.closed:
            return
        error = _failure_of_block()
        if error is not None:
            self.discard(error)
            return
        try:
            self._raise_failure()
            self._send_pending()
        except BaseException as exc:
            self.discard(exc)
            raise
        super().close()
        if self.autocommit:
            self.commit()

    def commit(self) -> None:
        """Make the object visible; the end of a transaction calls it.

        Raises:
            StorageError: It could not be stored: nothing is visible and nothing stays.
            ValueError: It was dropped before.
        """
        self.close()
        if self._is_over:
            if self._failure is not None:
                raise ValueError(f"{self._uri} was dropped and is not stored") from self._failure
            return
        self._is_over = True
        try:
            self._held.leave()
        except BaseException as exc:
            self._failure = exc
            raise

    def discard(self, reason: BaseException | None = None) -> None:
        """Drop what was written: nothing becomes visible. A second time it does nothing.

        Args:
            reason: Takes a note where the upload cannot be aborted.
        """
        super().close()
        self._pending.clear()
        if self._is_over:
            return
        self._is_over = True
        self._failure = reason or RuntimeError(f"{self._uri} was discarded")
        self._held.leave(self._failure)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        failure = self._failure
        self.discard(error)
        # torch.save turns the error of a write into a RuntimeError about positions in a zip file.
        if isinstance(failure, Exception) and error is not failure:
            raise failure from error

    def __del__(self) -> None:
        # A file closes itself here, which would publish. `Held` aborts instead.
        if not self.closed:
            warnings.warn(
                f"{self._uri} was never closed: nothing of it is stored; open it with `with`",
                RuntimeWarning,
                source=self,
                stacklevel=2,
            )


class TextFile(io.TextIOWrapper):
    """Text written to a `WriteFile`; an exception in its `with` block publishes nothing."""

    def discard(self, reason: BaseException | None = None) -> None:
        """Drop what was written: nothing becomes visible."""
        file: Any = self.buffer
        file.discard(reason)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.discard(error)
            return
        self.close()

    def __del__(self) -> None:
        # As for the file below: dropped without `close`, nothing is stored.
        if not self.closed:
            self.discard()


class Deferred:
    """A write that waits for the end of a transaction."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write: Callable[[], object] | None = write

    def commit(self) -> None:
        """Do it. A second time it does nothing."""
        write, self._write = self._write, None
        if write is not None:
            write()

    def discard(self) -> None:
        """Do nothing, for ever."""
        self._write = None

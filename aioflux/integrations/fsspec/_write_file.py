"""Writable files of fsspec: the bytes become one object when the file is closed, not before.

In a transaction `close` only finishes the upload, and `commit` makes the object visible: one after
the other at the end of the transaction, or none of them.
"""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from fsspec.transaction import Transaction as _Transaction  # type: ignore[import-untyped]

from aioflux._files import WritableFile
from aioflux.errors import AlreadyExistsError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from types import FrameType, TracebackType

    from aioflux import _bridge
    from aioflux.store import ObjectWriter, Store

__all__ = [
    "CompressedFile",
    "DeferredWrite",
    "TextFile",
    "Transaction",
    "WriteFile",
    "open_writer",
]

_MODES: Final = ("wb", "xb", "ab")

_BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bytes of an object that is appended to which are copied at once."""

_CLOSING_LIBRARIES: Final = ("fsspec.core", "pandas.io.common", "pyarrow.parquet.core")
"""Modules whose `__exit__` only closes the file, whether its `with` block failed or not."""

_MAX_FRAMES: Final = 3
"""Calls between `__exit__` of these modules and `WriteFile.close`."""


@asynccontextmanager
async def open_writer(
    store: Store, key: str, mode: str, labels: Mapping[str, Any]
) -> AsyncIterator[ObjectWriter]:
    """Open an object for writing in the mode "wb", "xb" or "ab".

    Raises:
        ValueError: There is no such mode.
        AlreadyExistsError: The object exists and had to be new.
    """
    if mode not in _MODES:
        known = ", ".join(("rb", *_MODES))
        raise ValueError(f"an object is opened as one of {known}, and as text, not {mode!r}")
    options: dict[str, Any] = {**labels}
    present = None
    if mode != "wb":
        try:
            present = await store.head(key)
        except NotFoundError:
            options["mode"] = "create"
    if present is not None and mode == "xb":
        raise AlreadyExistsError(f"there is an object {present.uri} already", uri=present.uri)
    if present is not None:
        options = {
            "content_type": present.content_type,
            "metadata": present.metadata or None,
            **labels,
            "if_generation_match": present.generation,
        }
    async with store.open_writer(key, **options) as writer:
        if present is not None:
            block = bytearray(min(present.size, _BLOCK_BYTES))
            async with store.open_reader(present) as reader:
                while num := await reader.readinto(block):
                    await writer.write(memoryview(block)[:num])
        yield writer


def _error_of_block() -> BaseException | None:
    """Return the exception for which a library closes a file at the end of its `with` block.

    `with fsspec.open(url, "wb")` ends in `OpenFile.__exit__`, which only calls `close`. A file that
    is closed while an exception is handled is stored otherwise: `except StopIteration` and the end
    of a generator close files that are complete. `sys.exception()` is the same in both cases, so
    that the caller's frames decide.
    """
    error = sys.exception()
    frame: FrameType | None = sys._getframe(2) if error is not None else None  # noqa: SLF001
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "__exit__" and frame.f_globals["__name__"] in _CLOSING_LIBRARIES:
            arguments = [*frame.f_locals.values(), *frame.f_locals.get("args", ())]
            return error if any(each is error for each in arguments) else None
        frame = frame.f_back
    return None


class WriteFile(WritableFile):
    """A file that `open(path, "wb")` of an `AiofluxFileSystem` returns: not readable or seekable.

    Parts are uploaded while more is written; memory is bounded by
    `TransferOptions.max_buffered_bytes` and 1 MiB. The object becomes visible, whole, when `close`
    returns. An exception in a `with` block (that of `fsspec.open`, too), an error of a write,
    `discard`, or a file that is never closed publish nothing and abort the upload.
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
        super().__init__(held, uri, num_written=held.value.tell())
        self.fs = system
        self.path = path
        self.mode = mode  # type: ignore[misc]  # read-only in typing.IO
        self.autocommit = autocommit
        self._is_done = False

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
        """Do nothing: the object becomes visible, whole, on `close`."""
        self._require_open()

    def close(self) -> None:
        """Store the object and, outside of a transaction, make it visible.

        Raises:
            StorageError: It could not be stored: nothing is visible and nothing stays.
        """
        if self.closed:
            return
        error = _error_of_block()
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
            ValueError: It was discarded before.
        """
        self.close()
        if self._is_done:
            if self._failure is not None:
                raise ValueError(f"{self._uri} was discarded and is not stored") from self._failure
            return
        self._is_done = True
        try:
            self._held.leave()
        except BaseException as exc:
            self._failure = exc
            raise

    def discard(self, reason: BaseException | None = None) -> None:
        """Abort the upload: nothing becomes visible. A second time it does nothing.

        Args:
            reason: Receives a note if the upload cannot be aborted.
        """
        super().close()
        self._pending.clear()
        if self._is_done:
            return
        self._is_done = True
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
        # The default closes, and so publishes the object. `Held` aborts instead.
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
        """Abort the upload: nothing becomes visible."""
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
        # As for the file below: without `close`, nothing is stored.
        if not self.closed:
            self.discard()


class CompressedFile(io.BufferedIOBase):
    """A file that closes both: compressing files leave the file below them open."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __repr__(self) -> str:
        return f"<CompressedFile over {self._inner!r}>"

    def readable(self) -> bool:
        return bool(self._inner.readable())

    def writable(self) -> bool:
        return bool(self._inner.writable())

    def seekable(self) -> bool:
        return bool(self._outer.seekable())

    def read(self, size: int | None = -1, /) -> bytes:
        return bytes(self._outer.read(-1 if size is None else size))

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(io.DEFAULT_BUFFER_SIZE if size < 0 else size)

    def write(self, data: Any, /) -> int:
        self._outer.write(data)
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return int(self._outer.seek(offset, whence))

    def tell(self) -> int:
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


class Transaction(_Transaction):  # type: ignore[misc]  # fsspec has no types
    """fsspec's transaction, which always ends when it is completed.

    Some versions of fsspec leave a filesystem in a transaction whose commit failed, so that nothing
    later is ever stored. A nested one is rejected: fsspec forgets the writes of the outer one.
    """

    def start(self) -> None:
        """Start the transaction.

        Raises:
            RuntimeError: The filesystem is in one, on this thread or on another.
        """
        if self.fs._intrans:  # noqa: SLF001  # as fsspec's own does
            raise RuntimeError(
                "a transaction is under way, and a filesystem has one at a time; end it first, or "
                "make another filesystem with skip_instance_cache=True"
            )
        super().start()

    def complete(self, commit: bool = True) -> None:
        """Commit all writes, or discard them; after one that fails, discard the others."""
        pending: list[Any] = list(self.files)
        self.files.clear()
        try:
            while pending:
                write = pending.pop(0)
                if commit:
                    write.commit()
                else:
                    write.discard()
        finally:
            for write in pending:
                write.discard()
            self.fs._intrans = False  # noqa: SLF001
            self.fs._transaction = None  # noqa: SLF001


class DeferredWrite:
    """A write that runs when its transaction commits."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write: Callable[[], object] | None = write

    def commit(self) -> None:
        """Run the write, once."""
        write, self._write = self._write, None
        if write is not None:
            write()

    def discard(self) -> None:
        """Drop the write."""
        self._write = None

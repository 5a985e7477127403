"""Writable files of fsspec. Each file becomes one object when it is closed.

In a transaction, `close` sends the last bytes, and the object stays invisible. At the end of the
transaction, `commit` or `discard` is called for each file in turn.
"""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from fsspec.transaction import Transaction as _Transaction  # type: ignore[import-untyped]

from aioflux._files import WritableFile
from aioflux._values.meta import portable_attributes
from aioflux.errors import AlreadyExistsError, NotFoundError

if TYPE_CHECKING:
    from types import FrameType

    from aioflux import _bridge
    from aioflux.store import ObjectWriter, Store

_MODES: Final = ("wb", "xb", "ab")

_BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bytes per read when mode "ab" copies the existing object."""

_CLOSING_LIBRARIES: Final = ("fsspec.core", "pandas.io.common", "pyarrow.parquet.core")
"""Modules with files whose `__exit__` only calls `close`, even if the `with` block raised."""

_MAX_FRAMES: Final = 3
"""Maximum depth of calls from `__exit__` of these modules to `WriteFile.close`."""


@asynccontextmanager
async def open_writer(
    store: Store, key: str, mode: str, write_options: Mapping[str, Any]
) -> AsyncIterator[ObjectWriter]:
    """Open an object in a write mode; `write_options` are attributes of `Store.put`."""
    if mode not in _MODES:
        known = ", ".join(("rb", *_MODES))
        raise ValueError(f"mode must be one of {known}, or the same without b, not {mode!r}")
    options: dict[str, Any] = {**write_options}
    present = None
    if mode != "wb":
        try:
            present = await store.head(key)
        except NotFoundError:
            options["mode"] = "create"
    if present is not None and mode == "xb":
        raise AlreadyExistsError(
            f"{present.uri} exists, and mode 'xb' requires a new object", uri=present.uri
        )
    if present is not None:
        options = {
            **portable_attributes(present),
            **write_options,
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
    """Return the exception of a failed `with` block at whose end a library closes the file.

    `with fsspec.open(url, "wb")` calls `OpenFile.__exit__`, which only calls `close`. If the block
    has raised, the file must not be stored. `sys.exception()` is not enough to detect this, because
    it also returns an exception when code closes a complete file in `except StopIteration` or at
    the end of a generator. The exception therefore counts only if it was passed to an `__exit__` of
    `_CLOSING_LIBRARIES` on the call stack. Otherwise the result is None.
    """
    error = sys.exception()
    frame: FrameType | None = sys._getframe(2) if error is not None else None  # noqa: SLF001
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "__exit__" and frame.f_globals["__name__"] in _CLOSING_LIBRARIES:
            arguments = [*frame.f_locals.values(), *frame.f_locals.get("args", ())]
            return error if any(argument is error for argument in arguments) else None
        frame = frame.f_back
    return None


class WriteFile(WritableFile):
    """Writable file, returned by `AiofluxFileSystem.open(path, "wb")`; not readable or seekable.

    Parts are uploaded while the caller writes more; buffers use at most
    `TransferOptions.max_buffered_bytes` plus 1 MiB. The object becomes visible, whole, when `close`
    returns. The upload is aborted and nothing becomes visible after an exception in the `with`
    block of the file or of `fsspec.open`, after a failed write, after `discard`, and if the file is
    never closed.
    """

    def __init__(
        self,
        system: Any,
        path: str,
        uri: str,
        context: _bridge.OpenContext[ObjectWriter],
        *,
        mode: str,
        autocommit: bool,
    ) -> None:
        super().__init__(context, uri, num_written=context.value.tell())
        self.fs = system
        self.path = path
        self.mode = mode  # type: ignore[misc]  # read-only in typing.IO
        self.autocommit = autocommit
        self._is_finished = False

    @property
    def full_name(self) -> str:
        """The path with its protocol."""
        name: str = self.fs.unstrip_protocol(self.path)
        return name

    @property
    def size(self) -> int:
        """Number of bytes written so far."""
        return self._num_written

    def __repr__(self) -> str:
        return f"<WriteFile {self._uri}>"

    def flush(self, force: bool = False) -> None:
        """Do nothing: only `close` makes the object visible."""
        self._require_open()

    def close(self) -> None:
        """Send the last bytes and, outside of a transaction, make the object visible.

        Raises:
            StorageError: The object could not be stored, and the upload is aborted.
        """
        if self.closed:
            return
        error = _error_of_block()
        if error is not None:
            self.discard(error)
            return
        try:
            self._raise_failure()
            self._send_buffer()
        except BaseException as exc:
            self.discard(exc)
            raise
        super().close()
        if self.autocommit:
            self.commit()

    def commit(self) -> None:
        """Make the object visible; called by `close` or at the end of a transaction.

        Raises:
            StorageError: The object could not be stored, and the upload is aborted.
            ValueError: `discard` was called before, or an earlier call failed.
        """
        self.close()
        if self._is_finished:
            if self._failure is not None:
                raise ValueError(f"{self._uri} was discarded and is not stored") from self._failure
            return
        self._is_finished = True
        try:
            self._context.exit()
        except BaseException as exc:
            self._failure = exc
            raise

    def discard(self, reason: BaseException | None = None) -> None:
        """Close the file and abort the upload; a second call does nothing.

        Args:
            reason: Error that caused the call. If the abort fails, a note is added to this error.
        """
        super().close()
        self._buffer.clear()
        if self._is_finished:
            return
        self._is_finished = True
        self._failure = reason or RuntimeError(f"{self._uri} was discarded")
        self._context.exit(self._failure)

    abort = discard


class TextFile(io.TextIOWrapper):
    """Text file over a `WriteFile`; an exception in its `with` block aborts the upload."""

    def discard(self, reason: BaseException | None = None) -> None:
        """Close the file and abort the upload."""
        file: Any = self.buffer
        file.discard(reason)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.discard(error)
            return
        self.close()

    def __del__(self) -> None:
        # The default calls `close`, which publishes the object.
        if not self.closed:
            self.discard()


class CompressedFile(io.BufferedIOBase):
    """A compressing or decompressing file of fsspec (outer) over an object's file (inner).

    `close` closes both files. The files of fsspec do not close the inner file.
    """

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
        """Close both files; a written object becomes visible, as by `WriteFile.close`."""
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
        """Close both files, and abort the upload."""
        super().close()
        self._inner.discard(reason)
        with suppress(ValueError, OSError):  # the compressor cannot write its trailer any more
            self._outer.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._inner.writable():
            self.discard(error)
        else:
            self.close()

    def __del__(self) -> None:
        # The default calls `close`, which publishes the object.
        if not self.closed and not self._inner.closed and self._inner.writable():
            self.discard()


class Transaction(_Transaction):  # type: ignore[misc]  # fsspec has no types
    """fsspec's transaction, changed to end after a failed commit and to reject a second start.

    Some versions of fsspec stay in a transaction whose commit failed, and never store later writes.
    On a second `start`, fsspec would drop the writes of the first transaction.
    """

    def start(self) -> None:
        """Start the transaction.

        Raises:
            RuntimeError: A transaction of the filesystem is open, in this or another thread.
        """
        if self.fs._intrans:  # noqa: SLF001  # as in fsspec's own transaction
            raise RuntimeError(
                "the filesystem is already in a transaction, and can have only one; end the first "
                "one, or open another filesystem with skip_instance_cache=True"
            )
        super().start()

    def complete(self, commit: bool = True) -> None:
        """Commit all writes in order, or discard them; after a failed commit, discard the rest."""
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
    """A write that runs when the transaction is committed."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write: Callable[[], object] | None = write

    def commit(self) -> None:
        """Run the write; a second call does nothing."""
        write, self._write = self._write, None
        if write is not None:
            write()

    def discard(self) -> None:
        """Drop the write."""
        self._write = None

"""Asynchronous files, returned by `AiofluxFileSystem.open_async`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager


class AsyncFile:
    """File with coroutine methods, over `Store.open_reader` or `Store.open_writer`.

    A written object becomes visible, whole, when `close` returns. An exception in an `async with`
    block aborts the upload.
    """

    def __init__(
        self,
        system: Any,
        path: str,
        mode: str,
        manager: AbstractAsyncContextManager[Any],
        stream: Any,
    ) -> None:
        self.fs = system
        self.path = path
        self.mode = mode
        self.closed = False
        self._manager = manager
        self._stream = stream

    @property
    def size(self) -> int:
        """Size of the object in bytes; in a write mode, number of bytes written so far."""
        return int(self._stream.meta.size if self.mode == "rb" else self._stream.tell())

    @property
    def loc(self) -> int:
        """Position of the next byte."""
        return int(self._stream.tell())

    def __repr__(self) -> str:
        return f"<AsyncFile {self.path} {self.mode}>"

    async def read(self, length: int | None = -1) -> bytes:
        """Read up to `length` bytes, or to the end of the object if `length` is negative."""
        self._require_mode("rb")
        data: bytes = await self._stream.read(-1 if length is None else length)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position of the next read; sends no request."""
        self._require_mode("rb")
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self.loc

    async def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write `data`, whose memory may be reused afterwards, and return its size in bytes."""
        self._require_mode("wb", "xb", "ab")
        return int(await self._stream.write(data))

    async def flush(self, force: bool = False) -> None:
        """Do nothing: only `close` makes the object visible."""

    async def close(self) -> None:
        """Close the file and make a written object visible; a second call does nothing."""
        await self._close(None)

    async def _close(self, error: BaseException | None) -> None:
        if self.closed:
            return
        self.closed = True
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        await self._manager.__aexit__(kind, error, trace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._close(error)

    def _require_mode(self, *modes: str) -> None:
        if self.closed:
            raise ValueError(f"{self!r} is closed")
        if self.mode not in modes:
            raise ValueError(f"{self!r} must be open in mode {' or '.join(modes)} for this call")

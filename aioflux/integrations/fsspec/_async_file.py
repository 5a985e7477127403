"""Files whose methods are awaited, as `open_async` returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

__all__ = ["AsyncFile"]


class AsyncFile:
    """One object that is read or written, over `Store.open_reader` or `Store.open_writer`.

    A written object becomes visible, whole, when `close` returns; an exception in an `async with`
    block stores nothing.
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
        """Bytes of the object, or those written so far."""
        return int(self._stream.meta.size if self.mode == "rb" else self._stream.tell())

    @property
    def loc(self) -> int:
        """Position of the next byte."""
        return int(self._stream.tell())

    def __repr__(self) -> str:
        return f"<AsyncFile {self.path} {self.mode}>"

    async def read(self, length: int | None = -1) -> bytes:
        """Read up to `length` bytes, or to the end if it is negative."""
        self._require("rb")
        data: bytes = await self._stream.read(-1 if length is None else length)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position; costs no request."""
        self._require("rb")
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self.loc

    async def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write the bytes of `data`, whose memory may be reused afterwards."""
        self._require("wb", "xb", "ab")
        return int(await self._stream.write(data))

    async def flush(self, force: bool = False) -> None:
        """Do nothing: the object becomes visible on `close`."""

    async def close(self) -> None:
        """Make a written object visible. Closing twice does nothing."""
        await self._exit(None)

    async def _exit(self, error: BaseException | None) -> None:
        if self.closed:
            return
        self.closed = True
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        await self._manager.__aexit__(kind, error, trace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exit(error)

    def _require(self, *modes: str) -> None:
        if self.closed:
            raise ValueError(f"{self!r} is closed")
        if self.mode not in modes:
            raise ValueError(f"{self!r} is not open in a mode for this")

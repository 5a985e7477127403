"""Streams of compressed frames, for whoever has a file and no table: binary files over files.

    mark | frame | frame | ... | empty frame

What is written in large pieces is cut into frames from where it is; small pieces are gathered
first. Where the bytes of a stream mean elements, nobody tells: their size is guessed from samples.
"""

from __future__ import annotations

import io
from functools import partial
from typing import IO, TYPE_CHECKING, cast

from aioflux.checkpoint._format.frames import (
    END_OF_STREAM,
    HEAD_SIZE_BYTES,
    START_OF_STREAM,
    decode_frame,
    parse_head,
)
from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from _typeshed import ReadableBuffer, WriteableBuffer

    from aioflux.checkpoint._format.codec import Codec

__all__ = ["StreamReader", "StreamWriter"]

_DIRECT_BYTES = 256 * 1024
"""What is written in pieces of at least so many bytes is not gathered."""


class StreamWriter(io.RawIOBase):
    """A file that compresses what is written to it into another file.

    `flush` makes a frame of what was gathered; `close` ends the stream, and closes the other file.
    A stream that met an error, or was dropped before it was closed, has no end, and is refused by
    whoever reads it. Memory: a few frames.
    """

    def __init__(self, output: IO[bytes], open_codec: Callable[[], Codec]) -> None:
        self._output = output
        self._codec = open_codec()
        self._gathered = bytearray()
        self._num_written = 0
        self._failure: BaseException | None = None
        self._is_begun = False
        self._is_ended = False

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written, before they were compressed."""
        self._require_usable()
        return self._num_written

    def write(self, data: ReadableBuffer, /) -> int:
        """Take all bytes of `data`, whose memory may be used again then."""
        self._require_usable()
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        with _Noted(self):
            if len(view) >= _DIRECT_BYTES:
                self._send_gathered()
                self._send(view)
            else:
                self._gathered += view
                if len(self._gathered) >= self._codec.frame_size:
                    self._send_gathered()
        self._num_written += len(view)
        return len(view)

    def flush(self) -> None:
        """Hand everything that was written to the other file, and flush that."""
        if self._is_ended:
            return  # a file flushes itself when it is closed
        self._require_usable()
        with _Noted(self):
            self._send_gathered()
            self._output.flush()

    def close(self) -> None:
        """End the stream, and close the other file. Closing twice does nothing.

        Raises:
            Exception: What a write met before: the stream has no end then.
        """
        if self.closed:
            return
        try:
            self._require_usable()
            with _Noted(self):
                self._send_gathered()
                self._put(END_OF_STREAM)
        finally:
            self._is_ended = True
            self._codec.close()
            super().close()
            self._output.close()

    def __del__(self) -> None:
        """Leave a stream without an end that was dropped: a file closes itself here."""

    def note_failure(self, failure: BaseException) -> None:
        """Let nothing more be written."""
        self._failure = failure
        self._gathered.clear()

    def _require_usable(self) -> None:
        if self.closed:
            raise ValueError("a compressed stream is written after it was closed")
        if self._failure is not None:
            raise self._failure

    def _send_gathered(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._send(memoryview(gathered))

    def _send(self, view: memoryview) -> None:
        for frame in self._codec.encode(view, element_size=0):
            self._put(frame)

    def _put(self, data: bytes | bytearray) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._put(START_OF_STREAM)
        view = memoryview(data)
        while view:
            # A raw file may take less than all; one of somebody's own may not tell, and took all.
            num_taken = cast("int | None", self._output.write(view))
            view = view[len(view) if num_taken is None else num_taken :]


class _Noted:
    """Notes the error of a block, so that what is torn is not gone on with."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._writer.note_failure(error)


class StreamReader(io.RawIOBase):
    """A file that reads what a `StreamWriter` wrote, from beginning to end.

    Memory: a few frames, unless all is read at once. `close` leaves the other file open, which it
    was handed.

    Every read raises CheckpointCorruptError where a frame is damaged, or the stream cut off.
    """

    def __init__(self, source: IO[bytes], open_codec: Callable[[], Codec]) -> None:
        self._source = source
        self._codec = open_codec()
        self._frames: Generator[bytearray] = self._codec.in_order(self._calls())
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer`, and return how many bytes there were; fewer only at the end."""
        self._require_open()
        view, at = memoryview(buffer).cast("B"), 0
        while at < len(view) and self._fill():
            piece = self._rest[: len(view) - at]
            view[at : at + len(piece)] = piece
            self._rest = self._rest[len(piece) :]
            at += len(piece)
        return at

    def readall(self) -> bytes:
        """Return everything that is left."""
        self._require_open()
        rest, self._rest = self._rest, memoryview(b"")
        data = b"".join((rest, *self._frames))
        self._codec.close()
        return data

    def close(self) -> None:
        """End the threads."""
        if not self.closed:
            super().close()
            self._frames.close()
            self._codec.close()

    def __del__(self) -> None:
        """Wait for nothing here, on whatever thread it is: threads of what was dropped end soon."""

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("a compressed stream is read after it was closed")

    def _fill(self) -> bool:
        """Have bytes at hand; return whether there are any more."""
        while not self._rest:
            frame = next(self._frames, None)
            if frame is None:
                self._codec.close()
                return False
            self._rest = memoryview(frame)
        return True

    def _calls(self) -> Iterator[Callable[[], bytearray]]:
        if self._take(len(START_OF_STREAM)) != START_OF_STREAM:
            raise CheckpointCorruptError(
                "this is no compressed stream of aioflux, or one of a newer version"
            )
        while (head := self._take(HEAD_SIZE_BYTES)) != END_OF_STREAM:
            told = parse_head(head)
            yield partial(_decode, head + self._take(told.body_size), told.raw_size)

    def _take(self, size: int) -> bytes:
        """Return so many bytes of the other file."""
        pieces, missing = list[bytes](), size
        while missing:
            piece = self._source.read(missing)
            if not piece:
                raise CheckpointCorruptError(
                    f"a compressed stream ends where {missing:,} bytes more should be; "
                    "load an earlier checkpoint"
                )
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


def _decode(stored: bytes, raw_size: int) -> bytearray:
    out = bytearray(raw_size)
    decode_frame(stored, memoryview(out))
    return out

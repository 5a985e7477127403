"""Streams of compressed frames without a table: binary files over files.

    mark | frame | frame | ... | empty frame

Large writes are cut into frames without a copy; small ones are gathered first. The size of the
elements in a stream is unknown, and guessed by samples.
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

_DIRECT_SHARE = 4
"""Writes of less than this part of a frame are gathered."""


class StreamWriter(io.RawIOBase):
    """A file that compresses what is written to it into another file.

    `flush` writes a frame of the gathered bytes; `close` ends the stream, and closes the other
    file. After an error, or without `close`, the stream has no end, and readers reject it. Memory:
    a few frames.
    """

    def __init__(self, output: IO[bytes], open_codec: Callable[[], Codec]) -> None:
        self._output = output
        self._codec = open_codec()
        self._gathered = bytearray()
        self._num_written = 0
        self._failure: BaseException | None = None
        self._is_started = False
        self._is_ended = False

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written, before compression."""
        self._require_usable()
        return self._num_written

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all bytes of `data`; its memory may change afterwards."""
        self._require_usable()
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        if len(view) * _DIRECT_SHARE >= self._codec.frame_size:
            self._encode_gathered()
            self._encode(view)
        else:
            self._gathered += view
            if len(self._gathered) >= self._codec.frame_size:
                self._encode_gathered()
        self._num_written += len(view)
        return len(view)

    def flush(self) -> None:
        """Write all gathered bytes to the other file, and flush it."""
        if self._is_ended:
            return  # a file flushes itself when it is closed
        self._require_usable()
        self._encode_gathered()
        try:
            self._output.flush()
        except BaseException as exc:
            self._failure = exc
            raise

    def close(self) -> None:
        """End the stream, and close the other file. Closing twice does nothing.

        Raises:
            Exception: The error of an earlier write; the stream has no end.
        """
        if self.closed:
            return
        try:
            self._require_usable()
            self._encode_gathered()
            self._write_output(END_OF_STREAM)
        finally:
            self._is_ended = True
            self._codec.close()
            super().close()
            self._output.close()

    def __del__(self) -> None:
        """Do not close, as files do here: a dropped stream has no end."""

    def _require_usable(self) -> None:
        if self.closed:
            raise ValueError("a compressed stream is written after it was closed")
        if self._failure is not None:
            raise self._failure

    def _encode_gathered(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._encode(memoryview(gathered))

    def _encode(self, view: memoryview) -> None:
        """Write frames; after an error no more are, so that a torn stream is not continued."""
        try:
            for frame in self._codec.encode(view, element_size=0):
                self._write_output(frame)
        except BaseException as exc:
            self._failure = exc
            raise

    def _write_output(self, data: bytes | bytearray) -> None:
        if not self._is_started:
            self._is_started = True
            self._write_output(START_OF_STREAM)
        view = memoryview(data)
        while view:
            # A raw file may write fewer bytes; a file-like object may return None after all.
            num_written = cast("int | None", self._output.write(view))
            view = view[len(view) if num_written is None else num_written :]


class StreamReader(io.RawIOBase):
    """A file that reads the stream of a `StreamWriter`, from beginning to end.

    Memory: a few frames, unless all is read at once. `close` leaves the other file open. Every read
    raises CheckpointCorruptError if a frame is damaged, or the stream is truncated.
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
        """Fill `buffer`, and return the number of bytes; fewer only at the end."""
        self._require_open()
        view, at = memoryview(buffer).cast("B"), 0
        while at < len(view) and self._fill_rest():
            piece = self._rest[: len(view) - at]
            view[at : at + len(piece)] = piece
            self._rest = self._rest[len(piece) :]
            at += len(piece)
        return at

    def readall(self) -> bytes:
        """Return all remaining bytes."""
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
        """Do not close, as files do here: that waits for threads, and this may be any thread."""

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("a compressed stream is read after it was closed")

    def _fill_rest(self) -> bool:
        """Decode a frame if `_rest` is empty; return whether there are more bytes."""
        while not self._rest:
            frame = next(self._frames, None)
            if frame is None:
                self._codec.close()
                return False
            self._rest = memoryview(frame)
        return True

    def _calls(self) -> Iterator[Callable[[], bytearray]]:
        if self._read_source(len(START_OF_STREAM)) != START_OF_STREAM:
            raise CheckpointCorruptError(
                "this is no compressed stream of aioflux, or one of a newer version"
            )
        while (data := self._read_source(HEAD_SIZE_BYTES)) != END_OF_STREAM:
            head = parse_head(data)
            yield partial(_decode, data + self._read_source(head.body_size), head.raw_size)

    def _read_source(self, size: int) -> bytes:
        """Return `size` bytes of the other file."""
        pieces, missing = list[bytes](), size
        while missing:
            piece = self._source.read(missing)
            if not piece:
                raise CheckpointCorruptError(
                    f"a compressed stream is truncated: {missing:,} bytes are missing; load an "
                    "earlier checkpoint"
                )
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


def _decode(stored: bytes, raw_size: int) -> bytearray:
    out = bytearray(raw_size)
    decode_frame(stored, memoryview(out))
    return out

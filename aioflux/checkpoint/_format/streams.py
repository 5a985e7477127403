"""Compressed streams: binary files that compress into, or decompress from, another file.

    start of stream | frame | frame | ... | empty frame

Unlike the commit of a checkpoint, a stream has no frame table. Large writes are cut into frames
without a copy; small writes are gathered first. The size of the elements is unknown, so the codec
guesses it from samples.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterator
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
    from _typeshed import ReadableBuffer, WriteableBuffer

    from aioflux.checkpoint._format.codec import Codec

_GATHERED_SHARE = 4
"""Writes of less than a fourth of a frame are gathered."""


class StreamWriter(io.RawIOBase):
    """A file that compresses written bytes into another file, the output.

    `flush` writes a frame of the gathered bytes. `close` writes the end of the stream, and closes
    the output. After an error, or without `close`, the end is missing, and readers reject the
    stream as truncated. A few frames are in memory.
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
        return True

    def tell(self) -> int:
        """Return the number of bytes written, before compression."""
        self._require_usable()
        return self._num_written

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all bytes of `data`. The caller may change `data` after the call."""
        self._require_usable()
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        if len(view) * _GATHERED_SHARE >= self._codec.frame_size:
            self._encode_gathered()
            self._encode(view)
        else:
            self._gathered += view
            if len(self._gathered) >= self._codec.frame_size:
                self._encode_gathered()
        self._num_written += len(view)
        return len(view)

    def flush(self) -> None:
        """Write a frame of all gathered bytes, and flush the output."""
        if self._is_ended:
            return  # `io.RawIOBase.close` calls `flush`
        self._require_usable()
        self._encode_gathered()
        try:
            self._output.flush()
        except BaseException as exc:
            self._failure = exc
            raise

    def close(self) -> None:
        """Write the end of the stream, and close the output. A second call does nothing.

        Raises:
            Exception: An earlier write failed with this error; the stream stays without its end.
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
        """Do not close: a stream that its caller did not close must stay truncated."""

    def _require_usable(self) -> None:
        if self.closed:
            raise ValueError("cannot write to a compressed stream that is closed")
        if self._failure is not None:
            raise self._failure

    def _encode_gathered(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._encode(memoryview(gathered))

    def _encode(self, view: memoryview) -> None:
        """Write frames. After an error, all later writes fail: a frame may be incomplete."""
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
            # A raw file may write fewer bytes. Some file-like objects write all and return None.
            num_written = cast("int | None", self._output.write(view))
            view = view[len(view) if num_written is None else num_written :]


class StreamReader(io.RawIOBase):
    """A file that decompresses the stream of a `StreamWriter`. It cannot seek.

    A few frames are in memory, unless the caller reads all bytes at once. `close` does not close
    the source. A read raises CheckpointCorruptError if a frame is damaged, or the stream is
    truncated.
    """

    def __init__(self, source: IO[bytes], open_codec: Callable[[], Codec]) -> None:
        self._source = source
        self._codec = open_codec()
        self._frames: Generator[bytearray] = self._codec.in_order(self._calls())
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer`, and return the number of bytes: fewer only at the end of the stream."""
        self._require_open()
        view, num_read = memoryview(buffer).cast("B"), 0
        while num_read < len(view) and self._fill_pending():
            piece = self._pending[: len(view) - num_read]
            view[num_read : num_read + len(piece)] = piece
            self._pending = self._pending[len(piece) :]
            num_read += len(piece)
        return num_read

    def readall(self) -> bytes:
        self._require_open()
        pending, self._pending = self._pending, memoryview(b"")
        data = b"".join((pending, *self._frames))
        self._codec.close()
        return data

    def close(self) -> None:
        """Stop the threads. The source stays open."""
        if not self.closed:
            super().close()
            self._frames.close()
            self._codec.close()

    def __del__(self) -> None:
        """Do not close: `close` waits for threads, and any thread may run this method."""

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("cannot read from a compressed stream that is closed")

    def _fill_pending(self) -> bool:
        """Decode a frame if `_pending` is empty. Return False at the end of the stream."""
        while not self._pending:
            frame = next(self._frames, None)
            if frame is None:
                self._codec.close()
                return False
            self._pending = memoryview(frame)
        return True

    def _calls(self) -> Iterator[Callable[[], bytearray]]:
        if self._read_source(len(START_OF_STREAM)) != START_OF_STREAM:
            raise CheckpointCorruptError(
                "this is not a compressed stream of aioflux, or a newer aioflux wrote it"
            )
        while (data := self._read_source(HEAD_SIZE_BYTES)) != END_OF_STREAM:
            head = parse_head(data)
            yield partial(_decode, data + self._read_source(head.body_size), head.raw_size)

    def _read_source(self, size: int) -> bytes:
        """Return the next `size` bytes of the source."""
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

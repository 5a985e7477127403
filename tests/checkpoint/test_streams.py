"""Streams of compressed frames: files over files."""

from __future__ import annotations

import gc
import io
import threading
from typing import IO, TYPE_CHECKING, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.checkpoint._format.codec import Codec
from aioflux.checkpoint._format.frames import END_OF_STREAM
from aioflux.checkpoint._format.streams import StreamReader, StreamWriter
from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from typing import Any

pytestmark = pytest.mark.usefixtures("quick_collection")

FRAME_SIZE = 1000


def small() -> Codec:
    return Codec(threads=2, frame_size=FRAME_SIZE)


class Sink(io.BytesIO):
    """A file that keeps its bytes when it is closed, and can fail."""

    def __init__(self, *, room: int = 1 << 30, most: int = 1 << 30) -> None:
        super().__init__()
        self.room = room
        self.most = most
        self.num_flushed = 0
        self.data = b""

    def write(self, data: Any, /) -> int:
        piece = memoryview(data)[: self.most]
        if self.tell() + len(piece) > self.room:
            raise OSError(28, "No space left on device")
        return super().write(piece)

    def flush(self) -> None:
        self.num_flushed += 1

    def close(self) -> None:
        if not self.closed:
            self.data = self.getvalue()
        super().close()


def read(data: bytes) -> bytes:
    return StreamReader(io.BytesIO(data), small).readall()


def written(*pieces: bytes) -> bytes:
    sink = Sink()
    with StreamWriter(sink, small) as file:
        for piece in pieces:
            file.write(piece)
    return sink.data


@given(
    pieces=st.lists(st.binary(max_size=3000), max_size=8),
    flushes=st.sets(st.integers(0, 8)),
    sizes=st.lists(st.integers(1, 4000), max_size=6),
)
@settings(max_examples=40)
def test_what_is_written_is_read(pieces: list[bytes], flushes: set[int], sizes: list[int]) -> None:
    sink = Sink()
    with StreamWriter(sink, small) as file:
        for index, piece in enumerate(pieces):
            assert file.write(piece) == len(piece)
            if index in flushes:
                file.flush()
        assert file.tell() == sum(map(len, pieces))
    whole = b"".join(pieces)
    with StreamReader(io.BytesIO(sink.data), small) as reader:
        at = 0
        for size in sizes:
            piece = reader.read(size)
            assert piece == whole[at : at + size]
            at += len(piece)
        assert reader.readall() == whole[at:]
        assert reader.read(1) == b""
    assert read(sink.data) == whole


def test_what_was_flushed_is_in_the_other_file() -> None:
    sink = Sink()
    with StreamWriter(sink, small) as file:
        file.write(b"a" * 10)
        assert sink.tell() == 0
        file.flush()
        assert sink.num_flushed == 1
        assert read(sink.getvalue() + END_OF_STREAM) == b"a" * 10
        file.flush()
        assert read(sink.getvalue() + END_OF_STREAM) == b"a" * 10


def frame_threads() -> set[threading.Thread]:
    """Those of codecs, also of streams that other tests dropped."""
    return {each for each in threading.enumerate() if each.name.startswith("aioflux-frames")}


def test_an_empty_write_writes_nothing() -> None:
    sink = Sink()
    with StreamWriter(sink, small) as file:
        assert file.write(b"") == 0
        file.flush()
        assert sink.getvalue() == b""


def test_small_writes_are_gathered_to_frames() -> None:
    sink = Sink()
    with StreamWriter(sink, small) as file:
        for number in range(100):
            file.write(bytes([number]) * 20)
        assert sink.getvalue()
    assert read(sink.data) == b"".join(bytes([number]) * 20 for number in range(100))


def test_a_flush_that_fails_fails_the_stream() -> None:
    class Full(Sink):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    sink = Full()
    file = StreamWriter(sink, small)
    file.write(b"a" * 10)
    for use in (file.flush, file.close):
        with pytest.raises(OSError, match="No space"):
            use()
    with pytest.raises(CheckpointCorruptError):
        read(sink.data)


def test_closing_closes_the_other_file_and_ends_the_threads() -> None:
    before = frame_threads()
    sink = Sink()
    file = StreamWriter(sink, small)
    file.write(bytes(FRAME_SIZE))
    file.close()
    file.close()
    assert sink.closed
    assert frame_threads() <= before
    for use in (file.tell, lambda: file.write(b"a")):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_memory_may_be_used_again_when_a_write_returns() -> None:
    sink = Sink()
    memory = bytearray(b"a" * FRAME_SIZE)
    with StreamWriter(sink, small) as file:
        file.write(memory)
        memory[:] = b"b" * len(memory)
        file.write(memory)
    assert read(sink.data) == b"a" * len(memory) + b"b" * len(memory)


@pytest.mark.parametrize("num_bytes", [10, 5000])
def test_an_error_of_the_other_file_stays(num_bytes: int) -> None:
    sink = Sink(room=0)
    file = StreamWriter(sink, small)

    def write() -> None:
        file.write(bytes(num_bytes))
        file.flush()

    with pytest.raises(OSError, match="No space"):
        write()
    sink.room = 1 << 30
    for use in (lambda: file.write(b"a"), file.flush, file.tell, file.close):
        with pytest.raises(OSError, match="No space"):
            use()
    assert sink.closed
    with pytest.raises(CheckpointCorruptError):
        read(sink.data)


def test_a_stream_that_was_dropped_has_no_end() -> None:
    sink = Sink()
    file = StreamWriter(sink, small)
    file.write(bytes(5000))
    before = sink.getvalue()
    del file
    gc.collect()
    assert not sink.closed
    assert sink.getvalue() == before
    with pytest.raises(CheckpointCorruptError, match="is truncated"):
        read(before)


def test_the_rest_of_a_short_write_is_written() -> None:
    sink = Sink(most=7)
    with StreamWriter(sink, small) as file:
        file.write(b"layer" * 1000)
    assert read(sink.data) == b"layer" * 1000


def test_a_file_that_returns_no_count_has_written_all() -> None:
    class Silent(Sink):
        def write(self, data: Any, /) -> int:
            super().write(data)
            return cast("int", None)

    sink = Silent()
    with StreamWriter(sink, small) as file:
        file.write(b"layer" * 1000)
    assert read(sink.data) == b"layer" * 1000


def test_short_reads_are_continued() -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 3))

    data = written(b"layer" * 1000)
    assert StreamReader(cast("IO[bytes]", Slow(data)), small).readall() == b"layer" * 1000


def test_a_truncated_stream_is_an_error() -> None:
    data = written(b"layer" * 500, b"bias" * 100)
    for end in range(len(data)):
        with pytest.raises(CheckpointCorruptError):
            read(data[:end])


def test_a_flipped_bit_is_an_error() -> None:
    data = written(b"layer" * 500)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(CheckpointCorruptError):
            read(bytes(damaged))


def test_an_empty_stream_is_empty() -> None:
    assert read(written()) == b""


def test_something_else_is_no_stream() -> None:
    with pytest.raises(CheckpointCorruptError, match="not a compressed stream"):
        read(b"PK\3\4" + bytes(100))


def test_a_reader_that_is_closed_reads_no_more() -> None:
    before = frame_threads()
    reader = StreamReader(io.BytesIO(written(bytes(5000))), small)
    assert len(reader.read(10)) == 10
    reader.close()
    reader.close()
    for use in (reader.readall, lambda: reader.read(1)):
        with pytest.raises(ValueError, match="closed"):
            use()
    assert frame_threads() <= before


def test_files_report_their_modes() -> None:
    writer, reader = StreamWriter(Sink(), small), StreamReader(io.BytesIO(b""), small)
    assert (writer.writable(), writer.readable(), writer.seekable()) == (True, False, False)
    assert (reader.readable(), reader.writable(), reader.seekable()) == (True, False, False)
    writer.close()

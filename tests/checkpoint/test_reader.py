"""A reader is a binary file over one generation of one object."""

from __future__ import annotations

import gc
import io
import mmap
import pickle
import weakref
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import aioflux
from aioflux import TransferOptions
from aioflux.checkpoint import open_reader, open_writer
from tests.patience import PATIENT, wait_until

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

pytestmark = pytest.mark.clouds("gs", "s3", "az")

URI = "gs://bucket/run/model.pt"
KEY = "run/model.pt"
KIB = 1024
MIB = 1024 * KIB
SMALL_RANGES = TransferOptions(
    range_size_bytes=64 * KIB, part_size_bytes=5 << 20, max_buffered_bytes=5 << 20
)
DATA = bytes((7 * number + number // 251) % 256 for number in range(4 * KIB)) * 700


class ReaderMachine(RuleBasedStateMachine):
    """A reader does what `io.BytesIO` does; 2.8 MiB in ranges of 64 KiB below a buffer of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        with open_writer("memory://reader/data") as file:
            file.write(DATA)
        self.reader = open_reader("memory://reader/data", transfer=SMALL_RANGES)
        self.model = io.BytesIO(DATA)

    @rule(size=st.none() | st.integers(-1, 3 * len(DATA) // 2) | st.integers(0, 9))
    def read(self, size: int | None) -> None:
        assert self.reader.read(size) == self.model.read(size)

    @rule(size=st.integers(0, 2_000_000) | st.integers(0, 9))
    def readinto(self, size: int) -> None:
        ours, theirs = bytearray(size), bytearray(size)
        assert self.reader.readinto(ours) == self.model.readinto(theirs)
        assert ours == theirs

    @rule()
    def readline(self) -> None:
        assert self.reader.readline() == self.model.readline()

    @rule(position=st.integers(0, len(DATA) + 9))
    def seek(self, position: int) -> None:
        assert self.reader.seek(position) == self.model.seek(position)

    @rule(data=st.data())
    def seek_from_here(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(-self.model.tell(), 100_000))
        assert self.reader.seek(offset, 1) == self.model.seek(offset, 1)

    @rule(offset=st.integers(-len(DATA), 9))
    def seek_from_the_end(self, offset: int) -> None:
        assert self.reader.seek(offset, 2) == self.model.seek(offset, 2)

    @invariant()
    def same_position(self) -> None:
        assert self.reader.tell() == self.model.tell()

    def teardown(self) -> None:
        self.reader.close()


TestReaderIsLikeBytesIO = ReaderMachine.TestCase
TestReaderIsLikeBytesIO.settings = settings(max_examples=20, stateful_step_count=25)


def test_a_reader_is_readable_and_seekable(server: GCSServer) -> None:
    server.put("bucket", KEY, b"abc")
    with open_reader(URI) as file:
        assert (file.readable(), file.writable(), file.seekable()) == (True, False, True)
        assert file.uri == URI
        assert file.meta.size == 3
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()


def test_an_object_that_is_not_there_fails_the_opening(server: GCSServer) -> None:
    with pytest.raises(aioflux.NotFoundError) as caught:
        open_reader(URI)
    assert caught.value.uri == URI


def test_reads_see_one_generation(server: GCSServer) -> None:
    options = TransferOptions(
        range_size_bytes=64 * KIB, part_size_bytes=5 * MIB, max_buffered_bytes=5 * MIB
    )
    server.put("bucket", KEY, 4 * DATA)
    with open_reader(URI, transfer=options) as file:
        file.read(10)
        server.put("bucket", KEY, bytes(len(DATA)))
        file.seek(0)
        with pytest.raises(aioflux.NotFoundError, match=URI):
            file.read()


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_all_bytes_together_are_verified_in_any_order(server: GCSServer, order: str) -> None:
    server.put("bucket", KEY, DATA)
    server.faults.add("objects.media", flip_at=100)
    positions = list(range(0, len(DATA), 100_000))
    # Ranges that are read twice are right one by one.
    once = replace(SMALL_RANGES, verify_ranges=False)

    def read_all() -> None:
        with open_reader(URI, transfer=once) as file:
            for position in positions if order == "forwards" else reversed(positions):
                file.seek(position)
                file.read(100_000)

    with pytest.raises(aioflux.ChecksumError, match=URI):
        read_all()


@pytest.mark.clouds("gs")
def test_small_reads_cost_no_request_each(server: GCSServer) -> None:
    server.put("bucket", KEY, DATA[: 512 * KIB])
    with open_reader(URI, timeouts=PATIENT) as file:
        while file.read(7):
            pass
    assert server.stats.total.requests == 2


@pytest.mark.clouds("gs")
@pytest.mark.usefixtures("quick_collection")
def test_a_dropped_reader_leaves_nothing_behind(server: GCSServer) -> None:
    server.put("bucket", KEY, DATA)
    file = open_reader(URI)
    file.read(10)
    assert server.stats.connections_open
    dropped = weakref.ref(file.raw)
    del file
    gc.collect()
    assert dropped() is None
    wait_until(lambda: not server.stats.connections_open)  # the server hears of it a moment later


def test_closing_twice_does_nothing(server: GCSServer) -> None:
    server.put("bucket", KEY, b"abc")
    with open_reader(URI) as file:
        file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read()


def test_an_empty_object_reads_as_nothing(server: GCSServer) -> None:
    server.put("bucket", KEY, b"")
    with open_reader(URI) as file:
        assert file.read() == b""
        assert file.seek(0, 2) == 0


def test_pickle_and_zipfile_read_from_it(server: GCSServer) -> None:
    server.put("bucket", KEY, pickle.dumps({"step": 7, "data": DATA}))
    with open_reader(URI) as file:
        assert pickle.load(file) == {"step": 7, "data": DATA}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("a", DATA)
    server.put("bucket", KEY, archive.getvalue())
    with open_reader(URI) as file, zipfile.ZipFile(file) as reader:
        assert reader.read("a") == DATA


@pytest.mark.clouds("gs")
def test_memory_is_bounded_by_the_window(server: GCSServer) -> None:
    """Nothing is fetched beyond `max_buffered_bytes` without a read."""
    server.put("bucket", KEY, bytes(32 << 20))
    options = TransferOptions(
        range_size_bytes=1 << 20, part_size_bytes=5 << 20, max_buffered_bytes=8 << 20
    )
    with open_reader(URI, transfer=options, timeouts=PATIENT) as file:
        for _ in range(32):
            file.read(1 << 20)
    assert server.stats.operation("objects.get").peak_in_flight <= 9


@pytest.mark.parametrize("opens", [open_writer, open_reader])
def test_a_uri_without_a_key_is_rejected(opens: type) -> None:
    with pytest.raises(ValueError, match="names no object"):
        opens("gs://bucket/dir/")


@pytest.mark.clouds("gs")
def test_memory_beyond_the_end_of_the_object_is_not_touched() -> None:
    with open_writer("memory://reader/short") as file:
        file.write(b"0123456789")
    with (
        mmap.mmap(-1, 64 * MIB) as memory,
        open_reader("memory://reader/short") as reader,
    ):
        before = resident_bytes()
        assert reader.readinto(memory) == 10
        assert resident_bytes() - before < 32 * MIB


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE

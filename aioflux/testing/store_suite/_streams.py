"""Tests of `open_writer` and `open_reader`."""

from __future__ import annotations

import io
from array import array
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from aioflux.errors import AlreadyExistsError, NotFoundError, PreconditionFailedError
from aioflux.testing.store_suite._base import KIB, OPTIONS, PART, SuiteBase, drain, pattern

if TYPE_CHECKING:
    from aioflux.store import ObjectReader, Store

WRITES: dict[str, list[int]] = {
    "nothing": [],
    "empty": [0],
    "small": [1, 10, 100],
    "one part": [PART],
    "one part in two": [PART - 1, 1],
    "two parts": [PART, PART],
    "a part and a byte": [PART + 1],
    "uneven": [3, PART, 1_000_000, 2 * PART - 7],
    "from the caller's memory": [10, 4 * PART + 5, 3],
}
"""Sizes in bytes of the writes to one object."""


@pytest.mark.asyncio
class WriterContract(SuiteBase):
    """Tests of objects that are written in pieces."""

    async def _write_and_fail(self, store: Store, size: int, *, mode: Any) -> None:
        async with store.open_writer("a", mode=mode) as writer:
            await writer.write(pattern(size))
            raise ZeroDivisionError

    async def _write_too_late(self, store: Store, size: int) -> None:
        async with store.open_writer("b", mode="create") as writer:
            await writer.write(pattern(size))
            self.write_back_door("b", b"first")

    async def _write_alternately(self, store: Store) -> None:
        async with store.open_writer("a") as first:
            await first.write(pattern(2 * PART + 1))
            async with store.open_writer("a") as second:
                await second.write(pattern(PART + 2, seed=1))

    @pytest.mark.parametrize("sizes", WRITES.values(), ids=WRITES)
    async def test_a_writer_concatenates_its_writes(self, store: Store, sizes: list[int]) -> None:
        """The object has all bytes, and is not visible before the end of the `with` block."""
        pieces = [pattern(size, seed=index) for index, size in enumerate(sizes)]
        written = 0
        async with store.open_writer("d/a") as writer:
            for piece in pieces:
                assert await writer.write(piece) == len(piece)
                written += len(piece)
                assert writer.tell() == written
            assert self.is_absent("d/a")
        assert self.read_back_door("d/a") == b"".join(pieces)
        head = await store.head("d/a")
        assert (writer.meta.key, writer.meta.size) == ("d/a", written)
        assert (writer.meta.generation, writer.meta.crc32c) == (head.generation, head.crc32c)

    async def test_a_writer_accepts_any_memory_which_may_change_afterwards(
        self, store: Store
    ) -> None:
        """The caller may change the memory after `write`: the bytes are copied or already sent."""
        numbers = array("i", [1, 2, 3])
        large = bytearray(pattern(4 * PART))
        expected = numbers.tobytes() + bytes(large)
        async with store.open_writer("a") as writer:
            assert await writer.write(memoryview(numbers)) == 12
            numbers[0] = 9
            await writer.write(large)
            large[:] = bytes(len(large))
        assert self.read_back_door("a") == expected

    @pytest.mark.parametrize("size", [10, 3 * PART])
    @pytest.mark.parametrize("mode", ["overwrite", "create"])
    async def test_an_exception_publishes_nothing(self, store: Store, size: int, mode: Any) -> None:
        """If the `with` block raises, no object and no temporary object remains."""
        with pytest.raises(ZeroDivisionError):
            await self._write_and_fail(store, size, mode=mode)
        assert self.is_absent("a")
        assert await store.list_all() == []

    @pytest.mark.parametrize("size", [10, 3 * PART])
    async def test_an_exception_leaves_the_old_object(self, store: Store, size: int) -> None:
        self.write_back_door("a", b"old")
        with pytest.raises(ZeroDivisionError):
            await self._write_and_fail(store, size, mode="overwrite")
        assert self.read_back_door("a") == b"old"

    @pytest.mark.parametrize("size", [0, 10, 2 * PART + 1])
    async def test_a_creating_writer_never_replaces(self, store: Store, size: int) -> None:
        """`mode="create"` fails at the end if another writer has created the object meanwhile."""
        async with store.open_writer("a", mode="create") as writer:
            await writer.write(pattern(size))
        assert self.read_back_door("a") == pattern(size)
        with pytest.raises(AlreadyExistsError, match=r"/b\b"):
            await self._write_too_late(store, size)
        assert self.read_back_door("b") == b"first"
        assert [meta.key for meta in await store.list_all()] == ["a", "b"]

    @pytest.mark.parametrize("size", [0, 10, 2 * PART + 1])
    async def test_a_conditional_writer_replaces_only_that_generation(
        self, store: Store, size: int
    ) -> None:
        """`if_generation_match` is checked at the end of the `with` block."""
        self.write_back_door("a", b"old")
        generation = (await store.head("a")).generation
        async with store.open_writer("a", if_generation_match=generation) as writer:
            await writer.write(pattern(size))
        assert self.read_back_door("a") == pattern(size)
        with pytest.raises(PreconditionFailedError):
            async with store.open_writer("a", if_generation_match=generation) as writer:
                await writer.write(pattern(size, seed=1))
        assert self.read_back_door("a") == pattern(size)
        assert [meta.key for meta in await store.list_all()] == ["a"]

    async def test_a_writer_that_has_ended_rejects_writes(self, store: Store) -> None:
        async with store.open_writer("a") as writer:
            await writer.write(b"1")
        with pytest.raises(ValueError, match="writer is closed"):
            await writer.write(b"2")
        assert self.read_back_door("a") == b"1"

    async def test_two_writers_do_not_mix(self, store: Store) -> None:
        """The object has all bytes of the writer that was closed last, and no other bytes."""
        self.require("keeps_uploads_apart")
        async with store.open_writer("a") as first:
            await first.write(pattern(PART + 1))
            async with store.open_writer("a") as second:
                await second.write(pattern(PART + 2, seed=1))
            assert self.read_back_door("a") == pattern(PART + 2, seed=1)
        assert self.read_back_door("a") == pattern(PART + 1)

    async def test_of_two_writers_the_first_may_win(self, store: Store) -> None:
        """On services that keep one upload per key, the second writer to close raises."""
        if self.can.keeps_uploads_apart:
            pytest.skip("on this service the writer that was closed last wins")
        with pytest.raises(PreconditionFailedError, match=r"/a\b"):
            await self._write_alternately(store)
        assert self.read_back_door("a") == pattern(PART + 2, seed=1)


async def _pieces(reader: ObjectReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(300_000):
        yield piece


@pytest.mark.asyncio
class ReaderContract(SuiteBase):
    """Tests of objects that are read in pieces."""

    @pytest.mark.parametrize("size", [0, 1, 64 * KIB, 200 * KIB])
    async def test_a_reader_returns_the_bytes_in_order(self, store: Store, size: int) -> None:
        """`read` returns up to the given number of bytes, and `b""` at the end of the object."""
        data = pattern(size)
        self.write_back_door("a", data)
        for step in (7_001, 64 * KIB, 1 << 30, -1):
            async with store.open_reader("a") as reader:
                assert reader.meta.size == size
                pieces: list[bytes] = []
                while piece := await reader.read(step):
                    assert (
                        len(piece) == step or len(b"".join(pieces)) + len(piece) == size or step < 0
                    )
                    pieces.append(piece)
                    assert reader.tell() == len(b"".join(pieces))
                assert b"".join(pieces) == data
                assert await reader.read(0) == b""

    async def test_a_reader_fills_memory(self, store: Store) -> None:
        """`readinto` fills writable memory, up to the end of the object."""
        data = pattern(100_003)
        self.write_back_door("a", data)
        async with store.open_reader("a") as reader:
            numbers = array("i", [0] * 25_000)
            assert await reader.readinto(memoryview(numbers)) == 100_000
            assert numbers.tobytes() == data[:100_000]
            rest = bytearray(10)
            assert await reader.readinto(memoryview(rest)) == 3
            assert rest[:3] == data[100_000:]
            assert await reader.readinto(memoryview(rest)) == 0

    async def test_a_reader_seeks(self, store: Store) -> None:
        """`seek` works as `io.IOBase.seek`; a read beyond the end returns no bytes."""
        data = pattern(200 * KIB)
        self.write_back_door("a", data)
        async with store.open_reader("a") as reader:
            assert reader.seek(150 * KIB) == 150 * KIB
            assert await reader.read(10) == data[150 * KIB : 150 * KIB + 10]
            assert reader.seek(-20, io.SEEK_CUR) == reader.tell() == 150 * KIB - 10
            assert await reader.read(5) == data[150 * KIB - 10 : 150 * KIB - 5]
            assert reader.seek(-3, io.SEEK_END) == 200 * KIB - 3
            assert await reader.read() == data[-3:]
            reader.seek(300 * KIB)
            assert await reader.read() == b""
            reader.seek(0)
            assert await reader.read() == data
            for offset, whence in ((-1, io.SEEK_SET), (-(1 << 30), io.SEEK_END), (0, 5)):
                with pytest.raises(ValueError, match=r"byte -|whence"):
                    reader.seek(offset, whence)

    async def test_a_reader_is_pinned(self, store: Store) -> None:
        """A reader of an object that is replaced meanwhile raises, and returns only old bytes."""
        data = pattern(OPTIONS.max_buffered_bytes + 1_000_000)
        self.write_back_door("a", data)
        received: list[bytes] = []
        async with store.open_reader("a") as reader:
            received.append(await reader.read(10))
            self.write_back_door("a", pattern(len(data), seed=1))
            with pytest.raises(NotFoundError, match=r"/a\b"):
                await drain(_pieces(reader), received)
        assert data.startswith(b"".join(received))

    async def test_a_reader_of_listed_metadata_is_pinned_to_it(self, store: Store) -> None:
        """A reader that was opened by listed metadata reads the listed generation only."""
        self.write_back_door("a", b"old")
        [meta] = await store.list_all()
        self.write_back_door("a", b"new")
        async with store.open_reader(meta) as reader:
            with pytest.raises(NotFoundError):
                await reader.read()

    async def test_a_reader_needs_an_object(self, store: Store) -> None:
        with pytest.raises(NotFoundError, match="missing"):
            async with store.open_reader("missing"):
                pass

    async def test_a_closed_reader_raises(self, store: Store) -> None:
        self.write_back_door("a", b"1")
        async with store.open_reader("a") as reader:
            pass
        with pytest.raises(ValueError, match="closed reader"):
            await reader.read()

"""Tests of `head`, `get`, `get_into`, `get_range` and `get_ranges`."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest

from aioflux.errors import NotFoundError
from aioflux.testing.store_suite._base import KIB, SuiteBase, pattern

if TYPE_CHECKING:
    from aioflux.store import Store

SIZES = [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 200 * KIB]
"""Sizes around the size of one range."""


@pytest.mark.asyncio
class ReadContract(SuiteBase):
    """Tests of reads of one object."""

    async def test_head_returns_key_uri_size_and_generation(self, store: Store) -> None:
        """`head` also returns the time of the last update, with a time zone."""
        self.write_back_door("a/b.bin", b"12345")
        meta = await store.head("a/b.bin")
        assert (meta.key, meta.size) == ("a/b.bin", 5)
        assert meta.uri.startswith(store.uri)
        assert meta.uri.endswith("/a/b.bin")
        assert meta.generation
        assert meta.updated is not None
        assert meta.updated.utcoffset() is not None

    async def test_head_returns_the_checksum(self, store: Store) -> None:
        self.require("has_checksums")
        self.write_back_door("a", b"123456789")
        assert (await store.head("a")).crc32c == 0xE3069283  # RFC 3720, B.4

    async def test_generations_change_with_the_bytes(self, store: Store) -> None:
        """An overwrite changes the generation, even if the size stays the same."""
        generations = set()
        for data in (b"1", b"2", b"3"):
            self.write_back_door("a", data)
            generations.add((await store.head("a")).generation)
        assert len(generations) == 3

    @pytest.mark.parametrize("size", SIZES)
    async def test_get_returns_the_bytes(self, store: Store, size: int) -> None:
        """`get` reads whole objects of any size, by key or by the metadata of `head`."""
        data = pattern(size)
        self.write_back_door("a", data)
        for key in ("a", await store.head("a")):
            result = await store.get(key)
            assert type(result) is bytes
            assert result == data

    @pytest.mark.parametrize("size", [0, 1, 200 * KIB])
    async def test_pinned_reads_never_return_other_bytes(self, store: Store, size: int) -> None:
        """A read by metadata raises NotFoundError if the object was replaced since `head`."""
        self.write_back_door("a", pattern(size))
        meta = await store.head("a")
        self.write_back_door("a", pattern(size, seed=1) or b"x")
        with pytest.raises(NotFoundError):
            await store.get(meta)
        with pytest.raises(NotFoundError):
            await store.get_range(meta, start=0, end=max(size, 1))
        with pytest.raises(NotFoundError):
            await store.head(meta)
        if size:
            with pytest.raises(NotFoundError):
                await store.get_into(meta, bytearray(size))

    async def test_exists(self, store: Store) -> None:
        """`exists` is about a key, or about the generation in metadata."""
        self.write_back_door("d/a", b"1")
        meta = await store.head("d/a")
        assert await store.exists("d/a")
        assert await store.exists(meta)
        assert not await store.exists("missing")
        self.write_back_door("d/a", b"22")
        assert not await store.exists(meta)

    async def test_missing_objects_are_not_found(self, store: Store) -> None:
        """Every read of a missing object raises NotFoundError with the full uri."""
        reads: list[Callable[[], Awaitable[object]]] = [
            lambda: store.head("no/such"),
            lambda: store.get("no/such"),
            lambda: store.get_into("no/such", bytearray(1)),
            lambda: store.get_range("no/such", start=0, end=1),
            lambda: store.get_range("no/such", start=0, end=1 << 40),
        ]
        for read in reads:
            with pytest.raises(NotFoundError, match="no/such") as failure:
                await read()
            assert failure.value.uri.startswith(store.uri)
            assert failure.value.uri.endswith("/no/such")

    async def test_a_key_is_not_a_directory(self, store: Store) -> None:
        """If only `a/b` exists, reading `a` or `a/b/c` raises NotFoundError."""
        self.write_back_door("a/b", b"1")
        for key in ("a", "a/b/c"):
            with pytest.raises(NotFoundError):
                await store.get(key)
            with pytest.raises(NotFoundError):
                await store.head(key)

    @pytest.mark.parametrize("size", [0, 1, 100 * KIB])
    @pytest.mark.parametrize("extra", [0, 7])
    async def test_get_into_fills_the_buffer(self, store: Store, size: int, extra: int) -> None:
        """`get_into` does not change the buffer beyond the end of the object."""
        data = pattern(size)
        self.write_back_door("a", data)
        for key in ("a", await store.head("a")):
            buffer = bytearray(b"\xff" * (size + extra))
            assert await store.get_into(key, buffer) == size
            assert buffer == data + b"\xff" * extra

    async def test_get_into_reads_a_part(self, store: Store) -> None:
        """`get_into` fills the buffer with the bytes from `start` on."""
        data = pattern(200 * KIB)
        self.write_back_door("a", data)
        for key in ("a", await store.head("a")):
            for start, size in ((0, 10), (5, 100 * KIB), (200 * KIB - 3, 10), (300 * KIB, 10)):
                buffer = bytearray(size)
                expected = data[start : start + size]
                assert await store.get_into(key, buffer, start=start) == len(expected)
                assert buffer[: len(expected)] == expected

    async def test_get_into_accepts_memory_of_any_format(self, store: Store) -> None:
        """`get_into` treats any buffer as bytes, whatever the format of its items."""
        data = pattern(16)
        self.write_back_door("a", data)
        numbers = array("i", [0] * 4)
        assert await store.get_into("a", memoryview(numbers)) == 16
        assert numbers.tobytes() == data

    async def test_get_into_rejects_read_only_memory(self, store: Store) -> None:
        """`get_into` raises a ValueError for read-only memory and for a negative `start`."""
        self.write_back_door("a", b"1")
        with pytest.raises(ValueError, match="writable memory"):
            await store.get_into("a", memoryview(b"0"))
        with pytest.raises(ValueError, match="-1"):
            await store.get_into("a", bytearray(1), start=-1)

    @pytest.mark.parametrize(
        ("start", "end"),
        [
            (0, 1),
            (0, 200 * KIB),
            (10, 20),
            (64 * KIB - 1, 64 * KIB + 1),
            (1, 150 * KIB),
            (199 * KIB, 1 << 40),
            (0, 1 << 62),
            (200 * KIB, 200 * KIB + 1),
            (1 << 40, (1 << 40) + 1),
        ],
    )
    async def test_get_range_is_half_open_and_ends_with_the_object(
        self, store: Store, start: int, end: int
    ) -> None:
        """`get_range` returns the bytes `[start, end)`, fewer if the object ends first."""
        data = pattern(200 * KIB)
        self.write_back_door("a", data)
        result = await store.get_range("a", start=start, end=end)
        assert type(result) is bytes
        assert result == data[start:end]
        assert await store.get_range(await store.head("a"), start=start, end=end) == data[start:end]

    async def test_get_range_of_an_empty_object_is_empty(self, store: Store) -> None:
        self.write_back_door("a", b"")
        assert await store.get_range("a", start=0, end=10) == b""

    @pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, 5), (6, 5)])
    async def test_get_range_rejects_an_empty_range(
        self, store: Store, start: int, end: int
    ) -> None:
        """A range with a negative start, or an end not above the start, raises a ValueError."""
        with pytest.raises(ValueError, match=rf"\[{start}, {end}\)"):
            await store.get_range("a", start=start, end=end)

    async def test_get_ranges_returns_them_in_order(self, store: Store) -> None:
        """Ranges may be in any order, overlap, repeat, and extend beyond the object."""
        data = pattern(200 * KIB)
        self.write_back_door("a", data)
        ranges = [
            (150 * KIB, 150 * KIB + 7),
            (0, 10),
            (5, 20),
            (0, 10),
            (100 * KIB, 100 * KIB + 1),
            (199 * KIB, 1 << 40),
            (200 * KIB, 200 * KIB + 1),
            (1, 150 * KIB),
        ]
        expected = [data[start:end] for start, end in ranges]
        for key in ("a", await store.head("a")):
            for max_gap_bytes in (0, 1000, 1 << 20):
                result = await store.get_ranges(key, ranges, max_gap_bytes=max_gap_bytes)
                assert {type(part) for part in result} == {bytes}
                assert result == expected
            assert await store.get_ranges(key, ranges) == expected
            assert await store.get_ranges(key, []) == []

    async def test_get_ranges_is_pinned_as_other_reads(self, store: Store) -> None:
        """`get_ranges` raises NotFoundError for a replaced object and for a missing object."""
        self.write_back_door("a", pattern(100))
        meta = await store.head("a")
        self.write_back_door("a", pattern(100, seed=1))
        for ranges in ([(0, 1)], [(0, 1), (90, 100)]):
            with pytest.raises(NotFoundError):
                await store.get_ranges(meta, ranges, max_gap_bytes=0)
            with pytest.raises(NotFoundError, match="no/such"):
                await store.get_ranges("no/such", ranges, max_gap_bytes=0)

    async def test_get_ranges_rejects_an_empty_range(self, store: Store) -> None:
        """`get_ranges` checks all ranges before the first read."""
        for start, end in ((-1, 5), (5, 5), (6, 5)):
            with pytest.raises(ValueError, match=rf"\[{start}, {end}\)"):
                await store.get_ranges("a", [(0, 1), (start, end)])
        with pytest.raises(TypeError):
            await store.get_ranges("a", [(0.5, 1)])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="max_gap_bytes must be 0 or more, not -1"):
            await store.get_ranges("a", [(0, 1)], max_gap_bytes=-1)

    async def test_invalid_keys_are_rejected(self, store: Store) -> None:
        """An empty key raises a ValueError, and a key that is not a `str` raises a TypeError."""
        with pytest.raises(ValueError, match="empty"):
            await store.get("")
        with pytest.raises(TypeError, match="bytes"):
            await store.get(b"a")  # type: ignore[arg-type]

    async def test_a_closed_store_raises(self) -> None:
        """Using a closed store raises a ValueError; closing it again does nothing."""
        store = self.opened()
        await store.aclose()
        await store.aclose()
        with pytest.raises(ValueError, match="closed"):
            await store.head("a")

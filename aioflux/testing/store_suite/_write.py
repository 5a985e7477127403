"""Tests of `put`."""

from __future__ import annotations

import gzip
from array import array
from typing import TYPE_CHECKING, Any

import pytest

from aioflux.errors import AlreadyExistsError, PreconditionFailedError, UnsupportedError
from aioflux.testing.store_suite._base import PART, SuiteBase, pattern

if TYPE_CHECKING:
    from aioflux.store import Store

SIZES = [0, 1, 100_000, PART, PART + 1, 4 * PART + 1]
"""Sizes around one part, and a size so large that parts are sent from the caller's memory."""

SIZES_BY_REQUEST = [1, PART + 1, 4 * PART + 1]
"""One size for each path of an upload: one request, copied parts, parts without a copy."""


@pytest.mark.asyncio
class WriteContract(SuiteBase):
    """Tests of writes of whole objects."""

    @pytest.mark.parametrize("size", SIZES)
    async def test_put_stores_the_bytes(self, store: Store, size: int) -> None:
        """`put` stores objects of any size and returns the same metadata as `head`."""
        data = pattern(size)
        meta = await store.put("d/a", data)
        assert self.read_back_door("d/a") == data
        head = await store.head("d/a")
        assert (meta.key, meta.size) == ("d/a", size)
        for name in ("key", "uri", "size", "generation", "crc32c", "content_type"):
            assert getattr(meta, name) == getattr(head, name), name

    @pytest.mark.parametrize(
        "data",
        [
            bytearray(b"abcdefgh"),
            memoryview(b"xxabcdefghxx")[2:10],
            memoryview(array("i", [1, 2])),
            array("d", [1.0]),
        ],
        ids=["bytearray", "slice", "ints", "array"],
    )
    async def test_put_accepts_any_memory(self, store: Store, data: Any) -> None:
        """`put` accepts every bytes-like object, whatever the format of its items."""
        meta = await store.put("a", data)
        assert meta.size == 8
        assert self.read_back_door("a") == memoryview(data).tobytes()

    @pytest.mark.parametrize("data", ["text", None, 5])
    async def test_put_rejects_other_types(self, store: Store, data: Any) -> None:
        """`put` raises a TypeError for text, because the caller must choose the encoding."""
        with pytest.raises(TypeError, match="bytes-like"):
            await store.put("a", data)
        assert self.is_absent("a")

    async def test_put_replaces_by_default(self, store: Store) -> None:
        """A second `put` to a key replaces the bytes and makes a new generation."""
        first = await store.put("a", b"1")
        second = await store.put("a", b"22")
        assert self.read_back_door("a") == b"22"
        assert first.generation != second.generation

    @pytest.mark.parametrize("size", SIZES_BY_REQUEST)
    async def test_create_never_replaces(self, store: Store, size: int) -> None:
        """`mode="create"` raises AlreadyExistsError and writes nothing if the object exists."""
        data = pattern(size)
        await store.put("a", data, mode="create")
        with pytest.raises(AlreadyExistsError, match=r"/a\b") as failure:
            await store.put("a", pattern(size, seed=1), mode="create")
        assert failure.value.uri.endswith("/a")
        assert self.read_back_door("a") == data
        assert [meta.key for meta in await store.list_all()] == ["a"]

    @pytest.mark.parametrize("size", SIZES_BY_REQUEST)
    async def test_if_generation_match_replaces_only_this_generation(
        self, store: Store, size: int
    ) -> None:
        self.write_back_door("a", b"old")
        generation = (await store.head("a")).generation
        data = pattern(size)
        await store.put("a", data, if_generation_match=generation)
        with pytest.raises(PreconditionFailedError, match=r"/a\b"):
            await store.put("a", pattern(size, seed=1), if_generation_match=generation)
        assert self.read_back_door("a") == data
        assert [meta.key for meta in await store.list_all()] == ["a"]

    async def test_if_generation_match_needs_an_object(self, store: Store) -> None:
        self.write_back_door("a", b"old")
        generation = (await store.head("a")).generation
        await store.delete("a")
        with pytest.raises(PreconditionFailedError):
            await store.put("a", b"new", if_generation_match=generation)
        assert self.is_absent("a")

    async def test_invalid_modes_are_rejected(self, store: Store) -> None:
        """An unknown mode, an empty key, or two conditions that conflict raise a ValueError."""
        with pytest.raises(ValueError, match="append"):
            await store.put("a", b"", mode="append")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="exclude each other"):
            await store.put("a", b"", mode="create", if_generation_match="1")
        with pytest.raises(ValueError, match="empty"):
            await store.put("", b"")
        assert await store.list_all() == []

    @pytest.mark.parametrize("size", [3, PART + 1])
    @pytest.mark.parametrize("mode", ["overwrite", "create"])
    async def test_metadata_is_kept_with_lower_case_names(
        self, store: Store, size: int, mode: Any
    ) -> None:
        """`put` and `head` return the content type, and metadata with lower-case names."""
        self.require("keeps_metadata")
        labels = {"label": "cat 7", "RunId": "Cat 7"}
        stored = await store.put(
            "a", pattern(size), mode=mode, content_type="image/png", metadata=labels
        )
        for meta in (stored, await store.head("a")):
            assert meta.content_type == "image/png"
            assert dict(meta.metadata) == {"label": "cat 7", "runid": "Cat 7"}

    @pytest.mark.parametrize("size", SIZES_BY_REQUEST)
    async def test_attributes_are_kept(self, store: Store, size: int) -> None:
        """`put` and `head` return all attributes; reads return compressed bytes as they are."""
        self.require("keeps_metadata")
        attributes, data = self.attributes(), gzip.compress(pattern(size))
        stored = await store.put("a", data, **attributes)
        for meta in (stored, await store.head("a")):
            for name, value in attributes.items():
                assert getattr(meta, name) == value or not value, name
        assert await store.get("a") == data
        assert await store.get_range("a", 1, 9) == data[1:9]

    @pytest.mark.parametrize("name", ["cache_control", "content_disposition", "content_encoding"])
    async def test_attributes_are_not_dropped(self, store: Store, name: str) -> None:
        """A store that cannot keep an attribute rejects the write."""
        if self.can.keeps_metadata:
            pytest.skip("the service keeps attributes")
        attributes: dict[str, Any] = {name: "x"}
        with pytest.raises(UnsupportedError, match=name):
            await store.put("a", b"1", **attributes)
        assert self.is_absent("a")

    async def test_metadata_names_that_differ_in_case_only_are_rejected(self, store: Store) -> None:
        """Most services ignore the case of names, so `put` raises a ValueError."""
        with pytest.raises(ValueError, match="both 'Label' and 'label'"):
            await store.put("a", b"1", metadata={"Label": "1", "label": "2"})
        assert await store.list_all() == []

    async def test_an_overwrite_drops_old_metadata(self, store: Store) -> None:
        """An object that is replaced without metadata has none."""
        self.require("keeps_metadata")
        await store.put("a", b"1", metadata={"label": "cat"})
        await store.put("a", b"2")
        assert dict((await store.head("a")).metadata) == {}

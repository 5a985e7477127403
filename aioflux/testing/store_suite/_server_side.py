"""Tests of the operations of the server: `compose`, `copy`, `move`, `delete`, `delete_many`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux.errors import (
    AlreadyExistsError,
    NotFoundError,
    PreconditionFailedError,
    UnsupportedError,
)
from aioflux.testing.store_suite._base import SuiteBase, pattern

if TYPE_CHECKING:
    from aioflux.store import Store


@pytest.mark.asyncio
class ServerSideContract(SuiteBase):
    """Tests of operations that do not transfer the bytes of objects."""

    async def test_compose_concatenates_in_order(self, store: Store) -> None:
        """Sources may repeat and may be empty. `compose` does not delete its sources."""
        self.require("composes")
        self.write_all({"s/a": b"aa", "s/b": b"", "s/c": b"c"})
        meta = await store.compose("d/all", ["s/c", "s/a", "s/b", "s/a"])
        assert self.read_back_door("d/all") == b"caaaa"
        assert (meta.key, meta.size) == ("d/all", 5)
        assert meta.generation == (await store.head("d/all")).generation
        assert await store.get("d/all") == b"caaaa"
        assert self.read_back_door("s/a") == b"aa"

    async def test_compose_appends_to_one_of_its_sources(self, store: Store) -> None:
        self.require("composes")
        self.write_all({"log": b"1", "more": b"2"})
        await store.compose("log", ["log", "more"])
        await store.compose("log", ["log", "more"])
        assert self.read_back_door("log") == b"122"

    async def test_compose_has_a_limit_of_sources(self, store: Store) -> None:
        """`compose` of no source, or of too many, raises a ValueError with the limit."""
        self.require("composes")
        limit = self.can.max_compose_sources
        count = min(limit, 32)
        self.write_all({f"s/{index:02}": bytes([index]) for index in range(count)})
        keys = [f"s/{index:02}" for index in range(count)]
        await store.compose("a", keys)
        assert self.read_back_door("a") == bytes(range(count))
        with pytest.raises(ValueError, match=f"1 to {limit}"):
            await store.compose("b", [])
        with pytest.raises(ValueError, match=f"1 to {limit}"):
            await store.compose("b", ["s/00"] * (limit + 1))

    async def test_compose_needs_its_sources(self, store: Store) -> None:
        """`compose` raises NotFoundError if a source is missing or was replaced since `head`."""
        self.require("composes")
        self.write_back_door("a", b"1")
        meta = await store.head("a")
        with pytest.raises(NotFoundError):
            await store.compose("c", ["a", "missing"])
        self.write_back_door("a", b"2")
        with pytest.raises(NotFoundError):
            await store.compose("c", [meta])
        assert self.is_absent("c")

    async def test_compose_honours_conditions(self, store: Store) -> None:
        """`mode="create"` and `if_generation_match` have the same effect as for `put`."""
        self.require("composes")
        self.write_all({"a": b"1", "c": b"old"})
        with pytest.raises(AlreadyExistsError, match=r"/c\b"):
            await store.compose("c", ["a"], mode="create")
        generation = (await store.head("c")).generation
        await store.compose("c", ["c", "a"], if_generation_match=generation)
        with pytest.raises(PreconditionFailedError):
            await store.compose("c", ["a"], if_generation_match=generation)
        assert self.read_back_door("c") == b"old1"
        await store.compose("d", ["a"], mode="create")
        assert self.read_back_door("d") == b"1"

    async def test_compose_sets_metadata(self, store: Store) -> None:
        self.require("composes")
        self.require("keeps_metadata")
        self.write_back_door("a", b"1")
        attributes = {**self.attributes(), "storage_class": ""}
        composed = await store.compose("c", ["a"], metadata={"numRows": "1"}, **attributes)
        for meta in (composed, await store.head("c")):
            assert dict(meta.metadata) == {"numrows": "1"}
            for name, value in attributes.items():
                assert getattr(meta, name) == value or not value, name

    async def test_compose_may_be_unsupported(self, store: Store) -> None:
        """`compose` raises UnsupportedError on a service that cannot concatenate objects."""
        if self.can.composes:
            pytest.skip("the service composes")
        self.write_all({"a": b"1", "c": b"old"})
        with pytest.raises(UnsupportedError, match=r"compose .*/c\b"):
            await store.compose("c", ["a"])
        assert self.read_back_door("c") == b"old"

    @pytest.mark.parametrize("size", [0, 300_000])
    async def test_copy_copies_the_bytes(self, store: Store, size: int) -> None:
        """`copy` writes the bytes under the new key and keeps the source."""
        data = pattern(size)
        self.write_back_door("a", data)
        meta = await store.copy("a", "d/b")
        assert (meta.key, meta.size) == ("d/b", size)
        assert meta.generation == (await store.head("d/b")).generation
        assert self.read_back_door("d/b") == self.read_back_door("a") == data

    async def test_copy_copies_metadata(self, store: Store) -> None:
        self.require("keeps_metadata")
        # Azurite cannot read the source of a copy if it is marked as gzip.
        attributes = {**self.attributes(), "content_encoding": "zstd"}
        await store.put("a", b"1", metadata={"label": "cat"}, **attributes)
        copied, original = await store.copy("a", "b"), await store.head("a")
        assert original.cache_control == "max-age=60"
        for meta in (copied, await store.head("b")):
            for name in (*attributes, "metadata"):
                assert getattr(meta, name) == getattr(original, name), name

    async def test_copy_honours_conditions(self, store: Store) -> None:
        """`copy` fails if the source is missing or was replaced, or the destination exists."""
        self.write_all({"a": b"1", "b": b"old"})
        meta = await store.head("a")
        with pytest.raises(AlreadyExistsError, match=r"/b\b"):
            await store.copy("a", "b", mode="create")
        with pytest.raises(NotFoundError, match="missing"):
            await store.copy("missing", "c")
        self.write_back_door("a", b"2")
        with pytest.raises(NotFoundError):
            await store.copy(meta, "c")
        assert self.read_back_door("b") == b"old"
        assert self.is_absent("c")
        await store.copy("a", "b")
        assert self.read_back_door("b") == b"2"

    async def test_move_renames(self, store: Store) -> None:
        """`move` leaves the object under its new key only, and may replace another object."""
        data = pattern(1000)
        self.write_all({"a": data, "d/b": b"old"})
        meta = await store.move("a", "d/b")
        assert (meta.key, meta.size) == ("d/b", 1000)
        assert meta.generation == (await store.head("d/b")).generation
        assert self.read_back_door("d/b") == data
        assert self.is_absent("a")

    async def test_a_rejected_move_changes_nothing(self, store: Store) -> None:
        """`move` fails if the source is missing or was replaced, or the destination exists."""
        self.write_all({"a": b"1", "b": b"old"})
        meta = await store.head("a")
        with pytest.raises(AlreadyExistsError, match=r"/b\b"):
            await store.move("a", "b", mode="create")
        with pytest.raises(NotFoundError, match="missing"):
            await store.move("missing", "c")
        with pytest.raises(ValueError, match="own name"):
            await store.move("a", "a")
        self.write_back_door("a", b"2")
        with pytest.raises(NotFoundError):
            await store.move(meta, "c")
        assert self.is_absent("c")
        assert self.read_back_door("a") == b"2"
        assert self.read_back_door("b") == b"old"

    async def test_delete_removes_the_object(self, store: Store) -> None:
        """`delete` removes one object; deleting it again raises NotFoundError."""
        self.write_all({"d/a": b"1", "d/b": b"2"})
        await store.delete("d/a")
        assert self.is_absent("d/a")
        assert self.read_back_door("d/b") == b"2"
        with pytest.raises(NotFoundError, match="d/a"):
            await store.delete("d/a")

    async def test_delete_by_metadata_is_conditional(self, store: Store) -> None:
        """`delete` by metadata keeps an object that was replaced since `head`."""
        self.write_back_door("a", b"1")
        meta = await store.head("a")
        self.write_back_door("a", b"2")
        with pytest.raises(PreconditionFailedError, match=r"/a\b"):
            await store.delete(meta)
        assert self.read_back_door("a") == b"2"
        await store.delete(await store.head("a"))
        assert self.is_absent("a")

    async def test_delete_many_returns_the_outcome_of_each_key(self, store: Store) -> None:
        """The result has sorted tuples of deleted and missing keys; missing keys are no errors."""
        keys = [f"d/{index:02}" for index in range(30)]
        self.write_all(dict.fromkeys(keys, b"1"))
        result = await store.delete_many(iter(["x", *reversed(keys), "d/none"]))
        assert result.deleted == tuple(keys)
        assert result.missing == ("d/none", "x")
        assert dict(result.errors) == {}
        assert await store.list_all() == []

    async def test_delete_many_of_nothing_does_nothing(self, store: Store) -> None:
        result = await store.delete_many([])
        assert (result.deleted, result.missing, dict(result.errors)) == ((), (), {})

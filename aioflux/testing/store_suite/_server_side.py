"""Contract of the server-side operations: compose, copy, delete and delete_many."""

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

__all__ = ["ServerSideContract"]


@pytest.mark.asyncio
class ServerSideContract(SuiteBase):
    """Operations that transfer no bytes of objects."""

    async def test_compose_concatenates_in_order(self, store: Store) -> None:
        """Sources may repeat and may be empty; they stay."""
        self.require("composes")
        self.write_all({"s/a": b"aa", "s/b": b"", "s/c": b"c"})
        meta = await store.compose("d/all", ["s/c", "s/a", "s/b", "s/a"])
        assert self.read_back_door("d/all") == b"caaaa"
        assert (meta.key, meta.size) == ("d/all", 5)
        assert meta.generation == (await store.head("d/all")).generation
        assert await store.get("d/all") == b"caaaa"
        assert self.read_back_door("s/a") == b"aa"

    async def test_compose_appends_to_one_of_its_sources(self, store: Store) -> None:
        """The destination may be a source."""
        self.require("composes")
        self.write_all({"log": b"1", "more": b"2"})
        await store.compose("log", ["log", "more"])
        await store.compose("log", ["log", "more"])
        assert self.read_back_door("log") == b"122"

    async def test_compose_has_a_limit_of_sources(self, store: Store) -> None:
        """No source, or more than the service declares, is a ValueError with the limit."""
        self.require("composes")
        most = self.can.max_compose_sources
        count = min(most, 32)
        self.write_all({f"s/{at:02}": bytes([at]) for at in range(count)})
        keys = [f"s/{at:02}" for at in range(count)]
        await store.compose("a", keys)
        assert self.read_back_door("a") == bytes(range(count))
        with pytest.raises(ValueError, match=f"1 to {most}"):
            await store.compose("b", [])
        with pytest.raises(ValueError, match=f"1 to {most}"):
            await store.compose("b", ["s/00"] * (most + 1))

    async def test_compose_needs_its_sources(self, store: Store) -> None:
        """A missing source, or one that was replaced since it was listed, is a NotFoundError."""
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
        """`mode="create"` and `if_generation_match`, as put."""
        self.require("composes")
        self.write_all({"a": b"1", "c": b"old"})
        with pytest.raises(AlreadyExistsError, match=r"/c\b"):
            await store.compose("c", ["a"], mode="create")
        seen = (await store.head("c")).generation
        await store.compose("c", ["c", "a"], if_generation_match=seen)
        with pytest.raises(PreconditionFailedError):
            await store.compose("c", ["a"], if_generation_match=seen)
        assert self.read_back_door("c") == b"old1"
        await store.compose("d", ["a"], mode="create")
        assert self.read_back_door("d") == b"1"

    async def test_compose_sets_metadata(self, store: Store) -> None:
        """Content type and the user's metadata of the result."""
        self.require("composes")
        self.require("keeps_metadata")
        self.write_back_door("a", b"1")
        labels = {"numRows": "1"}
        made = await store.compose("c", ["a"], content_type="text/csv", metadata=labels)
        for meta in (made, await store.head("c")):
            assert (meta.content_type, dict(meta.metadata)) == ("text/csv", {"numrows": "1"})

    async def test_compose_may_be_unsupported(self, store: Store) -> None:
        """A service that cannot compose raises, and does nothing."""
        if self.can.composes:
            pytest.skip("the service composes")
        self.write_all({"a": b"1", "c": b"old"})
        with pytest.raises(UnsupportedError, match=r"compose .*/c\b"):
            await store.compose("c", ["a"])
        assert self.read_back_door("c") == b"old"

    @pytest.mark.parametrize("size", [0, 300_000])
    async def test_copy_copies_the_bytes(self, store: Store, size: int) -> None:
        """Under the new key; the source stays."""
        data = pattern(size)
        self.write_back_door("a", data)
        meta = await store.copy("a", "d/b")
        assert (meta.key, meta.size) == ("d/b", size)
        assert meta.generation == (await store.head("d/b")).generation
        assert self.read_back_door("d/b") == self.read_back_door("a") == data

    async def test_copy_copies_metadata(self, store: Store) -> None:
        """The copy has the content type and metadata of its source."""
        self.require("keeps_metadata")
        await store.put("a", b"1", content_type="image/png", metadata={"label": "cat"})
        await store.copy("a", "b")
        head = await store.head("b")
        assert (head.content_type, dict(head.metadata)) == ("image/png", {"label": "cat"})

    async def test_copy_honours_conditions(self, store: Store) -> None:
        """A pinned source, a missing source, and `mode="create"`."""
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

    async def test_delete_removes_the_object(self, store: Store) -> None:
        """Once: the second time it is a NotFoundError."""
        self.write_all({"d/a": b"1", "d/b": b"2"})
        await store.delete("d/a")
        assert self.is_absent("d/a")
        assert self.read_back_door("d/b") == b"2"
        with pytest.raises(NotFoundError, match="d/a"):
            await store.delete("d/a")

    async def test_delete_by_metadata_is_conditional(self, store: Store) -> None:
        """An object that was replaced since it was seen stays."""
        self.write_back_door("a", b"1")
        seen = await store.head("a")
        self.write_back_door("a", b"2")
        with pytest.raises(PreconditionFailedError, match=r"/a\b"):
            await store.delete(seen)
        assert self.read_back_door("a") == b"2"
        await store.delete(await store.head("a"))
        assert self.is_absent("a")

    async def test_delete_many_returns_the_outcome_of_each_key(self, store: Store) -> None:
        """Deleted and missing keys, sorted; a missing one does not stop the others."""
        keys = [f"d/{at:02}" for at in range(30)]
        self.write_all(dict.fromkeys(keys, b"1"))
        result = await store.delete_many(iter(["x", *reversed(keys), "d/none"]))
        assert result.deleted == tuple(keys)
        assert result.missing == ("d/none", "x")
        assert dict(result.errors) == {}
        assert await store.list_all() == []

    async def test_delete_many_of_nothing_does_nothing(self, store: Store) -> None:
        """No keys, no result, no error."""
        result = await store.delete_many([])
        assert (result.deleted, result.missing, dict(result.errors)) == ((), (), {})

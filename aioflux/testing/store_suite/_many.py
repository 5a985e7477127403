"""Contract of get_many, get_batches, fetch_batches, fetch_composed and put_many."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from aioflux.errors import AlreadyExistsError, NotFoundError
from aioflux.testing.store_suite._base import KIB, OPTIONS, SuiteBase, drain, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux._values.meta import ObjectMeta
    from aioflux.store import Store

__all__ = ["ManyContract"]


def some_objects(count: int) -> dict[str, bytes]:
    """Return objects of sizes around zero, one range and several."""
    sizes = [0, 1, 1000, 64 * KIB, 150 * KIB]
    return {f"n/{at:04}": pattern(sizes[at % 5], seed=at) for at in range(count)}


@pytest.mark.asyncio
class ManyContract(SuiteBase):
    """Many objects at once."""

    @pytest.mark.parametrize("ordered", [True, False])
    async def test_get_many_yields_every_pair_once(self, store: Store, *, ordered: bool) -> None:
        """In the order of the keys with `ordered`."""
        objects = some_objects(40)
        self.write_all(objects)
        got = [pair async for pair in store.get_many(objects, ordered=ordered)]
        assert sorted(got) == sorted(objects.items())
        if ordered:
            assert got == list(objects.items())

    async def test_get_many_accepts_the_metadata_of_a_listing(self, store: Store) -> None:
        """The listed objects are read."""
        objects = some_objects(10)
        self.write_all(objects)
        metas = await store.list_all("n/")
        assert dict([pair async for pair in store.get_many(metas)]) == objects

    async def test_get_many_fails_if_a_listed_object_was_replaced(self, store: Store) -> None:
        """It never yields the bytes of another generation."""
        self.write_back_door("n/1", b"old")
        metas = await store.list_all("n/")
        self.write_back_door("n/1", b"new")
        with pytest.raises(NotFoundError, match="n/1"):
            _ = [pair async for pair in store.get_many(metas)]

    async def test_composed_reads_return_the_same_as_plain_ones(self, store: Store) -> None:
        """In the same order, without leftovers, whether or not the service can compose."""
        self.write_all(some_objects(70))
        metas = await store.list_all()
        expected = [pair async for batch in store.fetch_batches(metas) for pair in batch]
        for most in (1_000_000, 100 * KIB):
            batches = store.fetch_composed(metas, max_composite_bytes=most)
            assert [pair async for batch in batches for pair in batch] == expected
        assert [meta async for meta in store.list("aioflux-composed-objects/")] == []

    async def test_composed_reads_fail_if_a_listed_object_was_replaced(self, store: Store) -> None:
        """The error names it."""
        self.write_all({f"n/{at}": b"old" for at in range(40)})
        metas = await store.list_all("n/")
        self.write_back_door("n/7", b"new")
        with pytest.raises(NotFoundError, match="n/7"):
            _ = [batch async for batch in store.fetch_composed(metas)]
        assert [meta async for meta in store.list("aioflux-composed-objects/")] == []

    async def test_get_many_of_nothing_yields_nothing(self, store: Store) -> None:
        """No keys, no pairs, no error."""
        assert [pair async for pair in store.get_many([])] == []
        assert [pair async for pair in store.get_many(iter(()))] == []

    async def test_get_many_yields_repeated_keys_repeatedly(self, store: Store) -> None:
        """Each key yields one pair."""
        self.write_back_door("a", b"1")
        assert [pair async for pair in store.get_many(["a"] * 20)] == [("a", b"1")] * 20

    async def test_get_many_reads_a_bounded_number_of_keys_ahead(self, store: Store) -> None:
        """The iterable of keys may be endless."""
        self.write_back_door("a", b"1")
        num_yielded = 0

        def keys() -> Iterator[str]:
            nonlocal num_yielded
            while True:
                num_yielded += 1
                yield "a"

        pairs = store.get_many(keys())
        async with aclosing(pairs):
            assert await anext(pairs) == ("a", b"1")
        assert num_yielded <= 4 * OPTIONS.max_in_flight

    @pytest.mark.parametrize("ordered", [True, False])
    async def test_a_failure_is_named_and_ends_the_iteration(
        self, store: Store, *, ordered: bool
    ) -> None:
        """With `ordered`, all pairs before the failure are yielded; none is after it."""
        objects = some_objects(30)
        self.write_all(objects)
        keys = [*objects]
        keys.insert(20, "n/missing")
        got: list[tuple[str, bytes]] = []
        with pytest.raises(NotFoundError) as failure:
            await drain(store.get_many(keys, ordered=ordered), got)
        assert failure.value.uri.endswith("/n/missing")
        if ordered:
            assert got == [(key, objects[key]) for key in keys[:20]]

    async def test_a_failing_iterable_fails_the_iteration_with_its_own_error(
        self, store: Store
    ) -> None:
        """The caller's exception is raised unchanged, after the pairs of the keys before it."""
        self.write_back_door("a", b"1")

        def keys() -> Iterator[str]:
            yield "a"
            raise ZeroDivisionError("the caller's own")

        got: list[tuple[str, bytes]] = []
        with pytest.raises(ZeroDivisionError, match="the caller's own"):
            await drain(store.get_many(keys()), got)
        assert got == [("a", b"1")]

    async def test_an_early_end_leaves_no_task_running(self, store: Store) -> None:
        """A closed iteration has ended its requests, and the store can still be used."""
        objects = some_objects(30)
        self.write_all(objects)
        before = asyncio.all_tasks()
        pairs = store.get_many(objects)
        async with aclosing(pairs):
            await anext(pairs)
        left = asyncio.all_tasks() - before
        if left:
            # Connections that are being opened, which other requests may use.
            _, left = await asyncio.wait(left, timeout=100)
        assert not left
        assert await store.get("n/0002") == objects["n/0002"]

    async def test_two_iterations_may_take_turns(self, store: Store) -> None:
        """An iteration that is not read does not block another one."""
        objects = some_objects(40)
        self.write_all(objects)
        first = store.get_many(objects)
        async with aclosing(first):
            await anext(first)
            assert len([pair async for pair in store.get_many(objects)]) == 40
            assert len([pair async for pair in first]) == 39

    async def test_batches_hold_the_pairs_of_get_many(self, store: Store) -> None:
        """Lists of pairs, none of them empty, in the same order."""
        objects = some_objects(30)
        self.write_all(objects)
        batches = [batch async for batch in store.get_batches(objects)]
        assert all(batches)
        assert [pair for batch in batches for pair in batch] == list(objects.items())

    async def test_fetched_batches_have_the_metadata(self, store: Store) -> None:
        """By key or by metadata of a listing: key, size and generation are those of the bytes."""
        objects = some_objects(10)
        self.write_all(objects)
        for keys in (list(objects), await store.list_all("n/")):
            pairs = [pair async for batch in store.fetch_batches(keys) for pair in batch]
            assert {meta.key: data for meta, data in pairs} == objects
            for meta, data in pairs:
                assert meta.size == len(data)
                assert meta.generation == (await store.head(meta.key)).generation

    async def test_put_many_stores_every_pair(self, store: Store) -> None:
        """Each pair once, its metadata yielded."""
        objects = some_objects(30)
        metas = [meta async for meta in store.put_many(iter(objects.items()))]
        assert sorted(meta.key for meta in metas) == sorted(objects)
        assert {key: self.read_back_door(key) for key in objects} == objects

    async def test_put_many_ends_with_the_first_failure(self, store: Store) -> None:
        """With `mode="create"` the error names the existing object; yielded pairs are stored."""
        self.write_back_door("n/0007", b"old")
        stored: list[ObjectMeta] = []
        with pytest.raises(AlreadyExistsError, match="n/0007"):
            await drain(store.put_many(some_objects(20).items(), mode="create"), stored)
        assert self.read_back_door("n/0007") == b"old"
        assert all(not self.is_absent(meta.key) for meta in stored)

"""Tests of `get_many`, `put_many`, their batches, and `fetch_composed`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from aioflux._values.listing import Listing
from aioflux.errors import AlreadyExistsError, NotFoundError
from aioflux.testing.store_suite._base import KIB, OPTIONS, SuiteBase, drain, pattern

if TYPE_CHECKING:
    from aioflux.store import Store


def make_objects(count: int) -> dict[str, bytes]:
    """Return objects by key, with sizes from 0 bytes to several ranges."""
    sizes = [0, 1, 1000, 64 * KIB, 150 * KIB]
    return {f"n/{index:04}": pattern(sizes[index % 5], seed=index) for index in range(count)}


@pytest.mark.asyncio
class ManyContract(SuiteBase):
    """Tests of reads and writes of many objects."""

    @pytest.mark.parametrize("ordered", [True, False])
    async def test_get_many_yields_every_pair_once(self, store: Store, *, ordered: bool) -> None:
        """`get_many` yields each key with its bytes; `ordered=True` keeps the order of keys."""
        objects = make_objects(40)
        self.write_all(objects)
        pairs_read = [pair async for pair in store.get_many(objects, ordered=ordered)]
        assert sorted(pairs_read) == sorted(objects.items())
        if ordered:
            assert pairs_read == list(objects.items())

    async def test_get_many_accepts_the_metadata_of_a_listing(self, store: Store) -> None:
        objects = make_objects(10)
        self.write_all(objects)
        metas = await store.list_all("n/")
        assert dict([pair async for pair in store.get_many(metas)]) == objects

    async def test_get_many_fails_if_a_listed_object_was_replaced(self, store: Store) -> None:
        """`get_many` never yields bytes of a generation that was not listed."""
        self.write_back_door("n/1", b"old")
        metas = await store.list_all("n/")
        self.write_back_door("n/1", b"new")
        with pytest.raises(NotFoundError, match="n/1"):
            _ = [pair async for pair in store.get_many(metas)]

    async def test_composed_reads_return_the_same_as_plain_ones(self, store: Store) -> None:
        """`fetch_composed` yields the same pairs as `fetch_batches`, and deletes composites."""
        self.write_all(make_objects(70))
        metas = await store.list_all()
        expected = [pair async for batch in store.fetch_batches(metas) for pair in batch]
        for max_bytes in (1_000_000, 100 * KIB):
            batches = store.fetch_composed(metas, max_composite_bytes=max_bytes)
            assert [pair async for batch in batches for pair in batch] == expected
        assert [meta async for meta in store.list("aioflux-composed-objects/")] == []

    async def test_composed_reads_fail_if_a_listed_object_was_replaced(self, store: Store) -> None:
        """`fetch_composed` raises an error that names the replaced object."""
        self.write_all({f"n/{index}": b"old" for index in range(40)})
        metas = await store.list_all("n/")
        self.write_back_door("n/7", b"new")
        with pytest.raises(NotFoundError, match="n/7"):
            _ = [batch async for batch in store.fetch_composed(metas)]
        assert [meta async for meta in store.list("aioflux-composed-objects/")] == []

    @pytest.mark.parametrize("count", [0, 1, 40])
    async def test_try_fetch_all_returns_every_object_in_order(
        self, store: Store, *, count: int
    ) -> None:
        objects = make_objects(count)
        self.write_all(objects)
        tried = await store.try_fetch_all([*objects])
        assert [(meta.key, data) for meta, data in tried if meta is not None] == [*objects.items()]

    @pytest.mark.parametrize("count", [0, 10])
    async def test_try_fetch_all_returns_an_error_in_place_of_a_missing_object(
        self, store: Store, *, count: int
    ) -> None:
        objects = make_objects(count)
        self.write_all(objects)
        *found, (meta, error) = await store.try_fetch_all([*objects, "n/missing"])
        assert [data for _, data in found] == [*objects.values()]
        assert meta is None
        assert isinstance(error, NotFoundError)
        assert error.uri.endswith("/n/missing")

    async def test_try_fetch_all_reads_only_the_listed_generation(self, store: Store) -> None:
        self.write_all({"n/1": b"old", "n/2": b"old"})
        metas = await store.list_all("n/")
        self.write_back_door("n/1", b"new")
        replaced, kept = await store.try_fetch_all([*metas])
        assert isinstance(replaced[1], NotFoundError)
        assert kept == (metas[1], b"old")

    async def test_get_many_of_nothing_yields_nothing(self, store: Store) -> None:
        assert [pair async for pair in store.get_many([])] == []
        assert [pair async for pair in store.get_many(iter(()))] == []

    async def test_get_many_yields_repeated_keys_repeatedly(self, store: Store) -> None:
        self.write_back_door("a", b"1")
        assert [pair async for pair in store.get_many(["a"] * 20)] == [("a", b"1")] * 20

    async def test_get_many_reads_a_bounded_number_of_keys_ahead(self, store: Store) -> None:
        """The iterable of keys may be infinite, because few keys are read in advance."""
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
        """The error names the missing object. `ordered=True` yields all earlier pairs first."""
        objects = make_objects(30)
        self.write_all(objects)
        keys = [*objects]
        keys.insert(20, "n/missing")
        pairs_read: list[tuple[str, bytes]] = []
        with pytest.raises(NotFoundError) as failure:
            await drain(store.get_many(keys, ordered=ordered), pairs_read)
        assert failure.value.uri.endswith("/n/missing")
        if ordered:
            assert pairs_read == [(key, objects[key]) for key in keys[:20]]

    async def test_a_failing_iterable_fails_the_iteration_with_its_own_error(
        self, store: Store
    ) -> None:
        """`get_many` yields the earlier pairs, then raises the exception of the iterable."""
        self.write_back_door("a", b"1")

        def keys() -> Iterator[str]:
            yield "a"
            raise ZeroDivisionError("error of the caller")

        pairs_read: list[tuple[str, bytes]] = []
        with pytest.raises(ZeroDivisionError, match="error of the caller"):
            await drain(store.get_many(keys()), pairs_read)
        assert pairs_read == [("a", b"1")]

    async def test_an_early_end_leaves_no_task_running(self, store: Store) -> None:
        """Closing an iteration cancels its requests, and the store stays usable."""
        objects = make_objects(30)
        self.write_all(objects)
        before = asyncio.all_tasks()
        pairs = store.get_many(objects)
        async with aclosing(pairs):
            await anext(pairs)
        remaining = asyncio.all_tasks() - before
        if remaining:
            # Connect tasks continue: another request may use the connection.
            _, remaining = await asyncio.wait(remaining, timeout=100)
        assert not remaining
        assert await store.get("n/0002") == objects["n/0002"]

    async def test_two_iterations_may_take_turns(self, store: Store) -> None:
        """A paused iteration does not block another iteration."""
        objects = make_objects(40)
        self.write_all(objects)
        first = store.get_many(objects)
        async with aclosing(first):
            await anext(first)
            assert len([pair async for pair in store.get_many(objects)]) == 40
            assert len([pair async for pair in first]) == 39

    async def test_batches_hold_the_pairs_of_get_many(self, store: Store) -> None:
        """`get_batches` yields non-empty lists with the pairs of `get_many`, in order."""
        objects = make_objects(30)
        self.write_all(objects)
        batches = [batch async for batch in store.get_batches(objects)]
        assert all(batches)
        assert [pair for batch in batches for pair in batch] == list(objects.items())

    async def test_fetched_batches_have_the_metadata(self, store: Store) -> None:
        """`fetch_batches` yields metadata of the generation whose bytes were read."""
        objects = make_objects(10)
        self.write_all(objects)
        for keys in (list(objects), await store.list_all("n/")):
            pairs = [pair async for batch in store.fetch_batches(keys) for pair in batch]
            assert {meta.key: data for meta, data in pairs} == objects
            for meta, data in pairs:
                assert meta.size == len(data)
                assert meta.generation == (await store.head(meta.key)).generation

    async def test_put_many_stores_every_pair(self, store: Store) -> None:
        """`put_many` writes every pair and returns a listing of all objects."""
        objects = make_objects(30)
        listing = await store.put_many(iter(reversed(objects.items())))
        assert isinstance(listing, Listing)
        assert [(meta.key, meta.size) for meta in listing] == [
            (key, len(data)) for key, data in sorted(objects.items())
        ]
        assert {key: self.read_back_door(key) for key in objects} == objects

    async def test_put_many_ends_with_the_first_failure(self, store: Store) -> None:
        """The error names the object that exists, and says how many objects were stored."""
        self.write_back_door("n/0007", b"old")
        with pytest.raises(AlreadyExistsError, match=r"n/0007.*put_many had stored \d+ objects"):
            await store.put_many(make_objects(20).items(), mode="create")
        assert self.read_back_door("n/0007") == b"old"

    async def test_put_batches_yields_what_is_stored(self, store: Store) -> None:
        """Non-empty lists with the metadata of each object once."""
        batches = [batch async for batch in store.put_batches(make_objects(20).items())]
        assert all(batches)
        assert sorted(meta.key for batch in batches for meta in batch) == sorted(make_objects(20))

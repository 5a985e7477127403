"""`put_many` and `put_batches`: results, errors, and the memory that they take."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
import aioflux.sync
from aioflux import AlreadyExistsError, Listing
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PAIRS = [("b", b"22"), ("a", b"1")]


@pytest.fixture
def uri() -> str:
    return f"memory://put-many-{uuid.uuid4().hex}/"


async def test_it_stores_all_pairs_and_returns_their_listing(uri: str) -> None:
    async with aioflux.open_store(uri) as store:
        listing = await store.put_many(PAIRS)
        assert isinstance(listing, Listing)
        assert list(listing.keys) == ["a", "b"]
        assert listing == await store.list_all()
        assert await store.put_many([]) == []


def test_the_blocking_one_stores_all_pairs_at_the_call(uri: str) -> None:
    with aioflux.sync.open_store(uri) as store:
        assert store.put_many(iter(PAIRS)) == store.list_all()
        assert list(store.list_all().sizes) == [1, 2]


@pytest.mark.parametrize("kind", ["list", "generator", "asynchronous"])
async def test_the_first_error_says_how_many_objects_were_stored(uri: str, kind: str) -> None:
    options = aioflux.TransferOptions(max_in_flight=1)
    pairs: Any = [(key, b"1") for key in "abcde"]
    if kind == "generator":
        pairs = iter(pairs)
    elif kind == "asynchronous":
        pairs = (pair async for pair in iterate(pairs))
    async with aioflux.open_store(uri, transfer=options) as store:
        await store.put("d", b"other")
        with pytest.raises(AlreadyExistsError, match=r"/d: .*; put_many had stored 3 objects"):
            await store.put_many(pairs, mode="create")
        assert [meta.key async for meta in store.list()] == ["a", "b", "c", "d"]


async def test_an_error_of_the_pairs_says_how_many_objects_were_stored(uri: str) -> None:
    def pairs() -> Iterator[tuple[str, bytes]]:
        yield from PAIRS
        raise LookupError("mine")

    async with aioflux.open_store(uri) as store:
        with pytest.raises(LookupError, match="mine") as raised:
            await store.put_many(pairs())
        assert raised.value.__notes__ == ["put_many had stored 2 objects"]


async def test_batches_are_yielded_as_they_are_stored(uri: str) -> None:
    options = aioflux.TransferOptions(max_in_flight=1)
    async with aioflux.open_store(uri, transfer=options) as store:
        seen = []
        async with aclosing(store.put_batches(iter(PAIRS))) as batches:
            async for batch in batches:
                seen += [meta.key for meta in batch]
                assert all([await store.head(key) for key in seen])
        assert seen == ["b", "a"]


async def iterate(items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


# --- generators that wait for their own results ---------------------------------------------

BOUNDS = [pytest.param(1, id="1 byte"), pytest.param(250, id="two objects"), 1 << 20]


@pytest.mark.parametrize("max_bytes", BOUNDS)
@pytest.mark.parametrize("max_in_flight", [1, 8])
async def test_a_generator_may_wait_for_what_it_yielded_before(
    uri: str, max_bytes: int, max_in_flight: int
) -> None:
    """For each object to be yielded by `put_batches`, before it returns the next pair."""
    options = aioflux.TransferOptions(max_in_flight_bytes=max_bytes, max_in_flight=max_in_flight)
    arrived: dict[str, asyncio.Event] = {f"{number}": asyncio.Event() for number in range(30)}

    async def pairs() -> AsyncIterator[tuple[str, bytes]]:
        for key, event in arrived.items():
            yield key, bytes(100)
            await event.wait()

    async with asyncio.timeout(60), aioflux.open_store(uri, transfer=options) as store:
        async for batch in store.put_batches(pairs()):
            for meta in batch:
                arrived[meta.key].set()
    assert all(event.is_set() for event in arrived.values())


@pytest.mark.parametrize("max_bytes", BOUNDS)
@pytest.mark.parametrize("max_in_flight", [1, 8])
def test_a_blocking_generator_may_wait_until_its_objects_are_stored(
    uri: str, max_bytes: int, max_in_flight: int
) -> None:
    options = aioflux.TransferOptions(max_in_flight_bytes=max_bytes, max_in_flight=max_in_flight)
    with aioflux.sync.open_store(uri, transfer=options) as store:

        def pairs() -> Iterator[tuple[str, bytes]]:
            for number in range(10):
                yield f"{number}", bytes(100)
                while not list(store.list(f"{number}")):
                    pass  # each look takes its turn on the event loop

        assert len(store.put_many(pairs())) == 10


# --- memory ------------------------------------------------------------------------------------


class Bodies:
    """Pairs whose bodies are counted while they exist."""

    def __init__(self, count: int, size: int) -> None:
        self.num_alive = self.max_alive = 0
        self._count, self._size = count, size

    def __iter__(self) -> Iterator[tuple[str, bytearray]]:
        for number in range(self._count):
            body = Body(self._size)
            self.num_alive += 1
            self.max_alive = max(self.max_alive, self.num_alive)
            weakref.finalize(body, self._drop)
            yield f"{number}", body
            del body

    async def awaiting(self) -> AsyncIterator[tuple[str, bytearray]]:
        for pair in self:
            yield pair
            del pair

    def _drop(self) -> None:
        self.num_alive -= 1


class Body(bytearray):
    """Memory that can be referenced weakly."""


@pytest.mark.parametrize("kind", ["plain", "awaiting", "blocking"])
@pytest.mark.parametrize(("max_bytes", "most"), [(1000, 11), (50, 2)])
async def test_the_bodies_of_a_generator_are_bounded_by_their_bytes(
    kind: str, max_bytes: int, most: int
) -> None:
    bodies = Bodies(300, 100)
    transfer = aioflux.TransferOptions(max_in_flight_bytes=max_bytes)
    with GCSServer(buckets=("b",)) as server:
        server.faults.add("objects.insert", delay_seconds=0.002)
        if kind == "blocking":
            with aioflux.sync.open_store(
                "gs://b", endpoint_url=server.url, transfer=transfer
            ) as blocking:
                listing = await asyncio.to_thread(blocking.put_many, iter(bodies))
        else:
            async with aioflux.open_store(
                "gs://b", endpoint_url=server.url, transfer=transfer
            ) as store:
                pairs = iter(bodies) if kind == "plain" else bodies.awaiting()
                listing = await store.put_many(pairs)
    assert len(listing) == 300
    assert most // 2 <= bodies.max_alive <= most


async def test_small_bodies_are_sent_while_a_large_one_is_stored(uri: str) -> None:
    """A body that fills the budget delays the next ones, and all of them are stored."""
    transfer = aioflux.TransferOptions(max_in_flight_bytes=100)
    sizes = [1, 500, 1, 1, 100, 0, 0, 99, 1, 1, 700, 1] * 30
    async with aioflux.open_store(uri, transfer=transfer) as store:
        pairs = ((f"{index}", bytes(size)) for index, size in enumerate(sizes))
        stored = {meta.key: meta.size for meta in await store.put_many(pairs)}
    assert stored == {f"{index}": size for index, size in enumerate(sizes)}

"""store_batches: every object once, bounded, and nothing that runs on after the end."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

import aioflux
from aioflux.data import jsonl, store_batches
from tests.data.transforms import key_of, refuse, text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

    from aioflux.data import Sample
    from tests.data.conftest import Bucket


async def take_all(batches: AsyncIterable[list[str]], seen: list[str]) -> None:
    async for batch in batches:
        seen += batch


@pytest_asyncio.fixture
async def store(bucket: Bucket) -> AsyncIterator[aioflux.Store]:
    async with aioflux.open_store(bucket.uri) as opened:
        yield opened


async def test_batches_hold_what_the_transform_made_in_order(
    bucket: Bucket, store: aioflux.Store
) -> None:
    keys = bucket.fill(23)
    batches = [batch async for batch in store_batches(store, keys, batch_size=5, transform=text_of)]
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert [item for batch in batches for item in batch] == [
        (key, f"data of {key}") for key in keys
    ]


async def test_as_they_complete_every_object_comes_once(
    bucket: Bucket, store: aioflux.Store
) -> None:
    keys = bucket.fill(50)
    items: list[str] = []
    async for batch in store_batches(
        store, keys, batch_size=7, transform=key_of, ordered=False, num_threads=3
    ):
        items += batch
    assert sorted(items) == keys


async def test_without_order_a_slow_transform_delays_no_other(
    bucket: Bucket, store: aioflux.Store
) -> None:
    keys, others = bucket.fill(6), threading.Event()

    def hold_first(sample: Sample) -> str:
        if sample.key == keys[0]:
            assert others.wait(60)
        return sample.key

    batches = store_batches(
        store, keys, batch_size=1, transform=hold_first, ordered=False, num_threads=2
    )
    items = []
    async for (item,) in batches:
        items.append(item)
        if len(items) == 1:
            others.set()
    assert items[0] != keys[0]
    assert sorted(items) == keys


async def test_without_a_transform_items_are_samples(bucket: Bucket, store: aioflux.Store) -> None:
    (key,) = bucket.fill(1)
    (batch,) = [batch async for batch in store_batches(store, [key], batch_size=5)]
    assert [(sample.key, sample.data) for sample in batch] == [(key, f"data of {key}".encode())]


async def test_keys_may_come_from_a_listing(bucket: Bucket, store: aioflux.Store) -> None:
    keys = bucket.fill(3)
    metas = [await store.head(key) for key in keys]

    async def listing() -> AsyncIterator[aioflux.ObjectMeta]:
        for meta in metas:
            yield meta

    (batch,) = [batch async for batch in store_batches(store, listing(), batch_size=5)]
    assert [sample.meta for sample in batch] == metas


async def test_objects_may_hold_many_records(bucket: Bucket, store: aioflux.Store) -> None:
    for key, data in (("a", b"1\n2\n3\n"), ("b", b""), ("c", b"4\n5\n")):
        bucket.put(key, data)
    options = {"batch_size": 2, "records": jsonl()}
    batches = store_batches(store, ["a", "b", "c"], transform=str, **options)
    assert [batch async for batch in batches] == [["1", "2"], ["3", "4"], ["5"]]
    assert [batch async for batch in store_batches(store, ["a"], **options)] == [[1, 2], [3]]


async def test_a_torn_record_comes_after_those_before_it(
    bucket: Bucket, store: aioflux.Store
) -> None:
    bucket.put("a", b'1\n2\n"3')
    seen: list[int] = []
    batches = store_batches(store, ["a"], batch_size=1, records=jsonl())
    with pytest.raises(aioflux.RecordError, match="record 2, counted from 0, of gs://bucket/tr"):
        await take_all(batches, seen)
    assert seen == [1, 2]


async def test_a_last_batch_that_is_not_full_may_be_left_out(
    bucket: Bucket, store: aioflux.Store
) -> None:
    keys = bucket.fill(5)
    batches = [batch async for batch in store_batches(store, keys, batch_size=2, drop_last=True)]
    assert [len(batch) for batch in batches] == [2, 2]


async def test_without_keys_there_is_no_batch(bucket: Bucket, store: aioflux.Store) -> None:
    assert [batch async for batch in store_batches(store, [], batch_size=2)] == []


async def test_the_error_of_a_missing_object_comes_after_the_items_before_it(
    bucket: Bucket, store: aioflux.Store
) -> None:
    keys = bucket.fill(4)
    seen = []
    batches = store_batches(store, [*keys, "gone"], batch_size=2, transform=key_of)
    with pytest.raises(aioflux.NotFoundError, match="gs://bucket/train/gone"):
        await take_all(batches, seen)
    assert seen == keys


async def test_a_failing_transform_names_its_sample(bucket: Bucket, store: aioflux.Store) -> None:
    keys = bucket.fill(4)
    with pytest.raises(ArithmeticError, match="no such number") as raised:
        _ = [batch async for batch in store_batches(store, keys, batch_size=2, transform=refuse)]
    assert raised.value.__notes__ == ["while transforming gs://bucket/train/000"]


async def test_the_error_of_a_transform_comes_after_the_items_before_it(
    bucket: Bucket, store: aioflux.Store
) -> None:
    keys, seen = bucket.fill(9), []

    def refuse_fifth(sample: Sample) -> str:
        if sample.key == keys[4]:
            raise ArithmeticError
        return sample.key

    with pytest.raises(ArithmeticError):
        await take_all(store_batches(store, keys, batch_size=1, transform=refuse_fifth), seen)
    assert seen == keys[:4]


class Gate:
    """A transform that counts its calls, and waits for an event."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_running = 0
        self.is_open = threading.Event()
        self.has_begun = threading.Event()

    def __call__(self, sample: Sample) -> str:
        self.num_begun += 1
        self.num_running += 1
        self.has_begun.set()
        assert self.is_open.wait(60)
        self.num_running -= 1
        return sample.key


async def open_soon(gate: Gate) -> None:
    """Open it when the cancelled task waits for the running transforms."""
    for _ in range(100):
        await asyncio.sleep(0)
    gate.is_open.set()


@pytest.mark.parametrize("end", ["close", "cancel"])
async def test_nothing_runs_after_the_iteration_ends(
    bucket: Bucket, store: aioflux.Store, end: str
) -> None:
    keys, gate = bucket.fill(60), Gate()
    batches = store_batches(store, keys, batch_size=20, transform=gate, num_threads=2)
    taking = asyncio.create_task(anext(batches))
    await asyncio.to_thread(gate.has_begun.wait, 60)
    taking.cancel()
    ended = asyncio.create_task(open_soon(gate))
    with pytest.raises(asyncio.CancelledError):
        await taking
    if end == "close":
        await batches.aclose()
    await ended
    assert gate.num_running == 0
    assert gate.num_begun <= 2
    # Threads that have nothing to do any more end by themselves.
    until = time.monotonic() + 60
    while [each for each in threading.enumerate() if each.name.startswith("aioflux-transform")]:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    assert store.stats.num_in_flight == 0


async def test_leaving_the_loop_early_ends_the_fetching(
    bucket: Bucket, store: aioflux.Store
) -> None:
    keys = bucket.fill(400)
    async with aclosing(store_batches(store, keys, batch_size=2, transform=key_of)) as batches:
        async for batch in batches:
            assert batch == keys[:2]
            break
    assert store.stats.num_in_flight == 0
    assert store.stats.num_requests < 400


async def test_transforms_run_ahead_of_a_slow_consumer_within_bounds(
    bucket: Bucket, store: aioflux.Store
) -> None:
    keys, gate = bucket.fill(100), Gate()
    gate.is_open.set()
    async with aclosing(
        store_batches(store, keys, batch_size=5, transform=gate, num_threads=2)
    ) as batches:
        taken = 0
        async for batch in batches:
            taken += len(batch)
            await asyncio.sleep(0.02)
            # Those that were taken, two batches that wait, and one group on its way to a batch.
            assert gate.num_begun <= taken + 2 * 5 + 5
    assert gate.num_begun == 100


async def test_bytes_that_wait_are_bounded(bucket: Bucket, store: aioflux.Store) -> None:
    keys, gate = [f"{number:02}" for number in range(12)], Gate()
    for key in keys:
        bucket.put(key, b"x" * 1000)
    batches = store_batches(
        store, keys, batch_size=100, transform=gate, num_threads=8, max_bytes=3500
    )
    taking = asyncio.create_task(anext(batches))
    await asyncio.to_thread(gate.has_begun.wait, 60)
    await asyncio.sleep(0.1)
    assert gate.num_begun <= 3
    gate.is_open.set()
    assert await taking == keys
    await batches.aclose()


async def test_an_object_larger_than_the_budget_is_admitted_alone(
    bucket: Bucket, store: aioflux.Store
) -> None:
    bucket.put("large", b"x" * 1000)
    bucket.put("small", b"x")
    keys = ["large", "small", "large"]
    batches = store_batches(store, keys, batch_size=3, transform=key_of, max_bytes=10)
    assert [batch async for batch in batches] == [keys]


@pytest.mark.parametrize("name", ["batch_size", "num_threads", "max_bytes"])
async def test_impossible_numbers_are_rejected_at_once(store: aioflux.Store, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, not 0"):
        store_batches(store, ["a"], **{"batch_size": 1, name: 0})


async def test_a_closed_store_is_an_error(bucket: Bucket) -> None:
    store = aioflux.open_store(bucket.uri)
    await store.aclose()
    with pytest.raises(ValueError, match="is closed"):
        _ = [batch async for batch in store_batches(store, ["a"], batch_size=1)]


async def test_every_thread_has_some_of_the_samples(bucket: Bucket, store: aioflux.Store) -> None:
    keys, meeting = bucket.fill(3), threading.Barrier(3)

    def meet(sample: Sample) -> str:
        meeting.wait(60)  # for all three at once
        return sample.key

    batches = store_batches(store, keys, batch_size=3, transform=meet, num_threads=3)
    assert [batch async for batch in batches] == [keys]

"""Reads without a task that wait in line for a place among the requests in flight."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import pytest

from aioflux import RetryPolicy, TransientError
from tests.transfer.fake_service import FakeService, Reading, answer_all, counts, filled, settle

if TYPE_CHECKING:
    from tests.transfer.clock import Clock

THROTTLED = TransientError("slow down", status=503)


@pytest.fixture
def fake() -> FakeService:
    return FakeService(f"fake-{uuid.uuid4().hex}")


@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "as they come"])
async def test_a_lowered_limit_needs_no_task(fake: FakeService, *, ordered: bool) -> None:
    """Only the item that was refused is read by a coroutine."""
    stored = filled(fake, (f"k{at:03}" for at in range(200)))
    store = fake.open(max_in_flight=32)
    reading = Reading(store, list(stored), ordered=ordered)
    await settle()
    fake.refuse("k000", THROTTLED)
    assert store.session.admission.slots.limit == 16
    await answer_all(fake, reading)
    assert sorted(reading.got) == sorted(stored.items())
    assert reading.keys == list(stored) or not ordered
    assert sorted(fake.begun) == list(stored)
    assert fake.gets == [("k000", 0, "")]
    assert counts(store) == {"requests": 201, "retries": 1, "failures": 1, "throttled": 1}
    assert reading.is_clean()


async def test_places_are_given_in_the_order_of_the_line(fake: FakeService) -> None:
    """A reader of many takes no place from who waits already, for all that it answers."""
    stored = filled(fake, "abcdefgh")
    store = fake.open(max_in_flight=2)
    reading = Reading(store, list(stored))
    await settle()
    other = asyncio.create_task(store.session.admission.slots.acquire())
    await settle()
    assert not other.done()
    fake.answer("a")
    await settle()
    assert other.done()
    assert list(fake.under_way) == ["b"]
    fake.answer("b")
    assert list(fake.under_way) == ["c"]
    store.session.admission.slots.release()
    assert list(fake.under_way) == ["c", "d"]
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert reading.is_clean()


async def test_a_place_without_a_connection_is_left_to_the_worker(fake: FakeService) -> None:
    """However many are in line: more than the interpreter may recurse."""
    stored = filled(fake, (f"k{at:04}" for at in range(1400)))
    store = fake.open(max_in_flight=1200, max_in_flight_bytes=1 << 34)
    for _ in range(1200):
        await store.session.admission.slots.acquire()
    reading = Reading(store, list(stored))
    await settle()
    assert fake.begun == []
    fake.is_full = True
    for _ in range(1200):
        store.session.admission.slots.release()
    await reading.task
    assert reading.got == list(stored.items())
    assert fake.begun == []
    assert len(fake.gets) == 1400
    assert reading.is_clean()


async def test_time_in_line_is_no_part_of_the_request(fake: FakeService, clock: Clock) -> None:
    stored = filled(fake, "abc")
    store = fake.open(retry=RetryPolicy(deadline_seconds=0.1), max_in_flight=1)
    await store.session.admission.slots.acquire()
    reading = Reading(store, list(stored))
    await asyncio.sleep(0.25)
    assert fake.begun == []
    # Else the deadlines would look at it again and again.
    [runner] = store.session.admission.deadlines._sequences
    assert clock.now - runner.started_at < 0.2
    store.session.admission.slots.release()
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert reading.is_clean()


async def test_a_request_from_the_line_has_its_whole_time(fake: FakeService, clock: Clock) -> None:
    filled(fake, "abc")
    store = fake.open(retry=RetryPolicy(deadline_seconds=0.2), max_in_flight=1)
    await store.session.admission.slots.acquire()
    reading = Reading(store, ["a"])
    await asyncio.sleep(0.15)
    store.session.admission.slots.release()
    begun = clock.now
    with pytest.raises(TransientError, match="before the deadline"):
        await reading.task
    assert 0.19 <= clock.now - begun < 0.21
    assert fake.dropped == ["a"]
    assert reading.is_clean()

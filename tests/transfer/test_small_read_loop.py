"""Small objects one after another without a task: each way in which one of them can go."""

from __future__ import annotations

import asyncio
import gc
import os
import uuid
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    Progress,
    RetryPolicy,
    StorageError,
    TransientError,
)
from tests.transfer.fake_service import (
    FIRST_BYTES,
    FakeService,
    Reading,
    answer_all,
    counts,
    filled,
    settle,
)
from tests.transfer.scripted_service import pattern

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from aioflux._services.base import Body

is_ordered = pytest.mark.parametrize("ordered", [True, False], ids=["in order", "as they come"])
by = pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by meta"])

THROTTLED = TransientError("slow down", status=503)


@pytest.fixture
def fake() -> FakeService:
    return FakeService(f"fake-{uuid.uuid4().hex}")


def flipped(body: Body) -> Body:
    data = bytearray(body.data)
    data[3] ^= 1
    return replace(body, data=bytes(data))


# --- as long as all goes well --------------------------------------------------------------


@is_ordered
@by
async def test_everything_comes_once_and_by_one_request(
    fake: FakeService, *, ordered: bool, by_name: bool
) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(100)))
    items: Any = list(stored) if by_name else [fake.bucket.objects[key].meta for key in stored]
    reading = Reading(fake.open(), items, ordered=ordered)
    await answer_all(fake, reading)
    assert sorted(reading.got) == sorted(stored.items())
    assert reading.keys == list(stored) or not ordered
    assert (fake.begun, fake.gets) == (list(stored), [])
    assert fake.max_under_way == 4
    assert counts(reading.store) == {"requests": 100}
    assert reading.store.stats.bytes_received == sum(map(len, stored.values()))
    assert reading.is_clean()


async def test_the_next_item_is_begun_where_an_answer_is_received(fake: FakeService) -> None:
    """No task has to run between the two."""
    filled(fake, "abcdefgh")
    reading = Reading(fake.open(), list("abcdefgh"))
    await settle()
    assert fake.begun == ["a", "b", "c", "d"]
    fake.answer("b")
    assert fake.begun == ["a", "b", "c", "d", "e"]
    fake.answer("e", "a")
    assert fake.begun[5:] == ["f", "g"]
    await answer_all(fake, reading)
    assert reading.keys == list("abcdefgh")


async def test_results_come_as_they_arrive_where_order_is_not_kept(fake: FakeService) -> None:
    filled(fake, "abcd")
    reading = Reading(fake.open(), list("abcd"), ordered=False)
    await settle()
    fake.answer("c", "a")
    await settle()
    assert reading.keys == ["c", "a"]
    await answer_all(fake, reading)


async def test_a_slow_consumer_holds_the_work_back(fake: FakeService) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(50)))
    taken: list[str] = []

    def keys() -> Iterator[str]:
        for key in stored:
            taken.append(key)
            yield key

    gate = asyncio.Event()
    reading = Reading(fake.open(), keys(), gate=gate)
    await settle()
    fake.answer("k000")
    await settle()
    assert reading.keys == ["k000"]  # and there the consumer stops
    for _ in range(20):
        fake.answer(*fake.under_way)
        await settle()
    assert len(taken) <= 2 * 4 + 1
    assert not fake.under_way
    gate.set()
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())


async def test_bytes_in_flight_and_ahead_are_bounded(fake: FakeService) -> None:
    """Of objects of 300 kB, not four but three fit into a budget of 1 MB."""
    stored = filled(fake, (f"k{at}" for at in range(12)), size=300_000)
    metas = [fake.bucket.objects[key].meta for key in stored]
    store = fake.open(max_in_flight_bytes=1_000_000)
    reading = Reading(store, metas)
    await settle()
    assert store.session.admission.bytes.held_bytes <= 1_000_000
    assert len(fake.under_way) == 3
    gate = asyncio.Event()
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert fake.max_under_way == 3
    # What waits for the consumer counts as well.
    fake.begun.clear()
    fake.gets.clear()
    reading = Reading(fake.open(max_in_flight_bytes=1_000_000), metas, gate=gate)
    for _ in range(20):
        await settle()
        fake.answer(*fake.under_way)
    assert len(fake.begun) + len(fake.gets) <= 4
    gate.set()
    await answer_all(fake, reading)
    assert reading.is_clean()


async def test_keys_may_come_from_an_asynchronous_iterable(fake: FakeService) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(40)))

    async def keys() -> AsyncIterator[str]:
        for key in stored:
            await asyncio.sleep(0)
            yield key

    reading = Reading(fake.open(), keys())
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert (len(fake.begun), fake.gets) == (40, [])
    assert reading.is_clean()


async def test_metadata_pins_the_generation(fake: FakeService) -> None:
    old = fake.store("a", b"old")
    fake.store("a", b"new")
    reading = Reading(fake.open(), [old])
    await settle()
    assert fake.under_way["a"].request.generation == old.generation
    fake.answer("a")
    with pytest.raises(NotFoundError, match=f"generation {old.generation}"):
        await reading.task


async def test_two_iterations_share_places_and_both_go_on(fake: FakeService) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(60)))
    keys = list(stored)
    store = fake.open()
    first, second = Reading(store, keys[:30]), Reading(store, keys[30:])
    await settle()
    assert store.session.admission.slots.num_held == 4
    async with asyncio.timeout(100):
        while not (first.task.done() and second.task.done()):
            fake.answer(*fake.under_way)
            await asyncio.sleep(0)
            assert store.session.admission.slots.num_held <= 4
    assert (first.keys, second.keys) == (keys[:30], keys[30:])
    assert fake.max_under_way <= 4
    assert first.is_clean()


async def test_who_waits_in_line_for_a_place_comes_next(fake: FakeService) -> None:
    """Reads that follow each other do not keep another call of the store from its turn."""
    stored = filled(fake, (f"k{at:03}" for at in range(40)))
    store = fake.open()
    reading = Reading(store, list(stored))
    await settle()
    other = asyncio.create_task(store.session.call("x", asyncio.sleep, 0, "done"))
    await settle()
    assert not other.done()
    fake.answer(fake.begun[0])
    await settle()
    assert await other == "done"
    assert len(fake.begun) < 10
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())


# --- in line for a place -------------------------------------------------------------------


async def test_a_place_that_comes_free_is_taken_without_a_task(fake: FakeService) -> None:
    stored = filled(fake, "abcdef")
    store = fake.open(max_in_flight=2)
    await store.session.admission.slots.acquire()
    reading = Reading(store, list(stored))
    await settle()
    assert fake.begun == ["a"]
    store.session.admission.slots.release()
    assert fake.begun == ["a", "b"]
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert (fake.gets, fake.max_under_way) == ([], 2)
    assert counts(store) == {"requests": 6}
    assert reading.is_clean()


async def test_who_is_cancelled_in_line_leaves_it_and_its_bytes(fake: FakeService) -> None:
    stored = filled(fake, "abcd")
    store = fake.open(max_in_flight=2)
    limits = store.session.admission
    for _ in range(2):
        await limits.slots.acquire()
    reading = Reading(store, list(stored))
    await settle()
    assert limits.bytes.held_bytes > 0
    reading.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading.task
    assert (limits.bytes.held_bytes, limits.slots.num_held, fake.begun) == (0, 2, [])
    for _ in range(2):
        limits.slots.release()
    again = Reading(store, list(stored))
    await answer_all(fake, again)
    assert again.got == list(stored.items())
    assert again.is_clean()


async def test_a_place_that_comes_as_the_worker_is_cancelled_is_given_back(
    fake: FakeService,
) -> None:
    stored = filled(fake, "abcd")
    store = fake.open(max_in_flight=2)
    for _ in range(2):
        await store.session.admission.slots.acquire()
    reading = Reading(store, list(stored))
    await settle()
    reading.task.cancel()
    await asyncio.sleep(0)  # the workers are cancelled, and have not run since
    store.session.admission.slots.release()
    store.session.admission.slots.release()
    with pytest.raises(asyncio.CancelledError):
        await reading.task
    assert not fake.under_way
    assert reading.is_clean()


async def test_without_a_connection_at_once_a_coroutine_reads(fake: FakeService) -> None:
    stored = filled(fake, "abcdef")
    fake.is_full = True
    store = fake.open()
    reading = Reading(store, list(stored))
    await reading.task
    assert reading.got == list(stored.items())
    assert (fake.begun, len(fake.gets)) == ([], 6)
    assert counts(store) == {"requests": 6}
    assert reading.is_clean()


async def test_before_a_size_is_known_a_coroutine_reads(fake: FakeService) -> None:
    stored = filled(fake, "abcdef")
    reading = Reading(fake.open(is_warm=False, max_in_flight=1), list(stored))
    await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert (len(fake.gets), len(fake.begun)) == (1, 5)


@pytest.mark.parametrize("size", [0, FIRST_BYTES * 2 + 1], ids=["empty", "large"])
async def test_of_listed_objects_only_small_ones_are_read_so(fake: FakeService, size: int) -> None:
    data = pattern(size)
    reading = Reading(fake.open(), [fake.store("a", data)])
    await reading.task
    assert reading.got == [("a", data)]
    assert fake.begun == []
    assert reading.is_clean()


# --- what another attempt mends ------------------------------------------------------------


@by
async def test_a_refusal_is_counted_once_and_tried_again_in_its_place(
    fake: FakeService, *, by_name: bool
) -> None:
    stored = filled(fake, "abc")
    items = list(stored) if by_name else [fake.bucket.objects[key].meta for key in stored]
    store = fake.open()
    reading = Reading(store, items)
    await settle()
    fake.answer("c", "b")
    fake.refuse("a", THROTTLED)
    await reading.task
    assert reading.got == list(stored.items())
    expected = {"requests": 4, "retries": 1, "failures": 1, "throttled": 1}
    assert counts(store) == expected
    assert [key for key, _, _ in fake.gets] == ["a"]
    assert reading.is_clean()


@pytest.mark.usefixtures("clock")
async def test_the_delay_that_a_refusal_asks_for_is_kept(fake: FakeService) -> None:
    filled(fake, "a")
    loop = asyncio.get_running_loop()
    reading = Reading(fake.open(), ["a"])
    await settle()
    began = loop.time()
    fake.refuse("a", TransientError("later", status=503, retry_after_seconds=0.1))
    await settle()
    assert reading.store.session.admission.slots.num_held == 0  # while it waits
    await reading.task
    assert loop.time() - began >= 0.1


async def test_the_attempt_without_a_task_is_one_of_those_that_there_are(fake: FakeService) -> None:
    filled(fake, "a")

    def refuse(_: Body) -> Body:
        raise THROTTLED

    fake.spoil = refuse
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.refuse("a", THROTTLED)
    with pytest.raises(TransientError, match="gave up after 4 attempts"):
        await reading.task
    assert len(fake.gets) == 3
    assert counts(reading.store) == {
        "requests": 4,
        "retries": 3,
        "failures": 4,
        "throttled": 4,
    }
    assert reading.is_clean()


async def test_the_limit_halves_under_pressure_and_grows_back(fake: FakeService) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(40)))
    store = fake.open(max_in_flight=8)
    reading = Reading(store, list(stored))
    await settle()
    assert len(fake.under_way) == 8
    for key in list(fake.under_way)[:3]:  # all sent before the first cut: one cut
        fake.refuse(key, THROTTLED)
    assert store.session.admission.slots.limit == 4
    await settle()
    assert store.session.admission.slots.num_held >= 5  # those that are under way still
    fake.answer(*fake.under_way)
    await settle()
    assert len(fake.under_way) <= 5
    await answer_all(fake, reading)
    assert store.session.admission.slots.limit == 8
    assert reading.got == list(stored.items())
    assert reading.is_clean()


async def test_a_lost_connection_is_a_failed_attempt(fake: FakeService) -> None:
    stored = filled(fake, "ab")
    reading = Reading(fake.open(), list(stored))
    await settle()
    fake.lose("a")
    fake.answer("b")
    await reading.task
    assert reading.got == list(stored.items())
    assert counts(reading.store) == {"requests": 3, "retries": 1, "failures": 1}
    assert reading.is_clean()


async def test_a_kept_alive_connection_that_was_closed_is_no_attempt(fake: FakeService) -> None:
    stored = filled(fake, "ab")
    reading = Reading(fake.open(), list(stored))
    await settle()
    fake.lose("a", is_stale=True)
    fake.answer("b")
    await reading.task
    assert reading.got == list(stored.items())
    assert fake.gets == [("a", 0, "")]
    assert counts(reading.store) == {"requests": 2}
    assert reading.is_clean()


async def test_a_token_that_was_refused_is_the_business_of_a_coroutine(fake: FakeService) -> None:
    stored = filled(fake, "a")
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.refuse("a", PermissionDeniedError("who are you?", status=401))
    await reading.task
    assert reading.got == list(stored.items())
    assert len(fake.gets) == 1
    assert reading.is_clean()


@by
@pytest.mark.parametrize("num_wrong", [1, 2, 3])
async def test_bytes_that_do_not_match_are_read_three_times_in_all(
    fake: FakeService, num_wrong: int, *, by_name: bool
) -> None:
    stored = filled(fake, "a")
    left = [flipped] * (num_wrong - 1)
    fake.spoil = lambda body: left.pop()(body) if left else body
    meta = fake.bucket.objects["a"].meta
    reading = Reading(fake.open(), ["a" if by_name else meta])
    await settle()

    def into_buffer(body: Body) -> Body:
        """What `get` returns may be a view of memory of the caller."""
        view = memoryview(body.data)
        if view.readonly:
            return flipped(body)
        view[3] ^= 1
        return body

    left = [into_buffer] * (num_wrong - 1)
    fake.answer("a", change=flipped)
    if num_wrong == 3:
        with pytest.raises(ChecksumError, match="3 times in a row") as raised:
            await reading.task
        assert raised.value.uri.endswith("/a")
    else:
        await reading.task
        assert reading.got == list(stored.items())
    assert len(fake.gets) == min(num_wrong, 2)
    assert reading.is_clean()


async def test_of_a_large_object_no_byte_is_read_twice(fake: FakeService) -> None:
    data = pattern(FIRST_BYTES + 70_000)
    fake.store("a", data)
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.answer("a")
    await reading.task
    assert reading.got == [("a", data)]
    generation = fake.bucket.objects["a"].meta.generation
    assert fake.gets == [("a", FIRST_BYTES, generation)]
    assert reading.store.stats.bytes_received == len(data)
    assert reading.is_clean()


async def test_a_large_object_that_changes_meanwhile_is_read_anew(fake: FakeService) -> None:
    fake.store("a", pattern(FIRST_BYTES + 70_000))
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.answer("a")
    changed = pattern(FIRST_BYTES + 50_000, seed=3)
    fake.store("a", changed)
    await answer_all(fake, reading)
    assert reading.got == [("a", changed)]
    assert reading.is_clean()


@pytest.mark.parametrize("has_generation", [True, False])
async def test_an_empty_object_costs_no_third_request(
    fake: FakeService, *, has_generation: bool
) -> None:
    fake.store("a", b"")
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.answer("a", change=lambda body: body if has_generation else replace(body, generation=""))
    await reading.task
    assert reading.got == [("a", b"")]
    assert fake.gets == []
    assert counts(reading.store) == {"requests": 1 if has_generation else 2}
    assert reading.is_clean()


async def test_a_response_that_reports_too_little_is_requested_again(fake: FakeService) -> None:
    stored = filled(fake, "a")
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.answer("a", change=lambda _: None)
    await reading.task
    assert reading.got == list(stored.items())
    assert reading.is_clean()


@by
async def test_a_short_answer_is_not_believed(fake: FakeService, *, by_name: bool) -> None:
    stored = filled(fake, "a")
    meta = fake.bucket.objects["a"].meta
    reading = Reading(fake.open(), ["a" if by_name else meta])
    await settle()
    fake.answer("a", change=lambda body: replace(body, data=body.data[:50]))
    await reading.task
    assert reading.got == list(stored.items())
    assert reading.is_clean()


# --- what fails an item --------------------------------------------------------------------


async def test_an_object_that_is_not_there_fails_in_its_turn(fake: FakeService) -> None:
    stored = filled(fake, "acd")
    reading = Reading(fake.open(), list("abcd"))
    await settle()
    fake.answer("b", "d", "c")
    await settle()
    assert not reading.task.done()
    fake.answer("a")
    with pytest.raises(NotFoundError, match="/b"):
        await reading.task
    assert reading.got == [("a", stored["a"])]
    assert (fake.begun, fake.gets) == (list("abcd"), [])
    assert counts(reading.store) == {"requests": 4, "failures": 1}
    assert reading.is_clean()


async def test_a_failure_comes_at_once_where_order_is_not_kept(fake: FakeService) -> None:
    filled(fake, "acd")
    reading = Reading(fake.open(), list("abcd"), ordered=False)
    await settle()
    fake.answer("b")
    with pytest.raises(NotFoundError, match="/b"):
        await reading.task
    assert sorted(fake.dropped) == ["a", "c", "d"]
    assert counts(reading.store) == {"requests": 4, "failures": 4}
    assert reading.is_clean()


@pytest.mark.parametrize(
    ("item", "error"),
    [("", ValueError), ("a\nb", ValueError), ("\ud800", ValueError), (5, TypeError)],
    ids=["empty", "line end", "no text", "no key"],
)
async def test_what_is_no_key_fails_in_its_turn(
    fake: FakeService, item: object, error: type[Exception]
) -> None:
    stored = filled(fake, "abc")
    reading = Reading(fake.open(), ["a", "b", item, "c"])
    await settle()
    fake.answer("b", "a")
    with pytest.raises(error):
        await reading.task
    assert reading.got == [("a", stored["a"]), ("b", stored["b"])]
    assert reading.is_clean()


async def test_metadata_that_a_service_cannot_ask_for_fails_in_its_turn(fake: FakeService) -> None:
    stored = filled(fake, "ab")
    odd: Any = replace(fake.bucket.objects["b"].meta, key=None)
    reading = Reading(fake.open(), ["a", odd])
    await settle()
    fake.answer("a")
    with pytest.raises(TypeError):
        await reading.task
    assert reading.got == [("a", stored["a"])]
    assert reading.is_clean()


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ZeroDivisionError, ZeroDivisionError),
        (SystemExit, RuntimeError),
        (asyncio.CancelledError, RuntimeError),
    ],
)
async def test_what_a_progress_hook_raises_fails_the_item(
    fake: FakeService, raised: type[BaseException], seen: type[Exception]
) -> None:
    filled(fake, "abcd")

    def hook(progress: Progress) -> None:
        if progress.uri.endswith("/b"):
            raise raised

    reading = Reading(fake.open(progress=hook), list("abcd"))
    await settle()
    fake.answer("a", "b")
    with pytest.raises(seen):
        await reading.task
    assert reading.keys == ["a"]
    assert reading.is_clean()


async def test_what_a_progress_hook_raises_of_a_broken_body_fails_the_item(
    fake: FakeService,
) -> None:
    filled(fake, "a")

    def hook(_: Progress) -> None:
        raise ZeroDivisionError

    reading = Reading(fake.open(progress=hook), ["a"])
    await settle()
    fake.refuse("a", TransientError("broke", num_bytes_received=7))
    with pytest.raises(ZeroDivisionError):
        await reading.task
    assert reading.is_clean()


@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError])
async def test_an_iterator_that_fails_ends_the_iteration_after_what_it_gave(
    fake: FakeService, error: type[BaseException]
) -> None:
    stored = filled(fake, "abcdef")

    def keys() -> Iterator[str]:
        yield from stored
        raise error("mine")

    reading = Reading(fake.open(), keys())
    await settle()
    # Asked for the next key by the answer that makes room: outside of any task.
    fake.answer("b", "a", "d")
    await settle()
    assert not reading.task.done()
    fake.answer("c", "e", "f")
    await asyncio.wait([reading.task])
    if error is asyncio.CancelledError:
        assert reading.task.cancelled()
    else:
        assert isinstance(reading.task.exception(), error)
    assert reading.got == list(stored.items())
    assert reading.is_clean()


async def test_an_asynchronous_iterator_that_fails_ends_it_too(fake: FakeService) -> None:
    stored = filled(fake, "ab")

    async def keys() -> AsyncIterator[str]:
        for key in stored:
            yield key
        raise KeyError("mine")

    reading = Reading(fake.open(), keys())
    with pytest.raises(KeyError, match="mine"):
        await answer_all(fake, reading)
    assert reading.got == list(stored.items())
    assert reading.is_clean()


async def test_in_a_child_of_a_fork_nothing_is_sent(fake: FakeService) -> None:
    filled(fake, "ab")
    store = fake.open()
    object.__setattr__(store.session, "pid", os.getpid() + 1)
    reading = Reading(store, ["a", "b"])
    with pytest.raises(RuntimeError, match="opened before a fork"):
        await reading.task
    assert (fake.begun, fake.gets) == ([], [])


# --- ends ----------------------------------------------------------------------------------


@is_ordered
async def test_cancellation_drops_what_is_under_way(fake: FakeService, *, ordered: bool) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(20)))
    before = asyncio.all_tasks()
    store = fake.open()
    reading = Reading(store, list(stored), ordered=ordered)
    await settle()
    fake.answer("k001")
    reading.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading.task
    assert sorted(fake.dropped) == ["k000", "k002", "k003", "k004"]
    assert not fake.under_way
    assert asyncio.all_tasks() == before
    assert counts(store) == {"requests": 5, "failures": 4}
    assert reading.is_clean()
    again = Reading(store, list(stored))
    await answer_all(fake, again)
    assert again.got == list(stored.items())


async def test_answers_in_the_turn_of_a_cancellation_begin_nothing(fake: FakeService) -> None:
    """The workers are cancelled, and have not run since."""
    stored = filled(fake, (f"k{at:03}" for at in range(20)))
    reading = Reading(fake.open(), list(stored))
    await settle()
    reading.task.cancel()
    # The consumer's clean-up cancels the workers in this turn; then the answers come.
    await asyncio.sleep(0)
    fake.answer("k000")
    fake.refuse("k001", THROTTLED)
    fake.lose("k002", is_stale=True)
    assert len(fake.begun) == 4
    with pytest.raises(asyncio.CancelledError):
        await reading.task
    assert fake.dropped == ["k003"]
    assert reading.is_clean()


async def test_leaving_the_loop_early_drops_what_is_under_way(fake: FakeService) -> None:
    stored = filled(fake, (f"k{at:03}" for at in range(20)))
    store = fake.open()
    batches = store.get_batches(list(stored))
    first = asyncio.create_task(anext(batches))
    await settle()
    fake.answer("k000")
    [[key, _]] = await first
    await batches.aclose()
    assert key == "k000"
    assert not fake.under_way
    assert store.session.admission.slots.num_held == store.session.admission.bytes.held_bytes == 0


@is_ordered
@pytest.mark.usefixtures("clock")
async def test_a_deadline_ends_a_read_by_name(fake: FakeService, *, ordered: bool) -> None:
    filled(fake, "abcdef")
    store = fake.open(retry=RetryPolicy(deadline_seconds=0.1), max_in_flight=2)
    reading = Reading(store, list("abcdef"), ordered=ordered)
    await settle()
    fake.answer("a")
    await settle()
    assert list(fake.under_way) == ["b", "c"]
    # One after another they are late; what is begun in their places has time of its own.
    with pytest.raises(TransientError, match=r"/[bc] came before the deadline") as raised:
        await reading.task
    assert raised.value.uri.endswith(("/b", "/c"))
    assert reading.keys == ["a"]
    assert {"b", "c"} <= set(fake.dropped)
    assert reading.is_clean()


@pytest.mark.usefixtures("clock")
async def test_the_deadline_of_each_read_is_its_own(fake: FakeService) -> None:
    """Many that follow each other may take longer than one may."""
    stored = filled(fake, (f"k{at:03}" for at in range(8)))
    store = fake.open(retry=RetryPolicy(deadline_seconds=0.5), max_in_flight=1)
    reading = Reading(store, list(stored))
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(100):
        while not reading.task.done():
            await asyncio.sleep(0.1)
            fake.answer(*fake.under_way)
            await settle()
    await reading.task
    assert loop.time() - began > 0.6
    assert reading.got == list(stored.items())
    assert reading.is_clean()


@pytest.mark.usefixtures("clock")
async def test_the_deadline_of_a_retry_began_with_its_first_attempt(fake: FakeService) -> None:
    filled(fake, "a")
    retry = RetryPolicy(deadline_seconds=0.3, initial_seconds=1e-6)
    reading = Reading(fake.open(retry=retry), ["a"])
    await asyncio.sleep(0.2)
    began = asyncio.get_running_loop().time()
    fake.refuse("a", TransientError("later", status=503, retry_after_seconds=0.2))
    with pytest.raises(TransientError, match="later"):
        await reading.task
    assert asyncio.get_running_loop().time() - began < 0.2
    assert reading.is_clean()


async def test_an_error_that_no_one_expects_fails_the_item(fake: FakeService) -> None:
    filled(fake, "a")
    reading = Reading(fake.open(), ["a"])
    await settle()
    fake.refuse("a", StorageError("no"))
    with pytest.raises(StorageError, match="no"):
        await reading.task
    assert reading.is_clean()


@pytest.mark.usefixtures("quick_collection")
async def test_what_was_read_is_let_go_of(fake: FakeService) -> None:
    """Neither the session nor what it watches keeps an iteration alive."""
    stored = filled(fake, "abcdef")
    store = fake.open()
    reading = Reading(store, list(stored))
    await settle()
    runners = [weakref.ref(read.waiter._fan_out) for read in fake.under_way.values()]
    await answer_all(fake, reading)
    del reading
    await settle()
    gc.collect()
    assert [runner() for runner in runners] == [None] * 4

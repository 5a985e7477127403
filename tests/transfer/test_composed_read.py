"""Composed reads: what direct reads give, nothing left behind, and errors that name the object."""

from __future__ import annotations

import asyncio
import gc
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflux
from aioflux import NotFoundError, ObjectMeta, PermissionDeniedError, StorageError
from aioflux._transfer.composite_plan import Grouper, plan_groups, split
from aioflux._transfer.temp_keys import COMPOSITE_PREFIX
from aioflux.testing.faults import Fault
from tests.transfer.scripted_service import (
    LOSE,
    MIB,
    REFUSE,
    ScriptedService,
    pattern,
    refused_for_good,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from aioflux._services.base import WriteRequest

CAP = 100_000_000


def meta(size: int, *, number: int = 0, **fields: Any) -> ObjectMeta:
    known = {"generation": "1", "crc32c": 0, "storage_class": "STANDARD"}
    key = f"k{number}"
    return ObjectMeta(key=key, uri=f"gs://b/{key}", size=size, **{**known, **fields})


def groups(
    metas: Iterable[ObjectMeta], *, max_bytes: int = CAP, max_sources: int = 32
) -> list[Any]:
    return list(plan_groups(metas, Grouper(max_sources=max_sources, max_bytes=max_bytes)))


# --- the plan --------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 12), max_size=200)


@given(sizes=SIZES, max_bytes=st.integers(1, 60), max_sources=st.integers(1, 32))
def test_groups_are_the_sequence_within_both_bounds(
    sizes: list[int], max_bytes: int, max_sources: int
) -> None:
    metas = [meta(size, number=at) for at, size in enumerate(sizes)]
    planned = groups(metas, max_bytes=max_bytes, max_sources=max_sources)
    assert [each for group in planned for each in group] == metas
    for group in planned:
        assert 1 <= len(group) <= max_sources
        assert len(group) == 1 or sum(each.size for each in group) <= max_bytes
        assert len(group) == 1 or all(each.size for each in group)


@given(sizes=st.lists(st.integers(1, 12), max_size=200), max_bytes=st.integers(12, 60))
def test_no_group_ends_where_one_more_fits(sizes: list[int], max_bytes: int) -> None:
    planned = groups(map(meta, sizes), max_bytes=max_bytes)
    for group, after in itertools.pairwise(planned):
        is_full = sum(each.size for each in group) + after[0].size > max_bytes
        assert is_full or len(group) == 32


@pytest.mark.parametrize(
    "fields",
    [
        {"content_encoding": "gzip"},
        {"generation": ""},
        {"crc32c": None},
        {"storage_class": "NEARLINE"},
        {"size": 0},
        {"size": 101},
    ],
    ids=str,
)
def test_what_cannot_be_composed_stays_alone(fields: dict[str, Any]) -> None:
    odd = replace(meta(10), **fields)
    first, last = meta(10, number=1), meta(10, number=2)
    assert groups([first, first, odd, last, last], max_bytes=100) == [
        (first, first),
        (odd,),
        (last, last),
    ]


def test_a_cut_that_does_not_match_is_none() -> None:
    scripted = ScriptedService("cut")
    group = (scripted.put("a", b"one"), scripted.put("b", b"three"))
    assert split(b"onethree", group, verify=True) == [b"one", b"three"]
    assert split(b"onethrxe", group, verify=True) is None
    assert split(b"onethre", group, verify=False) is None


async def test_no_other_writer_may_use_keys_of_composites(scripted: ScriptedService) -> None:
    with pytest.raises(ValueError, match="use another key"):
        await scripted.store.put(f"run/{COMPOSITE_PREFIX}a", b"1")


# --- reading ---------------------------------------------------------------------------------


def filled(
    scripted: ScriptedService, num_objects: int = 100, *, size: int = 50
) -> list[ObjectMeta]:
    return [scripted.put(f"{at:03}", pattern(size + at, seed=at + 1)) for at in range(num_objects)]


def data_of(
    scripted: ScriptedService, metas: Sequence[ObjectMeta]
) -> list[tuple[ObjectMeta, bytes]]:
    return [(each, scripted.get(each.key)) for each in metas]


async def read(
    scripted: ScriptedService, metas: Any, **options: Any
) -> list[tuple[ObjectMeta, bytes]]:
    found = []
    async for batch in scripted.store.try_fetch_composed(metas, **options):
        found += batch
    return found


def composites(scripted: ScriptedService) -> list[str]:
    return [key for key in scripted.bucket.objects if COMPOSITE_PREFIX in key]


async def reach_quiet(scripted: ScriptedService, before: set[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(100):
        while asyncio.all_tasks() - before:
            await asyncio.wait(asyncio.all_tasks() - before)
    assert scripted.is_clean()
    assert not scripted.store.session.open_transfers
    assert composites(scripted) == []


async def test_a_hundred_objects_cost_twelve_requests(scripted: ScriptedService) -> None:
    scripted.store = scripted.new_store(range_size_bytes=MIB)
    metas = filled(scripted)
    before = asyncio.all_tasks()
    assert await read(scripted, metas) == data_of(scripted, metas)
    assert {name: scripted.service.count(name) for name in ("compose", "get", "delete")} == {
        "compose": 4,
        "get": 4,
        "delete": 4,
    }
    assert len(scripted.service.calls) == 12
    await reach_quiet(scripted, before)


async def test_keys_tell_run_and_time_and_are_not_listed(scripted: ScriptedService) -> None:
    hang = Fault(kind="hang")
    scripted.service.fail("get", hang)
    reading = asyncio.create_task(read(scripted, filled(scripted, 2)))
    await hang.reached.wait()
    [key] = composites(scripted)
    prefix, run, rest = key.split("/")
    assert prefix + "/" == COMPOSITE_PREFIX
    assert len(run) == 16
    assert rest[8] == "T"
    assert rest.endswith("Z-000000")
    async with aioflux.open_store(f"memory://{scripted.bucket.name}") as store:
        assert key not in [each.key for each in await store.list_all()]
        assert key in [each.key for each in await store.list_all(COMPOSITE_PREFIX)]
    hang.released.set()
    await reading


async def numbers(metas: Sequence[ObjectMeta]) -> AsyncIterator[ObjectMeta]:
    for each in metas:
        yield each


async def test_any_iterable_is_taken_and_the_order_kept(scripted: ScriptedService) -> None:
    metas = filled(scripted, 70)
    metas.insert(20, scripted.put("large", pattern(9000)))
    metas.insert(40, scripted.put("empty", b""))
    expected = data_of(scripted, metas)
    for given_ in (metas, iter(metas), numbers(metas)):
        assert await read(scripted, given_, max_composite_bytes=4000) == expected
    with pytest.raises(TypeError, match="ObjectMeta of a listing"):
        await read(scripted, ["000"])
    assert composites(scripted) == []


async def test_more_is_not_held_than_the_budget(scripted: ScriptedService) -> None:
    metas = filled(scripted, 200, size=1000)
    scripted.store = scripted.new_store(max_in_flight_bytes=40_000)
    assert await read(scripted, metas, max_composite_bytes=10_000) == data_of(scripted, metas)
    assert scripted.is_clean()


# --- what changed since the listing -------------------------------------------------------------


@pytest.mark.parametrize("change", ["deleted", "replaced", "truncated"])
async def test_what_changed_since_the_listing_is_named(
    scripted: ScriptedService, change: str
) -> None:
    metas = filled(scripted, 40)
    if change == "deleted":
        scripted.bucket.remove("007")
    else:
        scripted.put("007", scripted.get("007")[: None if change == "replaced" else 3])
    before = asyncio.all_tasks()
    found: list[Any] = await read(scripted, metas)
    meta, error = found[7]
    assert meta is None
    assert isinstance(error, NotFoundError)
    assert error.uri == metas[7].uri
    assert [each for each in found if each[0] is None] == [found[7]]
    await reach_quiet(scripted, before)


async def test_a_composite_of_other_bytes_is_no_data(scripted: ScriptedService) -> None:
    """Where a slice does not match, each object is read by itself."""
    scripted.store = scripted.new_store(range_size_bytes=MIB)
    metas = filled(scripted, 40)
    inner = scripted.service.compose

    async def compose(request: WriteRequest, sources: Any) -> ObjectMeta:
        return await inner(request, list(reversed(sources)))

    scripted.service.compose = compose
    assert await read(scripted, metas) == data_of(scripted, metas)
    assert scripted.service.count("get") == 2 + 40
    assert composites(scripted) == []


async def test_a_composite_that_another_client_sweeps_is_done_without(
    scripted: ScriptedService,
) -> None:
    metas = filled(scripted, 32)
    inner = scripted.service.compose

    async def compose(request: WriteRequest, sources: Any) -> ObjectMeta:
        made = await inner(request, sources)
        scripted.bucket.remove(request.key)
        return made

    scripted.service.compose = compose
    assert await read(scripted, metas) == data_of(scripted, metas)


# --- what the service does ------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["compose", "get", "delete"])
@pytest.mark.parametrize("fault", [REFUSE, LOSE], ids=["refused", "lost"])
async def test_a_fault_is_mended(scripted: ScriptedService, operation: str, fault: Fault) -> None:
    metas = filled(scripted, 64)
    scripted.service.fail(operation, fault)
    before = asyncio.all_tasks()
    assert await read(scripted, metas) == data_of(scripted, metas)
    await reach_quiet(scripted, before)


async def test_where_composing_fails_objects_are_read_one_by_one(
    scripted: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    metas = filled(scripted, 96)
    scripted.service.fail("compose", *[refused_for_good()] * 3)
    assert await read(scripted, metas) == data_of(scripted, metas)
    assert caplog.text.count("one by one") == 1


def denied(uri: str) -> Fault:
    return Fault(kind="refuse", error=PermissionDeniedError("no", uri=uri, status=403))


async def test_a_bucket_that_takes_no_composites_says_so(scripted: ScriptedService) -> None:
    metas = filled(scripted, 32)
    scripted.service.fail("compose", denied("memory://x"))
    with pytest.raises(PermissionDeniedError, match=r"storage\.objects\.create"):
        await read(scripted, metas)
    assert scripted.is_clean()


async def test_a_bucket_that_deletes_no_composites_says_so(scripted: ScriptedService) -> None:
    metas = filled(scripted, 32)
    scripted.service.fail("delete", denied("memory://x"))
    with pytest.raises(PermissionDeniedError, match=r"storage\.objects\.delete"):
        await read(scripted, metas)
    assert scripted.is_clean()


async def test_a_delete_that_fails_for_now_is_left_to_clean(
    scripted: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    metas = filled(scripted, 32)
    scripted.service.fail("delete", *[REFUSE] * 4)
    assert await read(scripted, metas) == data_of(scripted, metas)
    assert "Store.clean" in caplog.text
    assert len(composites(scripted)) == 1


async def test_a_composite_whose_answers_were_all_lost_is_deleted(
    scripted: ScriptedService,
) -> None:
    metas = filled(scripted, 32)
    before = asyncio.all_tasks()
    scripted.service.fail("compose", LOSE)
    scripted.service.fail("head", *[REFUSE] * 4)
    assert await read(scripted, metas) == data_of(scripted, metas)
    assert scripted.service.count("compose") == 1
    await reach_quiet(scripted, before)


async def test_composites_go_as_the_read_goes_on(scripted: ScriptedService) -> None:
    """In number they are bounded by the requests that may be under way."""
    inner, most = scripted.service.compose, 0

    async def compose(*args: Any, **settings: Any) -> ObjectMeta:
        nonlocal most
        most = max(most, len(composites(scripted)))
        return await inner(*args, **settings)

    scripted.service.compose = compose
    metas = filled(scripted, 1600)
    assert await read(scripted, metas) == data_of(scripted, metas)
    assert scripted.service.count("compose") == 50
    assert most <= 3 * scripted.store.transfer.max_in_flight


# --- leaving early ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hang", "hang_after"])
@pytest.mark.parametrize("step", ["compose", "get", "delete"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_reader_may_be_cancelled_anywhere(
    scripted: ScriptedService, step: str, kind: str, times: int
) -> None:
    hang = Fault(kind=kind)  # type: ignore[arg-type]
    scripted.service.fail(step, None, hang)
    before = asyncio.all_tasks()
    reading = asyncio.create_task(read(scripted, filled(scripted, 200)))
    await hang.reached.wait()
    for _ in range(times):
        reading.cancel()
        await asyncio.sleep(0)
    hang.released.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await reach_quiet(scripted, before)


async def test_a_compose_that_is_done_after_its_reader_has_left_leaves_nothing(
    scripted: ScriptedService,
) -> None:
    """A service goes on with a request whose client has gone away."""
    inner = scripted.service.compose
    begun, go_on = asyncio.Event(), asyncio.Event()
    at_work: set[asyncio.Task[Any]] = set()

    async def work(*args: Any, **settings: Any) -> ObjectMeta:
        begun.set()
        await go_on.wait()
        return await inner(*args, **settings)

    async def compose(*args: Any, **settings: Any) -> ObjectMeta:
        task = asyncio.create_task(work(*args, **settings))
        at_work.add(task)
        return await asyncio.shield(task)

    scripted.service.compose = compose
    before = asyncio.all_tasks()
    reading = asyncio.create_task(read(scripted, filled(scripted, 64)))
    await begun.wait()
    reading.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.wait(at_work)
    await reach_quiet(scripted, before)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("kind", ["hang", "hang_after"])
async def test_a_compose_that_is_never_answered_is_not_waited_for(
    scripted: ScriptedService, kind: str
) -> None:
    hang = Fault(kind=kind)  # type: ignore[arg-type]
    scripted.service.fail("compose", hang)
    before = asyncio.all_tasks()
    reading = asyncio.create_task(read(scripted, filled(scripted, 32)))
    await hang.reached.wait()
    reading.cancel()
    async with asyncio.timeout(20) as limit:
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert not limit.expired()
    await reach_quiet(scripted, before)


@pytest.mark.parametrize("kind", ["hang", "hang_after"])
@pytest.mark.parametrize("step", ["compose", "get", "delete"])
def test_the_end_of_the_loop_may_come_anywhere(
    scripted: ScriptedService, step: str, kind: str
) -> None:
    """`asyncio.run` cancels every task there is, clean-up included, and waits for them."""

    async def main() -> None:
        hang = Fault(kind=kind)  # type: ignore[arg-type]
        scripted.service.fail(step, None, hang)
        tasks.append(asyncio.create_task(read(scripted, filled(scripted, 200))))
        await hang.reached.wait()

    tasks: list[asyncio.Task[Any]] = []
    asyncio.run(main())
    assert tasks[0].done()
    assert scripted.is_clean()
    assert composites(scripted) == []


async def test_an_iteration_that_is_left_leaves_nothing(scripted: ScriptedService) -> None:
    before = asyncio.all_tasks()
    batches = scripted.store.try_fetch_composed(filled(scripted, 900))
    await anext(batches)
    assert composites(scripted) or scripted.service.count("delete")
    await batches.aclose()
    await reach_quiet(scripted, before)


@pytest.mark.usefixtures("quick_collection")
async def test_an_iteration_that_is_dropped_leaves_nothing(scripted: ScriptedService) -> None:
    before = asyncio.all_tasks()
    batches = scripted.store.try_fetch_composed(filled(scripted, 900))
    await anext(batches)
    assert scripted.store.session.open_transfers
    del batches
    gc.collect()
    await asyncio.sleep(0)
    await reach_quiet(scripted, before)
    num_groups = -(-900 // 32)
    assert 0 < scripted.service.count("delete") <= scripted.service.count("compose") < num_groups


async def test_an_error_of_the_consumer_leaves_nothing(scripted: ScriptedService) -> None:
    before = asyncio.all_tasks()
    metas = filled(scripted, 900)

    def failing() -> Any:
        yield from metas[:500]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read(scripted, failing())
    await reach_quiet(scripted, before)


async def test_closing_the_store_ends_a_read_that_no_one_ends(scripted: ScriptedService) -> None:
    hang = Fault(kind="hang")
    scripted.service.fail("get", hang)
    reading = asyncio.create_task(read(scripted, filled(scripted, 200)))
    await hang.reached.wait()
    assert composites(scripted)
    await scripted.store.aclose()
    assert composites(scripted) == []
    hang.released.set()
    with pytest.raises(StorageError):
        await reading
    assert scripted.is_clean()

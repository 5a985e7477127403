"""Answers that were not heard: what may have been done is looked for, and never done twice."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import pytest

import aioflux
from aioflux import (
    AlreadyExistsError,
    NotFoundError,
    ObjectMeta,
    PreconditionFailedError,
    RetryPolicy,
    StorageError,
    TransientError,
)
from aioflux._services.responses import Failure, error_from_status
from aioflux._services.s3.wire import deletion_error
from aioflux._values.meta import ObjectAttributes
from aioflux.testing import GCSServer
from aioflux.testing.faults import Fault, FlakyService
from tests.patience import FAR_SECONDS
from tests.servers.statuses import AMBIGUOUS, THROTTLED
from tests.transfer.scripted_service import (
    LOSE,
    OPTIONS,
    PART,
    REFUSE,
    RETRY,
    ScriptedService,
    ServiceStore,
    pattern,
    service_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from aioflux import Store
    from aioflux._services.base import Source
    from aioflux.store import WriteMode
    from tests.transfer.clock import Clock

LARGE = pattern(2 * PART + 5)
NOW = datetime(2026, 2, 1, tzinfo=UTC)


def gone() -> Fault:
    return Fault(kind="refuse", error=NotFoundError("gone", uri="memory://x/a", status=404))


def short_of_time(scripted: ScriptedService) -> Store:
    retry = RetryPolicy(deadline_seconds=0.05, initial_seconds=1e-6)
    scripted.store = scripted.new_store(retry=retry)
    return scripted.store


# --- beginning an upload -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["overwrite", "create"])
@pytest.mark.parametrize("status", [None, *AMBIGUOUS, *THROTTLED])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_begin_whose_answer_is_lost_leaves_an_upload_without_parts(
    scripted: ScriptedService, times: int, status: int | None, mode: WriteMode
) -> None:
    """`Store.clean` aborts it; the write itself looks for nothing."""
    lost = answered(status, kind="lose", times=times) if status else [LOSE] * times
    scripted.service.fail("initiate_upload", *lost)
    await scripted.store.put("a", LARGE, mode=mode)
    assert scripted.get("a") == LARGE
    assert [len(each.parts) for each in scripted.bucket.uploads.values()] == [0] * times
    assert scripted.service.count("list_uploads") == 0
    await scripted.store.clean(older_than_seconds=0)
    assert scripted.is_clean()


@pytest.mark.parametrize("mode", ["overwrite", "create"])
async def test_a_begin_that_is_lost_for_good_stores_nothing(
    scripted: ScriptedService, mode: WriteMode
) -> None:
    scripted.service.fail("initiate_upload", *[LOSE] * 4)
    with pytest.raises(TransientError):
        await scripted.store.put("a", LARGE, mode=mode)
    assert not scripted.bucket.objects
    assert [len(each.parts) for each in scripted.bucket.uploads.values()] == [0] * 4


async def test_uploads_of_other_writers_of_the_key_go_on(scripted: ScriptedService) -> None:
    """Two writers of one key in one process, one of which loses the answer to its begin."""
    async with scripted.store.open_writer("a") as first:
        await first.write(LARGE)
        scripted.service.fail("initiate_upload", LOSE)
        await scripted.store.put("a", pattern(2 * PART, seed=4))
        assert len(scripted.bucket.uploads) == 2
    assert scripted.get("a") == LARGE
    assert len(scripted.bucket.uploads) == 1


# --- completing it -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["overwrite", "create"])
async def test_a_completion_that_was_done_is_found(
    scripted: ScriptedService, mode: WriteMode
) -> None:
    scripted.service.fail("complete_upload", LOSE)
    meta = await scripted.store.put("a", LARGE, mode=mode)
    assert meta.size == len(LARGE)
    assert scripted.get("a") == LARGE
    assert scripted.is_clean()


async def test_a_completion_that_is_found_needs_no_second_slot(scripted: ScriptedService) -> None:
    """Another writer has written the same bytes, so that the upload is still open."""
    scripted.store = scripted.new_store(max_in_flight=1)
    scripted.put("a", LARGE)
    lost = TransientError("lost before it was done", uri="memory://x/a", maybe_done=True)
    scripted.service.fail("complete_upload", Fault(kind="refuse", error=lost), gone())
    async with asyncio.timeout(FAR_SECONDS):
        await scripted.store.put("a", LARGE)
    assert scripted.is_clean()


@pytest.mark.parametrize("content", [b"somebody else's", None], ids=["another", "nothing"])
async def test_a_completion_that_cannot_be_known_says_so(
    scripted: ScriptedService, content: bytes | None
) -> None:
    scripted.service.fail("complete_upload", LOSE)
    inner = scripted.service.complete_upload

    async def complete_upload(*args: object, **settings: object) -> object:
        try:
            return await inner(*args, **settings)
        except TransientError:
            scripted.bucket.remove("a")
            if content is not None:
                scripted.put("a", content)
            raise

    scripted.service.complete_upload = complete_upload
    with pytest.raises(StorageError, match=r"not known whether .*/a was written"):
        await scripted.store.put("a", LARGE)
    assert scripted.is_clean()


async def test_an_upload_that_another_client_aborted_is_not_found(
    scripted: ScriptedService,
) -> None:
    scripted.service.fail("complete_upload", REFUSE, gone())
    with pytest.raises(NotFoundError, match="gone"):
        await scripted.store.put("a", LARGE)
    assert scripted.is_clean()


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("is_done", [True, False])
async def test_time_that_ends_in_a_completion_is_followed_by_a_look(
    scripted: ScriptedService, *, is_done: bool
) -> None:
    scripted.service.fail("complete_upload", Fault(kind="hang_after" if is_done else "hang"))
    writing = short_of_time(scripted).put("a", LARGE)
    if is_done:
        assert (await writing).size == len(LARGE)
    else:
        with pytest.raises(TransientError, match="deadline"):
            await writing
    assert scripted.is_clean()


@pytest.mark.usefixtures("clock")
async def test_an_upload_of_what_was_there_before_is_ended(scripted: ScriptedService) -> None:
    """The look finds an equal object, whoever wrote it; the upload must not stay."""
    scripted.put("a", LARGE)
    scripted.service.fail("complete_upload", Fault(kind="hang"))
    await short_of_time(scripted).put("a", LARGE)
    assert scripted.is_clean()


@pytest.mark.usefixtures("clock")
async def test_a_last_look_that_fails_is_reported(scripted: ScriptedService) -> None:
    scripted.service.fail("complete_upload", Fault(kind="hang"))
    scripted.service.fail("head", REFUSE)
    with pytest.raises(TransientError) as raised:
        await short_of_time(scripted).put("a", LARGE)
    assert any("could not be determined" in note for note in raised.value.__notes__)


async def test_a_conditional_completion_is_found(scripted: ScriptedService, tmp_path: Path) -> None:
    """Files honour the precondition of a completion, and have no checksum: they are read."""
    flaky = ScriptedService("unused", service=service_of(f"file://{tmp_path}"))
    flaky.store = flaky.new_store(range_size_bytes=PART)
    flaky.service.fail("complete_upload", LOSE)
    meta = await flaky.store.put("a", LARGE, mode="create")
    assert (meta.key, meta.size) == ("a", len(LARGE))
    assert (tmp_path / "a").read_bytes() == LARGE
    with pytest.raises(PreconditionFailedError):
        await flaky.store.put("a", LARGE, if_generation_match="another")


async def test_without_checksums_another_object_is_not_taken_for_the_revealed_one(
    scripted: ScriptedService,
) -> None:
    store = scripted.bucket.store

    def without_checksum(key: str, data: bytes, **settings: Any) -> ObjectMeta:
        store(key, data, **settings)
        stored = scripted.bucket.objects[key]
        scripted.bucket.objects[key] = replace(stored, meta=replace(stored.meta, crc32c=None))
        return scripted.bucket.objects[key].meta

    scripted.bucket.store = without_checksum
    unheard = TransientError("lost before it was done", uri="memory://x/a", maybe_done=True)
    hang = Fault(kind="hang")
    scripted.service.fail("compose", Fault(kind="refuse", error=unheard), hang)
    writing = asyncio.create_task(scripted.store.put("a", LARGE, mode="create"))
    await hang.reached.wait()
    scripted.put("a", bytes(len(LARGE)))
    hang.released.set()
    with pytest.raises(AlreadyExistsError):
        await writing


OF_OTHERS: list[tuple[Any, Any]] = [
    ({"metadata": {"by": "another"}}, {"metadata": {"by": "us"}}),
    ({"cache_control": "no-store"}, {"cache_control": "max-age=60"}),
    ({}, {"content_encoding": "gzip"}),
    ({}, {"content_disposition": "inline"}),
]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("others", "ours"), OF_OTHERS, ids=lambda each: "".join(each))
async def test_a_write_of_other_attributes_is_not_taken_for_done(
    scripted: ScriptedService, others: Any, ours: Any
) -> None:
    scripted.bucket.store("a", b"same", ObjectAttributes(**others))
    scripted.service.fail("put", Fault(kind="hang"))
    with pytest.raises(TransientError):
        await short_of_time(scripted).put("a", b"same", **ours)


async def test_a_lost_write_with_attributes_is_found(scripted: ScriptedService) -> None:
    attributes: Any = {"cache_control": "no-store", "storage_class": "COLD"}
    scripted.service.fail("put", LOSE)
    meta = await scripted.store.put("a", b"1", mode="create", **attributes)
    assert (meta.cache_control, meta.storage_class) == ("no-store", "COLD")


# --- a write that another writer replaced before its retry ------------------------------------


def replaced_after(scripted: ScriptedService, operation: str, key: str) -> None:
    """Carry out the first request, lose its answer, and have another writer replace the object."""
    inner = getattr(scripted.service, operation)
    requests = itertools.count(1)

    async def request(*args: Any, **settings: Any) -> ObjectMeta:
        meta: ObjectMeta = await inner(*args, **settings)
        if next(requests) > 1:
            return meta
        scripted.put(key, b"another")
        raise TransientError("the answer was lost", uri=meta.uri, maybe_done=True)

    setattr(scripted.service, operation, request)


async def put_small_of(scripted: ScriptedService, **condition: Any) -> ObjectMeta:
    return await scripted.store.put("c", b"12", **condition)


async def put_large_of(scripted: ScriptedService, **condition: Any) -> ObjectMeta:
    return await scripted.store.put("c", LARGE, **condition)


async def compose_of(scripted: ScriptedService, **condition: Any) -> ObjectMeta:
    return await scripted.store.compose("c", ["a", "b"], **condition)


async def copy_of(scripted: ScriptedService, **condition: Any) -> ObjectMeta:
    return await scripted.store.copy("b", "c", **condition)


CONDITIONAL = {
    "put": ("put", put_small_of),
    "large put": ("compose", put_large_of),  # by a conditional compose of the uploaded object
    "compose": ("compose", compose_of),
    "copy": ("copy", copy_of),
}
each_conditional = pytest.mark.parametrize(
    ("operation", "write"), CONDITIONAL.values(), ids=CONDITIONAL
)


@pytest.mark.usefixtures("sources")
@each_conditional
async def test_a_creation_that_may_have_been_replaced_says_so(
    scripted: ScriptedService, operation: str, write: Any
) -> None:
    replaced_after(scripted, operation, "c")
    with pytest.raises(AlreadyExistsError, match="may have been carried out") as raised:
        await write(scripted, mode="create")
    assert raised.value.maybe_done
    assert pickle.loads(pickle.dumps(raised.value)).maybe_done
    assert scripted.get("c") == b"another"


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("name", ["put", "large put", "compose"])
async def test_a_replacement_that_may_have_been_replaced_says_so(
    scripted: ScriptedService, name: str
) -> None:
    operation, write = CONDITIONAL[name]
    old = scripted.put("c", b"old")
    replaced_after(scripted, operation, "c")
    with pytest.raises(PreconditionFailedError, match="may have been carried out") as raised:
        await write(scripted, if_generation_match=old.generation)
    assert raised.value.maybe_done


async def test_a_conditional_completion_that_may_have_been_replaced_says_so(tmp_path: Path) -> None:
    flaky = ScriptedService("unused", service=service_of(f"file://{tmp_path}"))
    inner = flaky.service.complete_upload

    async def complete_upload(*args: Any, **settings: Any) -> ObjectMeta:
        meta = await inner(*args, **settings)
        if flaky.service.count("complete_upload") > 1:
            return meta
        (tmp_path / "a").write_bytes(b"another")
        raise TransientError("the answer was lost", uri=meta.uri, maybe_done=True)

    flaky.service.complete_upload = complete_upload
    with pytest.raises(StorageError) as raised:
        await flaky.store.put("a", LARGE, mode="create")
    assert raised.value.maybe_done


@pytest.mark.usefixtures("sources")
@each_conditional
async def test_a_condition_that_never_held_is_not_ambiguous(
    scripted: ScriptedService, operation: str, write: Any
) -> None:
    """Also after an attempt that was certainly not carried out."""
    scripted.put("c", b"old")
    scripted.service.fail(operation, REFUSE)
    with pytest.raises(AlreadyExistsError) as raised:
        await write(scripted, mode="create")
    assert not raised.value.maybe_done
    assert "may have been" not in str(raised.value)


@pytest.mark.parametrize("error", [StorageError, aioflux.PermissionDeniedError])
async def test_any_last_error_of_an_ambiguous_write_says_so(
    scripted: ScriptedService, error: type[StorageError]
) -> None:
    lost = TransientError("lost before it was done", uri="memory://x/a", maybe_done=True)
    scripted.service.fail("put", Fault(kind="refuse", error=lost))
    scripted.service.fail("put", Fault(kind="refuse", error=error("no", uri="memory://x/a")))
    with pytest.raises(error, match="may have been carried out") as raised:
        await scripted.store.put("a", b"1")
    assert raised.value.maybe_done


async def test_a_write_that_is_found_after_another_error_has_succeeded(
    scripted: ScriptedService,
) -> None:
    error = aioflux.PermissionDeniedError("the token has expired", uri="memory://x/a")
    scripted.service.fail("put", LOSE, Fault(kind="refuse", error=error))
    assert (await scripted.store.put("a", b"1")).size == 1


async def test_an_ambiguous_write_without_the_permission_to_read_says_so(
    scripted: ScriptedService,
) -> None:
    """The rejection is raised, not the error of the comparison."""
    error = aioflux.PermissionDeniedError("may not read", uri="memory://x/a")
    scripted.service.fail("put", LOSE)
    scripted.service.fail("head", Fault(kind="refuse", error=error))
    with pytest.raises(AlreadyExistsError) as raised:
        await scripted.store.put("a", b"1", mode="create")
    assert raised.value.maybe_done
    assert any("may not read" in note for note in raised.value.__cause__.__notes__)


async def test_a_counter_never_counts_twice_in_silence(scripted: ScriptedService) -> None:
    """Increments by generation, with a quarter of the answers lost, and writers that race."""
    scripted.put("n", b"0")
    rng = random.Random(7)
    num_done = num_unknown = 0

    def draw(operation: str) -> Fault | None:
        return LOSE if operation == "put" and rng.random() < 0.25 else None

    async def increment(writer: int) -> None:
        nonlocal num_done, num_unknown
        while True:
            meta = await store.head("n")
            value, _, _ = (await store.get(meta)).partition(b" ")
            try:
                data = b"%d of %d" % (int(value) + 1, writer)
                await store.put("n", data, if_generation_match=meta.generation)
            except PreconditionFailedError as exc:
                if exc.maybe_done:
                    num_unknown += 1
                    return
            except NotFoundError:
                continue
            else:
                num_done += 1
                return

    service = FlakyService(service_of(scripted.service.uri("")), draw=draw)
    store = ServiceStore(service, transfer=OPTIONS, retry=RETRY)
    for _ in range(6):
        await asyncio.gather(*(increment(writer) for writer in range(4)))
    value = int(scripted.get("n").partition(b" ")[0])
    assert num_done <= value <= num_done + num_unknown
    assert num_unknown


# --- a service that is asked too often -------------------------------------------------------


def answered(
    status: int, *, kind: Literal["refuse", "lose"] = "refuse", times: int = 1
) -> list[Fault]:
    """A status in place of the answer: before the work, or after it."""
    error = error_from_status(Failure(status, action="write", uri="memory://x/c"))
    return [Fault(kind=kind, error=error)] * times


async def create_small(scripted: ScriptedService) -> ObjectMeta:
    return await scripted.store.put("c", b"12", mode="create")


async def compose_new(scripted: ScriptedService) -> ObjectMeta:
    return await scripted.store.compose("c", ["a", "b"], mode="create")


async def copy_new(scripted: ScriptedService) -> ObjectMeta:
    return await scripted.store.copy("b", "c", mode="create")


MAKING = {"put": create_small, "compose": compose_new, "copy": copy_new}
each_making = pytest.mark.parametrize(("operation", "make"), MAKING.items(), ids=MAKING)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("status", AMBIGUOUS)
@each_making
async def test_what_was_made_before_an_error_is_found(
    scripted: ScriptedService,
    operation: str,
    make: Callable[[ScriptedService], Awaitable[ObjectMeta]],
    status: int,
) -> None:
    scripted.service.fail(operation, *answered(status, kind="lose"))
    assert await make(scripted) == scripted.bucket.objects["c"].meta


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("status", THROTTLED)
@each_making
async def test_a_throttled_request_is_repeated_without_a_look(
    scripted: ScriptedService,
    operation: str,
    make: Callable[[ScriptedService], Awaitable[ObjectMeta]],
    status: int,
) -> None:
    scripted.service.fail(operation, *answered(status, times=3))
    await make(scripted)
    assert (scripted.service.count(operation), scripted.service.count("head")) == (4, 0)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("status", THROTTLED)
@each_making
async def test_a_storm_is_not_made_worse_by_a_look(
    scripted: ScriptedService,
    operation: str,
    make: Callable[[ScriptedService], Awaitable[ObjectMeta]],
    status: int,
) -> None:
    """The error says that the write may have been carried out."""
    scripted.service.fail(operation, *answered(status, times=4))
    with pytest.raises(TransientError) as raised:
        await make(scripted)
    assert (scripted.service.count(operation), scripted.service.count("head")) == (4, 0)
    assert raised.value.maybe_done
    assert "may have been carried out" in str(raised.value)


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("status", THROTTLED)
@pytest.mark.parametrize(
    ("mode", "operation"),
    [("overwrite", "complete_upload"), ("create", "compose")],
    ids=["completion", "conditional"],
)
async def test_a_storm_at_the_end_of_an_upload_is_followed_by_a_look(
    scripted: ScriptedService, mode: WriteMode, operation: str, status: int, *, is_done: bool
) -> None:
    """Its parts are dropped after it, so that nobody could complete it later."""
    scripted.service.fail(operation, *answered(status, times=3))
    scripted.service.fail(operation, *answered(status, kind="lose" if is_done else "refuse"))
    writing = scripted.store.put("a", LARGE, mode=mode)
    if is_done:
        assert (await writing).size == len(LARGE)
    else:
        with pytest.raises(TransientError):
            await writing
    looks = [key for name, key in scripted.service.calls if (name, key) == ("head", "a")]
    assert len(looks) == 1
    assert ("a" in scripted.bucket.objects) == is_done
    assert scripted.is_clean()


@pytest.mark.parametrize("status", AMBIGUOUS)
@pytest.mark.parametrize("mode", ["overwrite", "create"])
async def test_a_completion_that_was_done_before_an_error_is_found(
    scripted: ScriptedService, status: int, mode: WriteMode
) -> None:
    scripted.service.fail("complete_upload", *answered(status, kind="lose"))
    await scripted.store.put("a", LARGE, mode=mode)
    assert scripted.get("a") == LARGE
    assert scripted.is_clean()


@pytest.mark.parametrize("code", ["SlowDown", "InternalError"])
async def test_an_object_that_was_deleted_before_its_error_is_not_missing(code: str) -> None:
    """Of many in one request, each with an answer of its own."""

    scripted, inner = ScriptedService("deleting"), service_of("memory://deleting")
    scripted.service.capabilities = replace(inner.capabilities, delete_page_size=1000)

    async def delete_page(sources: Sequence[Source]) -> Mapping[str, StorageError]:
        for source in sources:
            await inner.delete(source.key, generation=source.generation)
        return {"k1": deletion_error(code, "", uri=inner.uri("k1"))}

    scripted.service.delete_page = delete_page
    keys = [f"k{at}" for at in range(8)]
    for key in keys:
        scripted.put(key, b"1")
    result = await scripted.store.delete_many(keys)
    assert (result.deleted, result.missing, dict(result.errors)) == (tuple(keys), (), {})


# --- deleting ------------------------------------------------------------------------------


async def test_a_delete_whose_answer_is_lost_never_removes_what_came_since(
    scripted: ScriptedService,
) -> None:
    seen = scripted.put("a", b"old")
    hang = Fault(kind="hang")
    scripted.service.fail("delete", LOSE, hang)
    deleting = asyncio.create_task(scripted.store.delete(seen))
    await hang.reached.wait()
    scripted.put("a", b"new")
    hang.released.set()
    await deleting
    assert scripted.get("a") == b"new"


async def test_a_delete_by_name_that_was_done_spares_what_came_since(
    scripted: ScriptedService,
) -> None:
    """Done, its answer lost, and somebody writes the name anew before the next attempt."""
    scripted.put("a", b"old")
    hang = Fault(kind="hang")
    scripted.service.fail("delete", LOSE, hang)
    deleting = asyncio.create_task(scripted.store.delete("a"))
    await hang.reached.wait()
    scripted.put("a", b"new")
    hang.released.set()
    await deleting
    assert scripted.get("a") == b"new"


async def test_a_delete_by_name_takes_what_replaces_the_object_before_it_is_done(
    scripted: ScriptedService,
) -> None:
    scripted.put("a", b"old")
    hang = Fault(kind="hang")
    scripted.service.fail("delete", hang)
    deleting = asyncio.create_task(scripted.store.delete("a"))
    await hang.reached.wait()
    scripted.put("a", b"new")
    hang.released.set()
    await deleting
    assert "a" not in scripted.bucket.objects


def replaced_after_each_look(scripted: ScriptedService, *, times: int = 1000) -> list[float]:
    """Have others replace the object after each look at it; return when it was looked at."""
    inner, looks = scripted.service.head, []

    async def head(key: str, generation: str = "") -> ObjectMeta:
        looks.append(asyncio.get_running_loop().time())
        meta = await inner(key, generation=generation)
        if len(looks) <= times:
            scripted.put(key, b"newer")
        return meta

    scripted.service.head = head
    return looks


@pytest.mark.parametrize("times", [1, 2, 3, 1000])
async def test_a_delete_by_name_of_what_others_replace_comes_to_an_end(
    scripted: ScriptedService, clock: Clock, times: int
) -> None:
    """It looks again after a pause, three times; then it deletes whatever has the name."""
    scripted.put("a", b"old")
    store = scripted.new_store(retry=RetryPolicy(initial_seconds=1.0))
    looks = replaced_after_each_look(scripted, times=times)
    begun = clock.now
    await store.delete("a")
    assert "a" not in scripted.bucket.objects
    assert len(looks) == min(times + 1, 3)
    assert scripted.service.count("delete") == min(times, 3) + 1
    waits = [after - before for before, after in itertools.pairwise(looks)]
    assert all(0 < wait <= 2.0**at for at, wait in enumerate(waits))
    assert clock.now - begun == pytest.approx(sum(waits))


async def test_a_delete_by_name_without_a_generation_is_sent_once(
    scripted: ScriptedService,
) -> None:
    """Its answer is lost, and what came since is not deleted by another attempt."""
    scripted.put("a", b"old")
    replaced_after_each_look(scripted)
    scripted.service.fail("delete", None, None, None, LOSE)
    with pytest.raises(TransientError):
        await scripted.store.delete("a")
    assert scripted.service.count("delete") == 4


async def test_a_delete_by_name_that_was_not_sent_is_sent_again(scripted: ScriptedService) -> None:
    scripted.put("a", b"old")
    replaced_after_each_look(scripted)
    scripted.service.fail("delete", None, None, None, REFUSE)
    await scripted.store.delete("a")
    assert "a" not in scripted.bucket.objects
    assert scripted.service.count("delete") == 5


async def test_many_that_others_replace_are_deleted_by_name() -> None:
    """By a request for many, which is given what a listing tells; the rest one by one."""

    scripted, inner = ScriptedService("replacing"), service_of("memory://replacing")
    scripted.service.capabilities = replace(inner.capabilities, delete_page_size=1000)

    async def delete_page(sources: Sequence[Source]) -> Mapping[str, StorageError]:
        failed: dict[str, StorageError] = {}
        scripted.put("k1", b"newer")
        for source in sources:
            try:
                await inner.delete(source.key, generation=source.generation)
            except PreconditionFailedError as exc:
                failed[source.key] = exc
        return failed

    scripted.service.delete_page = delete_page
    keys = [f"k{at}" for at in range(8)]
    for key in keys:
        scripted.put(key, b"1")
    result = await scripted.store.delete_many(keys)
    assert (result.deleted, result.missing, dict(result.errors)) == (tuple(keys), (), {})
    seen = [scripted.put(key, b"1") for key in keys]
    result = await scripted.store.delete_many(seen)
    assert list(result.errors) == ["k1"]
    assert scripted.get("k1") == b"newer"


async def test_a_delete_by_name_without_retries_is_one_request(scripted: ScriptedService) -> None:
    scripted.put("a", b"old")
    await scripted.new_store(retry=RetryPolicy(max_attempts=1)).delete("a")
    assert (scripted.service.count("head"), scripted.service.count("delete")) == (0, 1)


async def test_a_delete_by_name_removes_only_what_was_seen_after_a_lost_answer(
    scripted: ScriptedService,
) -> None:
    scripted.put("a", b"old")
    unheard = TransientError("lost before it was done", uri="memory://x/a", maybe_done=True)
    hang = Fault(kind="hang")
    scripted.service.fail("delete", Fault(kind="refuse", error=unheard), hang)
    deleting = asyncio.create_task(scripted.store.delete("a"))
    await hang.reached.wait()
    scripted.put("a", b"written after the look")
    hang.released.set()
    await deleting
    assert scripted.get("a") == b"written after the look"


async def test_a_delete_that_was_not_sent_was_not_done(scripted: ScriptedService) -> None:
    """What is gone at the next attempt, somebody else deleted."""
    scripted.put("a", b"1")
    hang = Fault(kind="hang")
    scripted.service.fail("delete", REFUSE, hang)
    deleting = asyncio.create_task(scripted.store.delete("a"))
    await hang.reached.wait()
    scripted.bucket.remove("a")
    hang.released.set()
    with pytest.raises(NotFoundError):
        await deleting


async def test_a_refused_delete_of_a_generation_does_not_take_another_for_it(
    scripted: ScriptedService,
) -> None:
    seen = scripted.put("a", b"1")
    hang = Fault(kind="hang")
    scripted.service.fail("delete", REFUSE, hang)
    deleting = asyncio.create_task(scripted.store.delete(seen))
    await hang.reached.wait()
    scripted.put("a", b"2")
    hang.released.set()
    with pytest.raises(PreconditionFailedError):
        await deleting


# --- composing and copying -----------------------------------------------------------------


@pytest.fixture
def sources(scripted: ScriptedService) -> None:
    scripted.put("a", b"1")
    attributes = ObjectAttributes(content_type="text/plain", metadata={"k": "v"})
    scripted.bucket.store("b", b"2", attributes)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("metadata", [None, {}, {"k": "v"}], ids=["any", "none", "some"])
async def test_a_compose_that_was_done_is_not_repeated(
    scripted: ScriptedService, metadata: dict[str, str] | None
) -> None:
    scripted.service.fail("compose", LOSE)
    meta = await scripted.store.compose(
        "c", ["a", "b"], content_type="text/plain", metadata=metadata
    )
    assert scripted.service.count("compose") == 1
    assert scripted.get("c") == b"12"
    assert meta == scripted.bucket.objects["c"].meta


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    "attributes",
    [{"metadata": {"k": "v"}}, {"content_type": "text/plain"}],
    ids=["metadata", "content type"],
)
async def test_a_compose_is_repeated_where_what_is_there_is_not_as_requested(
    scripted: ScriptedService, attributes: dict[str, Any]
) -> None:
    scripted.put("c", b"12")
    unheard = TransientError("lost before it was done", uri="memory://x/c", maybe_done=True)
    scripted.service.fail("compose", Fault(kind="refuse", error=unheard))
    meta = await scripted.store.compose("c", ["a", "b"], **attributes)
    assert scripted.service.count("compose") == 2
    assert dict(meta.metadata) == attributes.get("metadata", {})


@pytest.mark.usefixtures("sources")
async def test_a_refused_compose_is_repeated_without_a_look(scripted: ScriptedService) -> None:
    scripted.service.fail("compose", REFUSE)
    await scripted.store.compose("c", ["a", "b"])
    assert (scripted.service.count("compose"), scripted.service.count("head")) == (2, 0)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("num_sources", [1, 2])
async def test_an_append_by_name_begins_again_if_others_replace_a_source(
    scripted: ScriptedService, clock: Clock, num_sources: int
) -> None:
    store = scripted.new_store(retry=RetryPolicy(initial_seconds=1.0))
    replaced_after_each_look(scripted, times=6)
    begun = clock.now
    await store.compose("a", ["a", "b"][:num_sources])
    assert scripted.get("a") == b"newer" * num_sources
    assert clock.now > begun


@pytest.mark.usefixtures("sources")
async def test_an_append_that_others_never_let_end_is_an_error(scripted: ScriptedService) -> None:
    looks = replaced_after_each_look(scripted)
    with pytest.raises(NotFoundError):
        await scripted.store.compose("a", ["a"])
    assert len(looks) == scripted.store.retry.max_attempts


@pytest.mark.usefixtures("sources")
async def test_an_append_of_pinned_sources_does_not_begin_again(scripted: ScriptedService) -> None:
    old = scripted.bucket.objects["a"].meta
    looks = replaced_after_each_look(scripted)
    with pytest.raises(NotFoundError):
        await scripted.store.compose("a", [old])
    assert len(looks) == 1


@pytest.mark.usefixtures("sources")
async def test_an_append_that_may_have_been_done_does_not_begin_again(
    scripted: ScriptedService,
) -> None:
    """Done, its answer lost, and replaced before the next attempt: it would be done twice."""
    hang = Fault(kind="hang")
    scripted.service.fail("compose", LOSE)
    scripted.service.fail("head", None, None, hang)  # the look before the next attempt
    appending = asyncio.create_task(scripted.store.compose("a", ["a", "b"]))
    await hang.reached.wait()
    scripted.put("a", b"written on")
    hang.released.set()
    with pytest.raises(NotFoundError):
        await appending
    assert scripted.get("a") == b"written on"


@pytest.mark.usefixtures("sources")
async def test_an_append_that_was_not_done_is_repeated(scripted: ScriptedService) -> None:
    scripted.put("b", b"")
    unheard = TransientError("lost before it was done", uri="memory://x/a", maybe_done=True)
    scripted.service.fail("compose", Fault(kind="refuse", error=unheard))
    before = scripted.bucket.objects["a"].meta.generation
    # With an empty source, the result looks as the object did before.
    meta = await scripted.store.compose("a", ["a", "b"])
    assert meta.generation != before


@pytest.mark.usefixtures("sources")
async def test_a_copy_that_was_done_is_not_repeated(scripted: ScriptedService) -> None:
    scripted.service.fail("copy", LOSE)
    meta = await scripted.store.copy("b", "c")
    assert scripted.service.count("copy") == 1
    assert meta.metadata == {"k": "v"}


@pytest.mark.usefixtures("sources")
async def test_a_copy_is_repeated_where_only_the_bytes_are_there(scripted: ScriptedService) -> None:
    scripted.put("c", b"2")
    unheard = TransientError("lost before it was done", uri="memory://x/c", maybe_done=True)
    scripted.service.fail("copy", Fault(kind="refuse", error=unheard))
    await scripted.store.copy("b", "c")
    assert scripted.bucket.objects["c"].meta.metadata == {"k": "v"}


@pytest.mark.usefixtures("sources")
async def test_a_copy_whose_source_is_gone_is_not_found(scripted: ScriptedService) -> None:
    unheard = TransientError("lost before it was done", uri="memory://x/c", maybe_done=True)
    scripted.service.fail("copy", Fault(kind="refuse", error=unheard))
    with pytest.raises(NotFoundError):
        await scripted.store.copy("z", "c")


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("operation", ["compose", "copy"])
async def test_an_attempt_that_is_carried_out_late_is_found(
    scripted: ScriptedService, operation: str
) -> None:
    """Lost, not there at the look, and there when the second attempt is refused."""
    unheard = TransientError("lost on the way", uri="memory://x/c", maybe_done=True)
    hang = Fault(kind="hang")
    scripted.service.fail(operation, Fault(kind="refuse", error=unheard), hang)
    if operation == "compose":
        call = scripted.store.compose("c", ["b"], mode="create")
    else:
        call = scripted.store.copy("b", "c", mode="create")
    running = asyncio.create_task(call)
    await hang.reached.wait()
    attributes = ObjectAttributes(content_type="text/plain", metadata={"k": "v"})
    late = scripted.bucket.store("c", b"2", attributes)
    hang.released.set()
    assert await running == late


async def test_objects_without_a_checksum_are_never_taken_for_each_other(tmp_path: Path) -> None:
    flaky = ScriptedService("unused", service=service_of(f"file://{tmp_path}"))
    for key, data in (("a", b"1"), ("b", b"2"), ("c", b"xy")):
        (tmp_path / key).write_bytes(data)
    unheard = TransientError("lost before it was done", uri="file:///c", maybe_done=True)
    flaky.service.fail("compose", Fault(kind="refuse", error=unheard))
    await flaky.store.compose("c", ["a", "b"])
    assert (tmp_path / "c").read_bytes() == b"12"


# --- on the wire ---------------------------------------------------------------------------

LOST = {
    "create": "xml.multipart.create",
    "part": "xml.multipart.part",
    "complete": "xml.multipart.complete",
    "compose": "storage.objects.compose",
    "delete": "objects.delete",
}


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        yield running


@pytest.mark.parametrize("mode", ["overwrite", "create"])
@pytest.mark.parametrize("operation", LOST.values(), ids=LOST)
async def test_no_lost_answer_leaves_parts_or_objects(
    server: GCSServer, operation: str, mode: Literal["overwrite", "create"]
) -> None:
    retry = RetryPolicy(initial_seconds=0.01)
    async with aioflux.open_store(
        "gs://bucket", endpoint_url=server.url, retry=retry, transfer=OPTIONS
    ) as store:
        with server.faults.inject(operation, lost=True, times=1):
            key = f"{operation} {mode}"
            data = LARGE
            meta = await store.put(key, data, mode=mode)
        assert meta.key == key
        if operation == LOST["create"]:  # an upload without parts
            assert server.stats.open_uploads == 1
            await store.clean(older_than_seconds=0)
    assert server.get("bucket", key) == data
    assert server.stats.open_uploads == 0
    assert not server.keys("bucket", ".aioflux")


async def test_no_lost_answer_does_a_thing_twice(server: GCSServer) -> None:
    server.put("bucket", "x", b"1")
    server.stats.reset()
    server.faults.clear()
    retry = RetryPolicy(initial_seconds=0.01)
    async with aioflux.open_store("gs://bucket", endpoint_url=server.url, retry=retry) as store:
        for operation in ("storage.objects.compose", "storage.objects.rewrite", "objects.delete"):
            server.faults.add(operation, lost=True, times=1)
        await store.compose("y", ["x", "x"], metadata={"k": "v"})
        await store.copy("y", "z")
        await store.delete("y")
    assert server.get("bucket", "z") == b"11"
    for operation in ("storage.objects.compose", "storage.objects.rewrite"):
        assert server.stats.operation(operation).requests == 1
    assert server.faults.injected["lost"] == 3
    server.faults.clear()


async def test_a_damaged_response_to_a_write_does_not_remove_the_object(
    scripted: ScriptedService,
) -> None:
    inner = scripted.service.put

    async def put(*args: Any, **named: Any) -> ObjectMeta:
        return replace(await inner(*args, **named), crc32c=1)

    scripted.service.put = put
    await scripted.store.put("a", b"mine")
    assert scripted.get("a") == b"mine"

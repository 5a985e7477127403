"""Writing objects: parts, lost answers, wrong bytes, aborts and conditions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import (
    AlreadyExistsError,
    ChecksumError,
    CredentialsError,
    ObjectMeta,
    PreconditionFailedError,
    StorageError,
    TransferOptions,
    TransientError,
)
from aioflux._services.base import UploadedPart
from aioflux._transfer.read_plan import plan_part_size
from aioflux._transfer.temp_keys import TEMPORARY_PREFIX
from aioflux._values.checksums import crc32c
from aioflux.testing.faults import Fault, FlakyService
from tests.transfer.scripted_service import (
    LOSE,
    MIB,
    PART,
    REFUSE,
    ScriptedService,
    pattern,
    refused_for_good,
    service_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._services.base import PartRequest, Service, WriteRequest
    from aioflux.store import ObjectWriter, WriteMode

SMALL, LARGE = pattern(1000), pattern(3 * PART + 5)
SIZES = pytest.mark.parametrize("data", [SMALL, LARGE], ids=["one request", "parts"])


@given(st.integers(5 * MIB, 5 * 1024 * MIB))
def test_ten_thousand_parts_hold_the_largest_object(part_size: int) -> None:
    sizes = [plan_part_size(number, part_size) for number in range(1, 10_001)]
    assert sum(sizes) >= 5 * 1024**4
    assert sizes[0] == part_size
    assert sizes == sorted(sizes)
    assert min(sizes) >= 5 * MIB
    assert max(sizes) <= 5 * 1024 * MIB


def test_the_sizes_that_the_writer_promises() -> None:
    options = TransferOptions()
    held, begins = 0, 0
    for number in range(1, 10_001):
        size = plan_part_size(number, options.part_size_bytes)
        if size > options.max_buffered_bytes and not begins:
            assert size == 128 * MIB
            begins = held
        held += size
        if held >= 5 * 1024**4:
            assert size == 4 * 1024**3
            break
    assert begins // 1024**3 == 98


async def write(
    scripted: ScriptedService, *pieces: bytes, mode: WriteMode = "overwrite"
) -> ObjectWriter:
    async with scripted.store.open_writer("a", mode=mode) as writer:
        for piece in pieces:
            await writer.write(piece)
    return writer


@pytest.mark.parametrize("mode", ["overwrite", "create"])
@pytest.mark.parametrize("fault", [REFUSE, LOSE], ids=["refused", "lost"])
@SIZES
async def test_every_step_may_fail_once(
    scripted: ScriptedService, data: bytes, fault: Fault, mode: WriteMode
) -> None:
    for operation in ("put", "put_part", "complete_upload", "compose", "delete"):
        scripted.service.fail(operation, fault)
    meta = await scripted.store.put("a", data, mode=mode)
    assert scripted.get("a") == data
    assert meta.generation == scripted.bucket.objects["a"].meta.generation
    assert list(scripted.bucket.objects) == ["a"]
    assert scripted.is_clean()


@SIZES
async def test_a_lost_response_is_not_taken_for_another_clients_object(
    scripted: ScriptedService, data: bytes
) -> None:
    scripted.put("a", b"somebody else's")
    scripted.service.fail("put", REFUSE)
    scripted.service.fail("compose", REFUSE)
    with pytest.raises(AlreadyExistsError, match="/a"):
        await scripted.store.put("a", data, mode="create")
    assert scripted.get("a") == b"somebody else's"
    assert list(scripted.bucket.objects) == ["a"]
    assert scripted.is_clean()


@SIZES
async def test_a_write_in_a_generation_survives_a_lost_answer(
    scripted: ScriptedService, data: bytes
) -> None:
    seen = scripted.put("a", b"old")
    scripted.service.fail("put", LOSE)
    scripted.service.fail("compose", LOSE)
    await scripted.store.put("a", data, if_generation_match=seen.generation)
    assert scripted.get("a") == data
    with pytest.raises(PreconditionFailedError, match="/a"):
        await scripted.store.put("a", data, if_generation_match=seen.generation)


@pytest.mark.parametrize("mode", ["overwrite", "create"])
@pytest.mark.parametrize("operation", ["initiate_upload", "put_part", "complete_upload"])
async def test_a_failure_aborts_the_upload(
    scripted: ScriptedService, operation: str, mode: WriteMode
) -> None:
    scripted.service.fail(operation, refused_for_good())
    with pytest.raises(StorageError, match="no"):
        await scripted.store.put("a", LARGE, mode=mode)
    assert not scripted.bucket.objects
    assert scripted.is_clean()


async def test_a_failing_reveal_leaves_no_temporary_object(scripted: ScriptedService) -> None:
    scripted.service.fail("compose", refused_for_good())
    with pytest.raises(StorageError, match="no"):
        await scripted.store.put("a", LARGE, mode="create")
    assert not scripted.bucket.objects


async def test_foreign_errors_of_a_begin_come_back_as_they_are(scripted: ScriptedService) -> None:
    scripted.service.fail(
        "initiate_upload", Fault(kind="refuse", error=CredentialsError("sign in"))
    )  # type: ignore[arg-type]
    with pytest.raises(CredentialsError, match="sign in"):
        await scripted.store.put("a", LARGE)
    assert scripted.is_clean()


async def test_an_abort_that_fails_is_noted_on_the_first_error(scripted: ScriptedService) -> None:
    scripted.service.fail("put_part", refused_for_good())
    scripted.service.fail("abort_upload", *[REFUSE] * 4)
    with pytest.raises(StorageError, match="no") as raised:
        await scripted.store.put("a", LARGE)
    assert any("could not be aborted" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("mode", ["overwrite", "create"])
@pytest.mark.parametrize("kind", ["hang", "hang_after"])
@pytest.mark.parametrize("operation", ["initiate_upload", "put_part", "complete_upload"])
async def test_cancelling_anywhere_leaves_no_upload(
    scripted: ScriptedService, operation: str, kind: str, mode: WriteMode
) -> None:
    before = asyncio.all_tasks()
    hang = Fault(kind=kind)  # type: ignore[arg-type]
    scripted.service.fail(operation, hang)
    writing = asyncio.create_task(write(scripted, LARGE[: 2 * PART], LARGE[2 * PART :], mode=mode))
    await hang.reached.wait()
    writing.cancel()
    await asyncio.sleep(0)
    hang.released.set()  # a begin that is in flight is heard out, so that it can be aborted
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert scripted.is_clean()
    # A completion that the service has done cannot be taken back; a temporary object can.
    done = operation == "complete_upload" and kind == "hang_after" and mode == "overwrite"
    assert list(scripted.bucket.objects) == (["a"] if done else [])
    assert asyncio.all_tasks() == before


async def test_a_second_cancellation_does_not_stop_the_abort(scripted: ScriptedService) -> None:
    part, abort = Fault(kind="hang"), Fault(kind="hang")
    scripted.service.fail("put_part", part)
    scripted.service.fail("abort_upload", abort)
    writing = asyncio.create_task(write(scripted, LARGE))
    await part.reached.wait()
    writing.cancel()
    await abort.reached.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert scripted.bucket.uploads
    abort.released.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert scripted.is_clean()


async def test_a_cancelled_write_ends_the_writer(scripted: ScriptedService) -> None:
    hang = Fault(kind="hang")
    scripted.service.fail("put_part", hang)
    with pytest.raises(StorageError, match="cancelled"):
        await self_healing(scripted, hang)
    assert not scripted.bucket.objects
    assert scripted.is_clean()


async def self_healing(scripted: ScriptedService, hang: Fault) -> None:
    """A body that goes on after a write that was cut short: what it wrote is not whole."""
    async with scripted.store.open_writer("a") as writer:
        writing = asyncio.create_task(writer.write(pattern(4 * PART + 5)))
        await hang.reached.wait()
        writing.cancel()
        await asyncio.wait([writing])


async def test_a_failed_write_that_the_body_swallows_publishes_nothing(
    scripted: ScriptedService,
) -> None:
    scripted.service.fail("put_part", refused_for_good())

    async def swallow() -> None:
        async with scripted.store.open_writer("a") as writer:
            for _ in range(3):
                try:
                    await writer.write(pattern(2 * PART))
                except StorageError:
                    continue

    with pytest.raises(StorageError, match="no"):
        await swallow()
    assert not scripted.bucket.objects
    assert scripted.is_clean()


async def test_memory_is_bounded_while_parts_are_under_way(scripted: ScriptedService) -> None:
    hangs = [Fault(kind="hang") for _ in range(4)]
    scripted.service.fail("put_part", *hangs)
    async with scripted.store.open_writer("a") as writer:
        await writer.write(pattern(PART))
        await writer.write(pattern(PART))
        # Two parts are held: one under way, one in the buffer. The next byte has to wait.
        writing = asyncio.create_task(writer.write(b"x"))
        await hangs[0].reached.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not writing.done()
        for hang in hangs:
            hang.released.set()
        await writing
    assert scripted.get("a") == pattern(PART) * 2 + b"x"


async def test_what_fits_one_part_is_one_request(scripted: ScriptedService) -> None:
    await write(scripted, pattern(PART))
    assert [name for name, _ in scripted.service.calls] == ["put"]


async def test_a_conditional_upload_grows_under_another_key(scripted: ScriptedService) -> None:
    await write(scripted, LARGE, mode="create")
    parts = [key for name, key in scripted.service.calls if name == "put_part"]
    assert all(key.startswith(TEMPORARY_PREFIX) for key in parts)
    assert list(scripted.bucket.objects) == ["a"]


async def test_a_temporary_object_is_deleted_by_the_generation_of_its_upload(
    scripted: ScriptedService,
) -> None:
    await write(scripted, LARGE, mode="create")
    names = [name for name, _ in scripted.service.calls]
    assert "head" not in names
    assert names.count("delete") == 1


@SIZES
async def test_stored_bytes_that_differ_are_removed(scripted: ScriptedService, data: bytes) -> None:
    corrupt(scripted)
    with pytest.raises(ChecksumError, match="write it again"):
        await scripted.store.put("a", data)
    assert not scripted.bucket.objects


def corrupt(scripted: ScriptedService) -> None:
    """Let the service store other bytes, and not notice."""
    store = scripted.bucket.store

    def store_other(key: str, data: bytes, **settings: object) -> object:
        return store(key, data[:-1] + b"?", **settings)

    scripted.bucket.store = store_other


@SIZES
async def test_bytes_that_arrive_wrong_are_sent_again(
    scripted: ScriptedService, data: bytes
) -> None:
    error = ChecksumError("other bytes arrived", uri="memory://x/a")
    wrong = Fault(kind="refuse", error=error)
    for operation in ("put", "put_part"):
        scripted.service.fail(operation, wrong, wrong)
    await scripted.store.put("a", data)
    assert scripted.get("a") == data


@SIZES
async def test_bytes_that_arrive_wrong_each_time_are_an_error(
    scripted: ScriptedService, data: bytes
) -> None:
    error = ChecksumError("other bytes arrived", uri="memory://x/a")
    wrong = Fault(kind="refuse", error=error)
    for operation in ("put", "put_part"):
        scripted.service.fail(operation, *[wrong] * 12)
    with pytest.raises(ChecksumError, match="other bytes"):
        await scripted.store.put("a", data)
    assert not scripted.bucket.objects
    assert scripted.is_clean()


async def test_attempts_run_out(scripted: ScriptedService) -> None:
    scripted.service.fail("put", *[REFUSE] * 4)
    with pytest.raises(TransientError, match="4 attempts"):
        await scripted.store.put("a", SMALL)
    assert scripted.is_clean()


async def test_aborting_a_writer_that_never_began_sends_nothing(scripted: ScriptedService) -> None:
    async with scripted.store.open_writer("a") as writer:
        await writer.write(b"1")
        await writer.abort()
        await writer.abort()
        await writer.aclose()
    assert scripted.service.calls == []


async def test_an_explicit_abort_that_fails_raises(scripted: ScriptedService) -> None:
    scripted.service.fail("abort_upload", *[REFUSE] * 4)
    async with scripted.store.open_writer("a") as writer:
        await writer.write(LARGE)
        with pytest.raises(TransientError) as raised:
            await writer.abort()
    assert any("could not be aborted" in note for note in raised.value.__notes__)


async def test_a_temporary_object_that_stays_does_not_fail_the_write(
    scripted: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.service.fail("delete", *[REFUSE] * 4)
    meta = await scripted.store.put("a", LARGE, mode="create")
    assert meta.key == "a"
    assert scripted.get("a") == LARGE
    assert "Store.clean" in caplog.text
    left = set(scripted.bucket.objects) - {"a"}
    assert all(key.startswith(TEMPORARY_PREFIX) for key in left)
    assert list((await scripted.store.list_all()).keys) == ["a"]
    assert set((await scripted.store.list_all(TEMPORARY_PREFIX)).keys) == left


WHOLE = pattern(5 * PART + 5)  # more than twice what a writer may hold


@pytest.mark.parametrize("before", [b"", b"some"], ids=["first", "behind a buffer"])
async def test_large_memory_is_sent_from_where_it_is(
    scripted: ScriptedService, before: bytes
) -> None:
    await write(scripted, before, WHOLE, WHOLE, b"end")
    assert scripted.get("a") == before + WHOLE + WHOLE + b"end"
    assert scripted.is_clean()


async def test_callers_memory_is_the_callers_again_after_a_failure(
    scripted: ScriptedService,
) -> None:
    scripted.service.fail(
        "put_part", None, Fault(kind="hang"), refused_for_good(), Fault(kind="hang")
    )
    before = asyncio.all_tasks()
    async with asyncio.timeout(100):
        with pytest.raises(StorageError, match="no"):
            await write(scripted, WHOLE)
    assert asyncio.all_tasks() == before  # nobody reads it any more
    assert scripted.is_clean()


async def test_callers_memory_is_the_callers_again_after_a_cancellation(
    scripted: ScriptedService,
) -> None:
    hang = Fault(kind="hang")
    scripted.service.fail("put_part", None, hang)
    before = asyncio.all_tasks()
    writing = asyncio.create_task(write(scripted, WHOLE))
    await hang.reached.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert asyncio.all_tasks() == before
    assert scripted.is_clean()


async def test_a_whole_object_is_sent_from_where_it_is_to_its_end(
    scripted: ScriptedService,
) -> None:
    hangs = [Fault(kind="hang") for _ in range(4)]
    scripted.service.fail("put_part", *hangs)
    seen: list[bool] = []
    inner = scripted.service.put_part

    async def put_part(request: PartRequest) -> UploadedPart:
        (view,) = request.pieces
        seen.append(view.obj is data)
        return await inner(request)

    scripted.service.put_part = put_part
    data = LARGE
    writing = asyncio.create_task(scripted.store.put("a", data))
    async with asyncio.timeout(100):
        # The last part, too, is under way beside the others.
        for hang in hangs:
            await hang.reached.wait()
        for hang in hangs:
            hang.released.set()
        await writing
    assert seen == [True] * 4
    assert scripted.get("a") == data
    assert scripted.is_clean()


@pytest.mark.parametrize("key", [TEMPORARY_PREFIX + "x", "run/" + TEMPORARY_PREFIX + "x"])
async def test_what_listings_leave_out_cannot_be_written(
    scripted: ScriptedService, key: str
) -> None:
    with pytest.raises(ValueError, match="use another key"):
        await scripted.store.put(key, b"1")


async def test_a_part_that_is_held_as_another_is_sent_again(scripted: ScriptedService) -> None:
    inner = scripted.service.put_part
    wrong = [3, 1, 0]

    async def put_part(request: PartRequest) -> UploadedPart:
        part, checksum = await inner(request), request.crc32c
        return replace(part, crc32c=(checksum or 0) ^ wrong.pop() if wrong else checksum)

    scripted.service.put_part = put_part
    await scripted.store.put("a", LARGE[: 2 * PART])
    assert scripted.get("a") == LARGE[: 2 * PART]
    wrong[:] = [1] * 12
    with pytest.raises(ChecksumError, match="stored bytes differ"):
        await scripted.store.put("a", LARGE[: 2 * PART])
    assert scripted.is_clean()


@pytest.mark.parametrize("are_reported", [True, False], ids=["reported", "not reported"])
@SIZES
async def test_a_write_without_verification_survives_lost_answers(
    scripted: ScriptedService, data: bytes, *, are_reported: bool
) -> None:
    """No checksum is sent, but the object is still compared with the one of a lost completion."""
    store = scripted.new_store(verify=False)
    inner = scripted.service.put_part
    sent: list[int | None] = []

    async def put_part(request: PartRequest) -> UploadedPart:
        sent.append(request.crc32c)
        part, content = await inner(request), b"".join(request.pieces)
        return replace(part, crc32c=crc32c(content) if are_reported else None)

    scripted.service.put_part = put_part
    for operation in ("put", "put_part", "complete_upload"):
        scripted.service.fail(operation, LOSE)
    meta = await store.put("a", data)
    assert scripted.get("a") == data
    assert meta.generation == scripted.bucket.objects["a"].meta.generation
    assert not any(sent)
    assert scripted.is_clean()


async def test_every_part_travels_with_its_crc32c(scripted: ScriptedService) -> None:
    sent: list[int | None] = []
    inner = scripted.service.put_part

    async def put_part(request: PartRequest) -> UploadedPart:
        sent.append(request.crc32c)
        return await inner(request)

    scripted.service.put_part = put_part
    await scripted.store.put("a", LARGE)
    parts = [LARGE[at : at + PART] for at in range(0, len(LARGE), PART)]
    assert sorted(map(str, sent)) == sorted(str(crc32c(part)) for part in parts)


async def test_a_damaged_object_that_cannot_be_removed_is_reported(
    scripted: ScriptedService,
) -> None:
    corrupt(scripted)
    scripted.service.fail("delete", *[REFUSE] * 4)
    with pytest.raises(ChecksumError) as raised:
        await scripted.store.put("a", SMALL)
    assert any("may still exist" in note for note in raised.value.__notes__)


async def test_a_closed_writer_takes_nothing(scripted: ScriptedService) -> None:
    writer = await write(scripted, SMALL)
    assert writer.tell() == len(SMALL)
    with pytest.raises(ValueError, match="closed"):
        await writer.write(b"1")


class Forgetful(FlakyService):
    """Counts the bytes of parts and forgets them."""

    def __init__(self, inner: Service) -> None:
        super().__init__(inner)
        self.now = self.peak = self.num_parts = 0
        self.sizes: list[int] = []

    async def put_part(self, request: PartRequest) -> UploadedPart:
        size = sum(memoryview(piece).nbytes for piece in request.pieces)
        self.sizes.append(size)
        self.now += size
        self.peak = max(self.peak, self.now)
        await asyncio.sleep(0)
        self.now -= size
        return UploadedPart(request.number, "", size)

    async def complete_upload(
        self, request: WriteRequest, upload_id: str, parts: Sequence[UploadedPart]
    ) -> ObjectMeta:
        assert [part.number for part in parts] == list(range(1, len(parts) + 1))
        size = sum(part.size for part in parts)
        return ObjectMeta(key=request.key, uri=self.uri(request.key), size=size)


async def test_parts_grow_and_the_memory_bound_holds_or_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """901 parts of 5 MiB, then of 10: twice what the writer may hold."""
    service = Forgetful(service_of("memory://forgetful"))
    scripted = ScriptedService("forgetful", service=service)
    store = scripted.new_store(max_buffered_bytes=PART, verify=False)
    data = bytes(PART)
    async with store.open_writer("a") as writer:
        for _ in range(900):
            await writer.write(data)
        assert service.peak == PART
        assert not caplog.text
        for _ in range(4):
            await writer.write(data)
    assert service.peak == 2 * PART
    assert service.sizes == [PART] * 900 + [2 * PART] * 2
    assert caplog.text.count("more than max_buffered_bytes") == 1
    assert writer.meta.size == 904 * PART

"""One record for each save, which no other writer and no kill loses."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import open_store
from aioflux.checkpoint._store import history
from aioflux.checkpoint._store.history import (
    COLUMNS,
    HISTORY_PREFIX,
    HistoryWriter,
    SaveRecord,
    append,
    compact,
    merge,
    plot,
    read_history,
    to_csv,
    to_json,
)
from aioflux.checkpoint._store.steps import list_steps
from aioflux.errors import CheckpointCorruptError, TransientError
from aioflux.options import RetryPolicy, Timeouts, TransferOptions
from aioflux.testing.faults import Fault, FlakyStore
from tests.checkpoint.saves import save_id
from tests.patience import PATIENT

pytestmark = pytest.mark.clouds("gs", "s3", "az")

START = datetime(2026, 1, 31, 12, tzinfo=UTC)


def record(number: int, **changes) -> SaveRecord:
    values = {
        "record_id": save_id(number),
        "time": START + timedelta(seconds=number),
        "step": number * 100,
        "outcome": "committed",
        "num_bytes": 1000,
        "staged_seconds": 0.25,
        "upload_seconds": 2.0,
        "num_retries": 1,
        "world_size": 4,
    }
    return SaveRecord(**values | changes)


@pytest.fixture
async def store(root):
    async with open_store(f"{root}/run") as store:
        yield store


async def test_what_is_appended_is_read_back_oldest_first(store) -> None:
    assert await read_history(store) == []
    records = [record(number) for number in range(5)]
    for each in (records[2], records[0], records[4], records[3], records[1]):
        await append(store, each)
    assert await read_history(store) == records
    assert await list_steps(store) == []


async def test_a_record_of_the_same_id_is_left_as_it_is(store) -> None:
    await store.put(
        f"{HISTORY_PREFIX}record-{save_id(1)}.json",
        json.dumps(json.loads(to_json([record(1)]))[0]).encode(),
    )
    await append(store, record(1, outcome="failed"))
    assert await read_history(store) == [record(1)]


async def test_json_and_csv_lie_beside_the_steps(store) -> None:
    await append(store, record(1))
    await append(store, record(2, outcome="failed", error='it said: "no"\nand ended'))
    await compact(store)
    rows = json.loads(await store.get(f"{HISTORY_PREFIX}history.json"))
    assert [list(row) for row in rows] == [list(COLUMNS)] * 2
    assert rows[0]["time"] == "2026-01-31T12:00:01Z"
    assert rows[0]["bytes_per_second"] == 500.0
    text = (await store.get(f"{HISTORY_PREFIX}history.csv")).decode()
    first, second = csv.DictReader(io.StringIO(text, newline=""))
    assert (first["step"], first["outcome"], first["time"]) == (
        "100",
        "committed",
        "2026-01-31T12:00:01.000Z",
    )
    assert second["error"] == 'it said: "no"\nand ended'
    left = [meta.key.removeprefix(HISTORY_PREFIX) for meta in await store.list_all(HISTORY_PREFIX)]
    assert left == ["history.csv", "history.json"]


async def new_records(store) -> int:
    return len(await store.list_all(f"{HISTORY_PREFIX}record-"))


@pytest.mark.clouds("gs")
async def test_a_record_costs_one_request_and_the_first_one_a_listing(server) -> None:
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        writer = HistoryWriter(store)
        for num_requests in (2, 1, 1):
            before = store.stats.num_requests
            writer.add(record(before))
            await writer.write()
            assert store.stats.num_requests - before == num_requests


@pytest.mark.clouds("gs")
async def test_more_than_64_new_records_are_compacted_by_the_next_save(server) -> None:
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        writer = HistoryWriter(store)
        for number in range(65):
            assert await new_records(store) == number
            writer.add(record(number))
            await writer.write()
        assert await new_records(store) == 0
        assert len(await read_history(store)) == 65


@pytest.mark.clouds("gs")
async def test_writers_that_are_killed_after_one_save_leave_at_most_128_records(server) -> None:
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        for number in range(200):
            writer = HistoryWriter(store)
            writer.add(record(number))
            await writer.write()
            assert await new_records(store) <= 128
        assert await read_history(store) == [record(number) for number in range(200)]


@pytest.mark.clouds("gs")
async def test_a_compaction_that_fails_is_tried_again_after_64_more_records(server, caplog) -> None:
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        server.put("bucket", "run/.checkpoint-history/history.json", b"damaged")
        writer = HistoryWriter(store)
        for number in range(80):
            writer.add(record(number))
            await writer.write()
        assert await new_records(store) == 80
    assert caplog.text.count("could not compact the history of gs://") == 1
    assert "could not be added" not in caplog.text


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("operation", ["objects.insert", "objects.list"])
async def test_a_record_or_listing_that_fails_is_logged(server, caplog, operation) -> None:
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        with server.faults.inject(operation, status=403):
            writer = HistoryWriter(store)
            writer.add(record(1))
            await writer.write()
    is_added = operation == "objects.list"
    assert ("could not compact" in caplog.text) == is_added
    assert ("step 100 could not be added to the history" in caplog.text) != is_added


@pytest.mark.clouds("gs")
async def test_records_wait_for_a_service_that_is_away(server, caplog, monkeypatch) -> None:
    monkeypatch.setattr(history, "_WRITE_SECONDS", 0.5)
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        writer = HistoryWriter(store)
        with server.faults.inject("objects.insert", status=503):
            for number in range(20):
                writer.add(record(number))
            await writer.close()  # not 20 times as long as one record
            assert await new_records(store) == 0
        assert "lacks 20 records, which could not be stored within" in caplog.text
        await writer.close()
        assert await read_history(store) == [record(number) for number in range(20)]


async def test_after_a_temporary_failure_the_records_stay_queued(root, caplog) -> None:
    faults = iter([Fault(kind="refuse")])

    def draw(operation: str) -> Fault | None:
        return next(faults, None) if operation == "put" else None

    once = RetryPolicy(max_attempts=1)
    async with FlakyStore(f"{root}/run", draw=draw, retry=once) as store:
        writer = HistoryWriter(store)
        writer.add(record(1))
        writer.add(record(2))
        await writer.write()
        assert await new_records(store) == 0
        await writer.write()
        assert await read_history(store) == [record(1), record(2)]
    assert caplog.text.count("could not be added") == 1


@pytest.mark.clouds("gs")
async def test_an_error_of_the_callers_credentials_is_logged(server, caplog) -> None:
    def token() -> str:
        raise RuntimeError("no token today")

    async with open_store(f"{server.root}/run", credentials=token) as store:
        writer = HistoryWriter(store)
        writer.add(record(1))
        await writer.close()
    assert "no token today" in caplog.text


@pytest.mark.clouds("gs")
async def test_a_writer_that_is_closed_compacts(server) -> None:
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        writer = HistoryWriter(store)
        writer.add(record(1))
        await writer.close()
        assert await new_records(store) == 0
        before = store.stats.num_requests
        await writer.close()
        assert store.stats.num_requests == before
        assert await read_history(store) == [record(1)]


@pytest.mark.clouds("gs")
async def test_reading_the_history_compacts_it(server) -> None:
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        await append(store, record(1))
        assert await read_history(store) == [record(1)]
        assert await new_records(store) == 0


@pytest.mark.clouds("gs")
async def test_the_history_can_be_read_without_the_permission_to_write(server) -> None:
    async with open_store(f"{server.root}/run", timeouts=PATIENT) as store:
        await append(store, record(1))
        server.faults.add("*insert*", status=403)
        assert await read_history(store) == [record(1)]
        assert await new_records(store) == 1


@pytest.mark.clouds("gs", "s3")
async def test_writers_at_the_same_time_lose_nothing(server) -> None:
    records = [record(number) for number in range(12)]
    async with open_store(f"{server.root}/run") as store:
        await asyncio.gather(*(append(store, each) for each in records))
        assert await read_history(store) == records
        await append(store, record(12))
        await compact(store)
        text = (await store.get(f"{HISTORY_PREFIX}history.csv")).decode()
        assert text == to_csv(await read_history(store))
        assert text.count("\n") == 14


async def test_who_gathers_second_leaves_it_to_the_other(server) -> None:
    """The other was through between the read and the write of the first."""
    async with open_store(f"{server.root}/run") as store, open_store(f"{server.root}/run") as other:
        await append(store, record(1))

        async def put(key, data, **options):
            if key.endswith(".json") and "record-" not in key:
                del store.put
                await append(other, record(3))
                await compact(other)
            return await type(store).put(store, key, data, **options)

        await append(store, record(2))
        store.put = put
        await compact(store)
        assert await read_history(store) == [record(1), record(2), record(3)]


async def test_a_writer_killed_at_any_request_loses_nothing_that_was_durable() -> None:
    for at in range(50):
        budget = [10**9]

        def draw(operation, budget=budget):
            budget[0] -= 1
            return Fault(kind="refuse") if budget[0] < 0 else None

        async with FlakyStore(
            f"memory://history/{at}",
            draw=draw,
            transfer=TransferOptions(),
            retry=RetryPolicy(max_attempts=1),
            timeouts=Timeouts(),
        ) as store:
            before = [record(1), record(2)]
            for each in before:
                await append(store, each)
            budget[0] = at
            is_done = is_compact = False
            try:
                await append(store, record(3))
                is_done = True
                await compact(store)
                is_compact = True
            except TransientError:
                pass
            budget[0] = 10**9
            found = await read_history(store)
            assert found in (before, [*before, record(3)])
            assert not is_done or len(found) == 3
            await append(store, record(4))
            assert await read_history(store) == [*found, record(4)]
            if is_compact:
                assert at > 5
                return
    pytest.fail("a record was never appended")


async def test_an_error_that_is_no_text_is_kept(store) -> None:
    await append(store, record(1, outcome="failed", error="no space for \udcff"))
    assert [each.error for each in await read_history(store)] == ["no space for \\udcff"]


async def test_a_damaged_history_is_a_typed_error_that_names_it(store) -> None:
    await append(store, record(1))
    await store.put(f"{HISTORY_PREFIX}history.json", b"[{")
    with pytest.raises(CheckpointCorruptError, match=r"history\.json is not a valid part"):
        await read_history(store)


async def test_gathering_nothing_writes_nothing(store) -> None:
    await compact(store)
    assert not await store.list_all()


async def test_an_outcome_of_a_later_version_can_be_read(store) -> None:
    await append(store, record(1, outcome="paused"))
    assert await read_history(store) == [record(1, outcome="paused")]
    assert await read_history(store) == [record(1, outcome="paused")]  # compacted


async def test_a_history_of_a_later_version_can_be_read(store) -> None:
    row = json.loads(to_json([record(1)]))[0] | {"colour": "green"}
    await store.put(f"{HISTORY_PREFIX}history.json", json.dumps([row]).encode())
    assert await read_history(store) == [record(1)]


@given(st.lists(st.lists(st.integers(0, 9))))
def test_merged_histories_hold_each_record_once_by_time(numbers) -> None:
    merged = merge(*([record(number) for number in part] for part in numbers))
    assert merged == [record(number) for number in sorted({n for part in numbers for n in part})]


def test_no_upload_has_no_throughput() -> None:
    assert record(1, upload_seconds=0.0).bytes_per_second == 0.0


def test_a_picture_of_all_outcomes_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    records = [record(1), record(2, outcome="failed"), record(3, outcome="cancelled")]
    target = io.BytesIO()
    plot(records, target, title="gs://bucket/run")
    assert target.getvalue().startswith(b"\x89PNG")
    plot(records, tmp_path / "history.svg")
    assert b"<svg" in (tmp_path / "history.svg").read_bytes()


def test_a_picture_of_nothing_or_without_matplotlib_says_why(monkeypatch) -> None:
    import sys

    with pytest.raises(ValueError, match="no records"):
        plot([], io.BytesIO())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'aioflux-storage\[plot\]'"):
        plot([record(1)], io.BytesIO())

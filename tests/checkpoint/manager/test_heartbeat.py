"""Heartbeats: when a rank is gone, and what a rank writes meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import PermissionDeniedError, TransferOptions, TransientError, open_store
from aioflux.checkpoint._save.job import UploadSettings
from aioflux.checkpoint._save.loop_uploader import SaveQueue
from aioflux.checkpoint._save.manifests import Heartbeat, HeartbeatMonitor, heartbeat_key
from aioflux.checkpoint._store.orphans import save_of
from aioflux.testing import GCSServer
from tests.checkpoint.manager.worker_process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

SAVE_ID = "20231114T221500.000Z-00000064"
EVERY = 10.0


def looks(*, until: float, every: float = 1.0) -> list[float]:
    return [every * number for number in range(1, int(until / every) + 1)]


def gone_at(sign_at: Callable[[float], Any], times: list[float]) -> float | None:
    """Return when rank 1 is found to be gone, or None."""
    watch = HeartbeatMonitor(EVERY)
    for now in times:
        if watch.observe({1: sign_at(now)}, {1}, 1000 + now):
            return now
    return None


@pytest.mark.parametrize("died", [0.0, 0.5, 10.0, 14.0, 19.9])
def test_a_rank_that_dies_is_gone_within_30_seconds(died: float) -> None:
    """Whether it had written a heartbeat by then or not."""
    found = gone_at(lambda now: min(now, died) // EVERY or None, looks(until=100))
    assert found is not None
    assert found - died < 30


@given(st.lists(st.floats(0.1, 24.0), min_size=2, max_size=20), st.floats(0.05, 9.0))
def test_a_rank_whose_heartbeats_come_is_not_gone(gaps: list[float], every: float) -> None:
    """Two may be missed, however often the observer looks."""
    beats = list(itertools.accumulate(gaps))
    times = looks(until=beats[-1], every=every)
    assert gone_at(lambda now: sum(beat <= now for beat in beats), times) is None


def test_time_without_looks_does_not_count() -> None:
    """The observer stood still, or the service was away, and the rank perhaps with it."""
    times = [1.0, 2.0, 500.0, 1000.0]
    assert gone_at(lambda _: None, times) is None


def test_a_rank_that_is_not_awaited_is_not_gone() -> None:
    watch = HeartbeatMonitor(EVERY)
    for now in looks(until=100):
        assert not watch.observe({}, (), now)


class Bucket:
    """What a heartbeat needs of a store; `put` fails as it is told."""

    uri = "memory://bucket/"

    def __init__(self, *failures: Exception | None) -> None:
        self.failures = list(failures)
        self.written: list[str] = []
        self.deleted: list[str] = []
        self.written_enough = asyncio.Event()

    async def put(self, key: str, data: bytes) -> None:
        failure = self.failures.pop(0) if self.failures else None
        if not self.failures:
            self.written_enough.set()
        if failure is not None:
            raise failure
        self.written.append(key)

    async def delete_many(self, keys: list[str]) -> Any:
        self.deleted += keys
        return type("Result", (), {"errors": {}})


async def beat(bucket: Any, **options: Any) -> None:
    heartbeat = Heartbeat(bucket, "step/", SAVE_ID, 1, every_seconds=0.01, **options)
    await bucket.written_enough.wait()
    await heartbeat.stop()


async def test_a_heartbeat_that_fails_is_repeated() -> None:
    bucket = Bucket(None, TransientError("503"), TransientError("503"), None)
    await beat(bucket)
    key = "step/" + heartbeat_key(SAVE_ID, 1)
    assert set(bucket.written) == {key}
    assert len(bucket.written) >= 2
    assert bucket.deleted == [key]


async def test_where_nothing_can_be_overwritten_each_heartbeat_has_its_key() -> None:
    denied = PermissionDeniedError("no overwriting")
    bucket = Bucket(None, denied, None, denied, None)
    await beat(bucket)
    keys = ["step/" + heartbeat_key(SAVE_ID, 1, number) for number in (0, 1, 2)]
    assert list(dict.fromkeys(bucket.written)) == keys
    assert bucket.deleted == keys


async def test_a_heartbeat_does_not_wait_for_uploads() -> None:
    """Those of the rank's own shard take all requests that its store may have under way."""
    with GCSServer(buckets=("bucket",)) as server:
        server.faults.add("*insert*", key="part", delay_seconds=250)
        options = TransferOptions(max_in_flight=1)
        async with open_store("gs://bucket", endpoint_url=server.url, transfer=options) as store:
            upload = asyncio.ensure_future(store.put("part", b"data"))
            await asyncio.to_thread(wait_until, lambda: server.faults.injected["delay"] > 0)
            queue = SaveQueue(store, UploadSettings(heartbeat_seconds=0.05))
            queue.start_heartbeat(SAVE_ID, "step/", 1)
            key = "step/" + heartbeat_key(SAVE_ID, 1)
            await asyncio.to_thread(wait_until, lambda: key in server.keys("bucket"))
            queue.stop_heartbeats()
            await queue.heartbeat_store.aclose()
            assert not upload.done()
            upload.cancel()


async def test_a_short_save_writes_none() -> None:
    async with open_store("memory://heartbeat") as store:
        heartbeat = Heartbeat(store, "step/", SAVE_ID, 1, every_seconds=1000)
        await heartbeat.stop()
        assert store.stats.num_requests == 0


def test_clean_knows_whose_heartbeat_it_is() -> None:
    for number in (0, 3):
        key = f"run/step-00000004/{heartbeat_key(SAVE_ID, 1, number)}"
        assert save_of(key) == ("run/step-00000004/", SAVE_ID)

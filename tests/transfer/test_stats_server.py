"""Statistics of a store whose requests fail on the embedded server."""

from __future__ import annotations

from typing import Any

import pytest

import aioflux
from aioflux.testing import GCSServer


@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        ("HTTP 503", {"status": 503}),
        ("lost connection", {"truncate_at": 100}),
        ("stalled", {"stall_at": 100}),
    ],
)
@pytest.mark.parametrize("is_batch", [False, True], ids=["get", "get_many"])
async def test_failures_are_counted_by_cause(
    cause: str, fault: dict[str, Any], is_batch: bool
) -> None:
    timeouts = aioflux.Timeouts(progress_seconds=0.5)
    with GCSServer(buckets=["bucket"]) as server:
        async with aioflux.open_store(
            "gs://bucket", endpoint_url=server.url, timeouts=timeouts
        ) as store:
            await store.put("a", bytes(1000))
            server.faults.add("*objects.get", times=1, **fault)
            if is_batch:
                assert [len(data) async for _, data in store.get_many(["a"])] == [1000]
            else:
                assert len(await store.get("a")) == 1000
            stats = store.stats
    assert stats.failures == {cause: 1}
    assert f"(failures: 1 x {cause})" in str(stats)
    assert 0 < stats.seconds < 60

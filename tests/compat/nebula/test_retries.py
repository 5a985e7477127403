"""Saves that failed are retried as long as a trainer is connected or may come back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aioflux.compat.nebula._memory_tier import MemoryTier, Version
from aioflux.compat.nebula._node_daemon import NodeDaemon
from aioflux.compat.nebula._storage_tier import StorageTier
from aioflux.errors import TransientError
from tests.compat.nebula.test_node_daemon import FakeStore, put

if TYPE_CHECKING:
    from collections.abc import Callable


async def save_until(daemon: NodeDaemon, tier: StorageTier, is_done: Callable[[], object]) -> None:
    saver = asyncio.create_task(daemon.run_saver(tier))
    async with asyncio.timeout(60):
        while not is_done():  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0)
    saver.cancel()
    await asyncio.wait([saver])


def storage() -> StorageTier:
    return StorageTier("storage", FakeStore("s"), 1000.0)  # type: ignore[arg-type]


async def test_a_failed_save_is_retried() -> None:
    num_failures, attempts = 3, []

    async def save(*_: Any, **__: Any) -> None:
        attempts.append(1)
        if len(attempts) <= num_failures:
            raise TransientError("the storage is not available")

    daemon = NodeDaemon(save=save, retry_seconds=0.01)
    version = put(daemon, "a")
    await save_until(daemon, storage(), lambda: version.saved_in)
    assert len(attempts) == num_failures + 1


@pytest.mark.parametrize(
    ("alone_seconds", "num_nodes", "is_stopping", "is_retried"),
    [
        (0, 1, False, True),
        (900, 1, False, True),
        (1100, 1, False, False),  # no trainer came back
        (0, 1, True, False),
        (0, 2, False, False),  # the other node would have to retry, too
    ],
)
def test_how_long_a_save_is_retried(
    alone_seconds: float, num_nodes: int, is_stopping: bool, is_retried: bool
) -> None:
    memory, tier = MemoryTier(1000), storage()
    version = Version("a", 1, "id", num_nodes=num_nodes)
    memory.versions.append(version)

    def retried(now: float) -> Version | None:
        return tier.version_to_retry(
            memory,
            now,
            alone_seconds=alone_seconds,
            linger_seconds=1000.0,
            is_stopping=is_stopping,
        )

    assert retried(7.0) is None  # it was not saved yet
    memory.set_saved(version, "storage", "why")
    assert retried(7.0) is None  # the pause is not over
    tier.retry_at = 7.0
    assert retried(7.0) is (version if is_retried else None)


async def test_the_newest_is_retried_after_an_older_one_was_saved() -> None:
    attempts: list[str] = []

    async def save(tier: StorageTier, store: object, version: Version, *_: Any, **__: Any) -> None:
        attempts.append(version.tag)
        if attempts == ["new"]:
            old.is_due = True  # as a flush of it does
            raise TransientError("the storage is not available")

    daemon = NodeDaemon(save=save, retry_seconds=0.0)
    old, new = put(daemon, "old"), put(daemon, "new")
    await save_until(daemon, storage(), lambda: new.saved_in)
    assert attempts == ["new", "old", "new"]

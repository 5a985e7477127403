"""A storm: mixed operations of many concurrent tasks on one store, with random server faults.

Each task has its own keys, with known contents. Some operations race for one key with
preconditions. With retries, every call must have its expected outcome. Without retries, a call may
raise an error of aioflux, and its write may have happened or not; any other outcome is a defect.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aioflux
from tests.faults.model import ABSENT, Model
from tests.faults.storm_task import Task
from tests.servers.statuses import AMBIGUOUS, THROTTLED

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

MIB = 1024 * 1024
TRANSFER = aioflux.TransferOptions(
    max_in_flight=32,
    range_size_bytes=4 * MIB,
    part_size_bytes=5 * MIB,
    max_buffered_bytes=15 * MIB,
    # The server flips bytes before they are encrypted, so that TLS does not notice.
    verify_ranges=True,
)
KINDS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    # operation, weight, fault
    *(("*", 1.0, {"status": status}) for status in AMBIGUOUS if status not in THROTTLED),
    ("*", 2.0, {"status": 429, "retry_after": 0}),
    ("*", 2.0, {"status": 503, "retry_after": 0}),
    ("*", 1.0, {"status": 503, "body": b"<html>no error of the API</html>"}),
    ("*", 2.0, {"reset": True}),
    ("*", 2.0, {"lost": True}),
    ("*", 2.0, {"lost": True, "reset": True}),
    ("*", 1.0, {"delay_seconds": 0.05}),
    ("*", 0.3, {"delay_seconds": 3.0}),
    ("*", 2.0, {"truncate_at": 0}),
    ("*", 2.0, {"truncate_at": 7, "reset": True}),
    ("objects.media", 8.0, {"truncate_at": 500}),
    ("objects.media", 8.0, {"truncate_at": 100_000, "reset": True}),
    ("objects.media", 3.0, {"flip_at": "random"}),
    ("*", 1.0, {"stall_at": 0}),
    ("objects.media", 4.0, {"stall_at": 50_000}),
)
"""Every kind of the server. Bytes are flipped in objects only: the service sends no checksum
of metadata or listings, which TLS protects."""


@dataclass(frozen=True, kw_only=True)
class Storm:
    """Size and severity of a storm."""

    num_operations: int
    seed: int
    num_loops: int = 1
    has_retries: bool = True
    share: float = 0.05
    """Share of requests with a fault, about."""
    num_tasks: int = 16
    keys_per_task: int = 6


@dataclass
class Outcome:
    """Counters of a storm."""

    operations: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Unexpected errors of calls, by type."""
    faults: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        errors = ", ".join(f"{kind} {count}" for kind, count in sorted(self.errors.items()))
        return (
            f"{self.operations.total()} operations, {self.num_requests} requests, "
            f"{self.faults.total()} faults ({faults}), errors: {errors or 'none'}, "
            f"{self.seconds:.1f} s"
        )


def add_faults(server: GCSServer, storm: Storm) -> None:
    """Add faults of every kind to the server, for a share of its requests."""
    rng = random.Random(storm.seed)
    # Many responses have no body, or end before the position of the fault.
    total = sum(weight for _, weight, _ in KINDS) * 0.6
    for operation, weight, options in KINDS:
        server.faults.add(
            operation,
            probability=storm.share * weight / total,
            seed=rng.randrange(1 << 30),
            **options,
        )


async def run_storm(server: GCSServer, storm: Storm, **options: Any) -> Outcome:
    """Run a storm on an empty bucket, and compare the bucket with the model.

    Args:
        server: The server; its faults are removed afterwards.
        storm: Size and severity.
        **options: Further options of `aioflux.open_store`.

    Raises:
        AssertionError: An outcome or an object is wrong.
    """
    server.stats.reset()
    server.faults.clear()
    add_faults(server, storm)
    outcome = Outcome()
    started = time.monotonic()
    store = aioflux.open_store(
        "gs://bucket",
        endpoint_url=server.url,
        transfer=replace(TRANSFER, num_loops=storm.num_loops),
        retry=aioflux.RetryPolicy(
            # The faults need a few attempts, and stalls of a busy machine some more.
            max_attempts=30 if storm.has_retries else 1,
            initial_seconds=0.02,
            max_seconds=0.5,
        ),
        timeouts=aioflux.Timeouts(progress_seconds=1.0, idle_seconds=2.0),
        **options,
    )
    async with store:
        budget = iter(range(storm.num_operations))
        tasks = [Task(store, storm, outcome, number) for number in range(storm.num_tasks)]
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task.run(budget))
        outcome.seconds = time.monotonic() - started
        outcome.num_requests = server.stats.total.requests
        outcome.faults.update(server.faults.injected)
        server.faults.clear()
        _check_end(server, storm, [task.model for task in tasks])
        # An upload whose first answer was lost has no parts, and is left to `clean`.
        cleaned = await store.clean(older_than_seconds=0)
    if storm.has_retries:
        # Without retries, cleanup may fail, too.
        assert len(cleaned.aborted) <= outcome.faults["lost"]
        assert not cleaned.removed
    return outcome


def _check_end(server: GCSServer, storm: Storm, models: list[Model]) -> None:
    """Compare the objects in the bucket, read by the back door, with the models."""
    known = {key for model in models for key in model.contents}
    stored = set(server.keys("bucket"))
    for model in models:
        for key in model.contents:
            model.check(key, server.get("bucket", key) if key in stored else ABSENT)
    if storm.has_retries:
        # Without retries, cleanup may fail, too.
        assert stored <= known, f"left over: {sorted(stored - known)}"

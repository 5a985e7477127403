"""Random faults of every kind over mixed operations: nothing lost or mixed, and no leftovers.

Environment:
    AIOFLUX_STORM_OPERATIONS: Operations of each storm; a few hundred by default.
    AIOFLUX_STORM_SEED: Seed of the storms; 1 by default, 0 for one that is chosen anew.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServer
from tests.faults.storm import KINDS, Storm, run_storm
from tests.loops import assert_spread

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_OPERATIONS = int(os.environ.get("AIOFLUX_STORM_OPERATIONS", "500"))
SEED = int(os.environ.get("AIOFLUX_STORM_SEED", "1")) or random.SystemRandom().randrange(1, 1 << 30)

pytestmark = [pytest.mark.timeout(120 + NUM_OPERATIONS // 5), pytest.mark.more]


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",), md5=False) as server:
        yield server


def test_the_storm_knows_every_kind_of_fault() -> None:
    from aioflux.testing.gcs_server import Fault

    kinds = {Fault(operation=name, **options).kind for name, _, options in KINDS}
    assert kinds == {"status", "reset", "truncate", "flip", "stall", "lost", "delay"}


async def test_every_object_equals_the_models(
    server: GCSServer, num_loops: int, body_threads: list[str]
) -> None:
    storm = Storm(num_operations=NUM_OPERATIONS, seed=SEED, num_loops=num_loops)
    print(storm)  # noqa: T201  shown if it fails
    outcome = await run_storm(server, storm)
    print(outcome)  # noqa: T201
    assert outcome.faults.total() >= 0.03 * outcome.num_requests
    assert not outcome.errors
    assert_spread(body_threads, num_loops)


async def test_without_retries_only_errors_of_ours_are_raised(
    server: GCSServer, num_loops: int, body_threads: list[str]
) -> None:
    storm = Storm(num_operations=NUM_OPERATIONS, seed=SEED, num_loops=num_loops, has_retries=False)
    print(storm)  # noqa: T201  shown if it fails
    outcome = await run_storm(server, storm)
    print(outcome)  # noqa: T201
    assert outcome.errors
    assert_spread(body_threads, num_loops)

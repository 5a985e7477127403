"""One rank of a job lists, and the others receive its listing."""

from __future__ import annotations

import math
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import sync
from aioflux.data import IterableDataset, MapDataset
from aioflux.data._job_listing import fits_store, poll_seconds
from tests.data.listing_rank import open_rank
from tests.patience import wait_until
from tests.rendezvous import rendezvous_port
from tests.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.data.conftest import Bucket

KINDS = ["MapDataset", "IterableDataset"]
NUM_RANKS = 3
KEYS_OF_A_ROUND = {"arrived", "num_closed"}
"""Keys that stay in the store, which are small."""


# --- decisions --------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "world_size", "expected"),
    [
        pytest.param(22_000_000, 8, "store", id="a-million-objects-8-ranks"),
        pytest.param(22_000_000, 256, "store", id="a-million-objects-256-ranks"),
        pytest.param(22_000_000, 1024, "object", id="a-million-objects-1024-ranks"),
        pytest.param(22_000_000, 8000, "object", id="a-million-objects-8000-ranks"),
        pytest.param(200_000, 8000, "store", id="ten-thousand-objects-8000-ranks"),
    ],
)
def test_a_listing_that_the_store_sends_in_ten_seconds_needs_no_object(
    num_bytes: int, world_size: int, expected: str
) -> None:
    assert ("store" if fits_store(num_bytes, world_size) else "object") == expected


@pytest.mark.parametrize("world_size", [2, 512, 8000])
def test_waiting_ranks_send_few_checks(world_size: int) -> None:
    """Pauses grow from milliseconds to a bound that keeps 5,000 checks per second."""
    pauses = [poll_seconds(number, world_size) for number in range(40)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.01
    assert world_size / pauses[-1] <= max(5000, world_size / 0.1) + 1e-6
    assert math.isclose(pauses[-1], max(0.1, world_size / 5000))


# --- ranks ------------------------------------


class Job:
    """Ranks in processes of their own."""

    def __init__(self, ranks: list[WorkerProcess]) -> None:
        self.ranks = ranks

    def all(self, name: str, /, **arguments: Any) -> list[Any]:
        """Run a command on all ranks at the same time, and return the results."""
        return self.each(name, [arguments] * len(self.ranks))

    def each(self, name: str, arguments: list[dict[str, Any]]) -> list[Any]:
        for rank, given in zip(self.ranks, arguments, strict=True):
            rank.send(name, **given)
        return [rank.receive()[1] for rank in self.ranks]


@contextmanager
def started(num_ranks: int, **settings: Any) -> Iterator[Job]:
    ranks: list[WorkerProcess] = []
    try:
        with rendezvous_port() as port:
            for rank in range(num_ranks):
                given = {"rank": rank, "world_size": num_ranks, "port": port, **settings}
                ranks.append(WorkerProcess(open_rank, {}, **given))
            for each in ranks:
                assert each.receive() == (True, "ready")
            yield Job(ranks)
    finally:
        for each in ranks:
            each.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """One job for all tests in which the ranks build the same datasets."""
    with started(NUM_RANKS) as job:
        yield job


def dataset(bucket: Bucket, kind: str, uri: str = "", **options: Any) -> dict[str, Any]:
    """Return the arguments of a command that builds a dataset."""
    return {
        "kind": kind,
        "uri": uri or bucket.uri,
        "endpoint_url": bucket.server.url,
        **options,
    }


def listings(bucket: Bucket) -> int:
    requests: int = bucket.server.stats.operation("objects.list").requests
    bucket.server.stats.reset()
    return requests


def test_one_rank_lists_for_all(bucket: Bucket, job: Job) -> None:
    """Also the second dataset of the same uri is listed once, and has the newest objects."""
    keys = bucket.fill(5)
    for kind in KINDS:
        listings(bucket)
        assert job.all("keys", **dataset(bucket, kind)) == [keys] * NUM_RANKS
        assert listings(bucket) == 1
        bucket.put(kind, b"new")
        keys = sorted([*keys, kind])
        assert job.all("keys", **dataset(bucket, kind)) == [keys] * NUM_RANKS
        assert listings(bucket) == 1
    each = job.all("keys", **dataset(bucket, "IterableDataset", share_listing=False))
    assert each == [keys] * NUM_RANKS
    assert listings(bucket) == NUM_RANKS


def test_the_rank_that_lists_for_all_has_no_limit_of_its_rate(bucket: Bucket, job: Job) -> None:
    """Otherwise this job would wait for a quarter of an hour."""
    keys = bucket.fill(2)
    for kind in KINDS:
        each = job.all("keys", **dataset(bucket, kind), rate=0.001)
        assert each == [keys] * NUM_RANKS


def test_ranks_that_all_list_keep_the_limit_of_their_rate() -> None:
    with started(3, timeout_seconds=1.0) as job:
        for rank in job.ranks[1:]:
            rank.send("given_rates", uri="gs://bucket", rate=5.0)
        given = [rank.receive() for rank in job.ranks[1:]]
    assert sorted(rates for _, (rates,) in given if rates is not None) == [5.0]


@pytest.mark.parametrize("kind", [MapDataset, IterableDataset])
@pytest.mark.parametrize("value", [None, 0, "scratch"])
def test_an_argument_that_is_neither_a_bool_nor_a_uri_is_an_error(kind: Any, value: Any) -> None:
    """Also without a process group, and before a listing is too large for the store."""
    with pytest.raises((TypeError, ValueError), match="share_listing must be True, False or a uri"):
        kind("memory://bucket", share_listing=value)


def test_ranks_divide_the_objects_of_a_shared_listing(bucket: Bucket, job: Job) -> None:
    keys = bucket.fill(9)
    read = job.all("read", **dataset(bucket, "IterableDataset"))
    assert sorted(key for part in read for key in part) == keys
    assert listings(bucket) == 1


def test_ranks_of_a_node_share_a_cache(bucket: Bucket, job: Job, tmp_path: Path) -> None:
    """In the second epoch each rank reads objects that other ranks have cached: no requests."""
    keys = bucket.fill(30)
    epochs = job.all(
        "epochs", **dataset(bucket, "IterableDataset", shuffle=True, cache=str(tmp_path))
    )
    first, second = zip(*epochs, strict=True)
    for shares in (first, second):
        assert sorted(key for share in shares for key in share) == keys
    assert sorted(first[0]) != sorted(second[0])
    assert bucket.server.stats.operation("objects.get").requests == len(keys)


def test_a_listing_is_shared_by_all_ranks_or_by_none(bucket: Bucket) -> None:
    """A rank that builds a dataset alone, or later, has a listing of its own, and waits shortly."""
    bucket.server.put("bucket", "train/x", b"")
    with started(2, timeout_seconds=2.0) as job:
        arguments = dataset(bucket, "MapDataset")
        assert job.ranks[1].call("keys", **arguments) == ["x"]
        bucket.server.put("bucket", "train/y", b"")
        assert job.all("keys", **arguments) == [["x", "y"]] * 2
        assert listings(bucket) == 2
        arguments = dataset(bucket, "IterableDataset")
        succeeded, error = job.ranks[1].send("keys", **arguments).receive()
        assert job.all("keys", **arguments) == [["x", "y"]] * 2
    assert not succeeded
    assert error.startswith("TransientError: rank 1 of 2 has no listing of gs://bucket/train at")
    assert "1 ranks built the dataset in 2 s" in error


def test_an_error_of_the_listing_reaches_all_ranks(bucket: Bucket, job: Job) -> None:
    for kind in KINDS:
        errors = job.all("keys", **dataset(bucket, kind, f"{bucket.uri}/none"))
        assert all(each.startswith("NotFoundError: there is no object below") for each in errors)
        assert listings(bucket) == 1
    keys = bucket.fill(1)
    assert job.all("keys", **dataset(bucket, "IterableDataset")) == [keys] * NUM_RANKS


def test_ranks_that_divide_different_objects_raise_an_error_that_names_both(
    bucket: Bucket,
) -> None:
    bucket.fill(1)
    other = f"{bucket.root}/other"
    bucket.server.put("bucket", "other/x", b"")
    with started(2) as job:
        num_keys = job.ranks[0].call("num_keys")
        uris = [bucket.uri, other]
        for rank, uri in zip(job.ranks, uris, strict=True):
            rank.send("keys", **dataset(bucket, "IterableDataset", uri))
        outcomes = [rank.receive() for rank in job.ranks]
        assert job.ranks[0].call("num_keys") == num_keys + len(KEYS_OF_A_ROUND)
    (error,) = [text for succeeded, text in outcomes if not succeeded]
    assert all(f"{uri} at" in error for uri in uris)
    assert "rank 0" in error
    assert "rank 1" in error


def test_ranks_may_open_different_objects_by_index(bucket: Bucket) -> None:
    uris = [f"{bucket.root}/{rank}" for rank in range(2)]
    for rank in range(2):
        bucket.server.put("bucket", f"{rank}/of-{rank}", b"x")
    by_index = [dataset(bucket, "MapDataset", uri) for uri in uris]
    whole = [dataset(bucket, "IterableDataset", uri, rank=0, world_size=1) for uri in uris]
    with started(2, timeout_seconds=1.0) as job:
        assert job.each("keys", by_index) == job.each("keys", whole) == [["of-0"], ["of-1"]]


def test_a_forked_child_lists_without_the_connection_of_its_parent(
    bucket: Bucket, job: Job
) -> None:
    keys = bucket.fill(2)
    arguments = dataset(bucket, "MapDataset")
    assert job.all("keys_in_fork", **arguments) == [0] * NUM_RANKS
    assert listings(bucket) == NUM_RANKS
    assert job.all("keys", **arguments) == [keys] * NUM_RANKS
    assert listings(bucket) == 1


def test_a_new_process_group_shares_again(bucket: Bucket, job: Job) -> None:
    keys = bucket.fill(2)
    arguments = dataset(bucket, "IterableDataset")
    assert job.all("keys", **arguments) == [keys] * NUM_RANKS
    with rendezvous_port() as port:
        job.all("join_again", port=port)
        assert job.all("keys", **arguments) == [keys] * NUM_RANKS
    assert listings(bucket) == 2


def test_ranks_of_agents_that_count_restarts_differently_share(bucket: Bucket) -> None:
    """With two nodes, torchrun adds 1 to the count only where a process failed."""
    keys = bucket.fill(2)
    nodes = [
        {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": count,
            "GROUP_WORLD_SIZE": "2",
        }
        for count in "01"
    ]
    with started(2, environments=nodes, timeout_seconds=5.0) as job:
        assert job.all("keys", **dataset(bucket, "IterableDataset")) == [keys] * 2
    assert listings(bucket) == 1


def test_an_object_hands_over_what_is_too_large_for_the_store(bucket: Bucket, job: Job) -> None:
    """The object is below a prefix that listings omit, and the last rank deletes it."""
    place = f"{bucket.root}/scratch"
    given = [
        {"place": place, "uri": bucket.uri, "value": rank, "endpoint_url": bucket.server.url}
        for rank in range(NUM_RANKS)
    ]
    values = job.each("handed_over", given)
    assert values in [[[rank]] * NUM_RANKS for rank in range(NUM_RANKS)]
    statuses = bucket.server.stats.operation("objects.get").statuses
    assert statuses[206] == NUM_RANKS - 1  # reads of the object
    assert bucket.server.keys("bucket") == []


def test_an_object_that_remains_is_one_that_clean_finds(bucket: Bucket, job: Job) -> None:
    place = f"{bucket.root}/scratch"
    given = {"place": place, "uri": bucket.uri, "value": 1, "endpoint_url": bucket.server.url}
    with bucket.server.faults.inject("objects.delete", status=403):
        job.each("handed_over", [given] * NUM_RANKS)
    [key] = bucket.server.keys("bucket")
    assert key.startswith("scratch/.aioflux-uploads/listing/")
    with sync.open_store(bucket.root) as store:
        assert store.list_all().keys[:] == []
        assert store.clean(older_than_seconds=0).removed == (key,)


def test_a_rank_that_is_interrupted_leaves_no_listing_in_the_store(tmp_path: Path) -> None:
    """The other rank deletes the keys, though it has set them after the interruption."""
    begun, goes_on = tmp_path / "started", tmp_path / "goes-on"
    with started(2) as job:
        first, second = job.ranks
        num_keys = first.call("num_keys")
        first.send("list_late", started=str(begun), goes_on=str(goes_on))
        wait_until(begun.exists)
        assert second.call("interrupted", seconds=0.3)
        goes_on.touch()
        assert first.receive() == (True, [1])
        assert first.call("num_keys") == num_keys + len(KEYS_OF_A_ROUND)


def test_a_rank_that_lists_and_hangs_is_an_error_of_the_others(
    bucket: Bucket, tmp_path: Path
) -> None:
    blocker = tmp_path / "blocker"
    with started(2, timeout_seconds=2.0) as job:
        first, second = job.ranks[1], job.ranks[0]  # rank 0 runs the store
        first.send("hang", **dataset(bucket, "IterableDataset", blocker=str(blocker)))
        wait_until(blocker.exists)
        succeeded, error = second.send("keys", **dataset(bucket, "IterableDataset")).receive()
    assert not succeeded
    assert error.startswith("TransientError: rank 0 of 2 has no listing of gs://bucket/train at")
    assert "the rank that lists did not finish in 4 s" in error
    assert "share_listing=False" in error

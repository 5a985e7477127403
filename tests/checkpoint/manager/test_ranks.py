"""Several ranks: a save is committed on all of them or on none, and no rank waits for ever."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from aioflux.checkpoint import Checkpointer, clean
from aioflux.testing import GCSServer
from tests.checkpoint.manager.trainer import is_state_of
from tests.checkpoint.manager.worker_process import Ranks, uploader_of, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.checkpoint.manager.worker_process import Forks, Rank

pytestmark = pytest.mark.more

WRITE = "*insert*"
LONG = 250
"""Seconds for which what is not to be answered is held up."""


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


@pytest.fixture(scope="module")
def two(
    forks: Forks, server: GCSServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    with Ranks(forks, server, 2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.fixture
def uri(request: pytest.FixtureRequest, server: GCSServer) -> str:
    server.faults.clear()
    server.stats.reset()
    return f"gs://bucket/{request.node.name}"


def keys(server: GCSServer, uri: str) -> list[str]:
    return server.keys("bucket", f"{uri.removeprefix('gs://bucket/')}/step-")


def has_key(server: GCSServer, uri: str, end: str) -> bool:
    return any(key.endswith(end) for key in keys(server, uri))


@pytest.mark.parametrize("staging", ["thread", "process"])
def test_each_rank_writes_its_part_and_reads_it(
    two: Ranks, server: GCSServer, uri: str, staging: str
) -> None:
    two.call("open", uri=uri, staging=staging, keep_last=2)
    for step in (1, 2, 3):
        results = two.call("save", step=step)
    # Half of the rows each, and what is the same on both is written once.
    assert all(900_000 < num_bytes < 1_300_000 for _, num_bytes in results)
    assert two.call("load") == [[3, True], [3, True]]
    assert two.call("load_whole") == [[3, True], [3, True]]
    two.call("close")
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        assert checkpointer.steps() == [2, 3]
        state = checkpointer.load()
        assert is_state_of(3, state)
        assert state["rank0"] == {"number": 0}
        assert state["rank1"] == {"number": 1}
        assert checkpointer.history()[-1].world_size == 2
    assert len(keys(server, uri)) == 6  # no manifest stays


def test_ranks_prepare_together(two: Ranks, uri: str) -> None:
    two.call("open", uri=uri)
    assert two.call("prepare") == [1, 1]
    two.call("save", step=1)
    assert two.call("prepare") == [1, 1]  # the save has used the memory
    assert two.call("load") == [[1, True], [1, True]]
    two.call("close")


def test_numbers_for_keys_come_back_on_the_rank_that_alone_has_them(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    two.call("open", uri=uri)
    two.call("save_own", step=1)
    own = [f"{{5: {n}, 7: [tensor([{n}, {n}])], 'text': {{}}}}" for n in (0, 1)]
    whole = [f"{{'rank{n}': {own[n]}, 'both': {{1: 2}}}}" for n in (0, 1)]
    assert two.call("load_own") == [[each, each] for each in whole]
    two.call("close")
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        state = checkpointer.load()
    assert [str(state["rank0"]), str(state["rank1"])] == own


def test_tied_tensors_are_stored_once_by_one_of_the_ranks(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    two.call("open", uri=uri)
    written = two.call("save_tied", step=1)
    two.call("close")
    assert 5 * 400_000 < sum(written) < 5 * 410_000
    assert all(written)
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        state = checkpointer.load()
        assert checkpointer.verify(1, deep=True).is_valid
    for number in range(5):
        assert state[f"first{number}"] is state[f"second{number}"]
        assert state[f"first{number}"].eq(number).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_rank_is_one_of_all(
    two: Ranks, server: GCSServer, uri: str, rank: int
) -> None:
    two.call("open", uri=uri)
    two.call("save", step=1)
    before = keys(server, uri)
    server.faults.add(WRITE, key=f"*/__{rank}_0.distcp", status=403)
    two.call("begin", step=1, value=2)
    results = two.send("result", step=1)
    assert [each[0] for each in results] == [False, False]
    assert results[rank][1] == "PermissionDeniedError"
    for each in results:
        assert f"__{rank}_0.distcp" in each[2]
        assert f"rank {rank}" in each[2] or each is results[rank]
    assert keys(server, uri) == before
    assert two.call("load") == [[1, True], [1, True]]
    two.call("close")


@pytest.mark.parametrize("status", [403, 404, 503])
def test_a_look_that_fails_decides_nothing(
    two: Ranks, server: GCSServer, uri: str, status: int
) -> None:
    two.call("open", uri=uri, stubborn=[0])
    with server.faults.inject(WRITE, key="*/.metadata", status=503):
        two.call("begin", step=1)
        # The coordinator has read the manifests of the others, and now only rank 1 polls.
        wait_until(lambda: server.stats.operation("objects.insert").statuses[503])
        before = server.stats.operation("objects.list").statuses[status]
        server.faults.add("*objects.list", status=status, times=2)
        wait_until(lambda: server.stats.operation("objects.list").statuses[status] == before + 2)
    results = two.send("result", step=1)
    assert [each[0] for each in results] == [True, True], results
    two.call("close")


@pytest.mark.parametrize("status", [403, 503])
def test_a_manifest_that_cannot_be_written(
    two: Ranks, server: GCSServer, uri: str, status: int
) -> None:
    """A rank that cannot be sure of it goes by what the coordinator makes of it.

    No heartbeats: with a hastened clock, the coordinator would miss the next one.
    """
    two.call("open", uri=uri, heartbeat_seconds=1_000_000)
    server.faults.add(WRITE, key="*/rank-00001.json", status=status, times=2)
    two.call("begin", step=1)
    wait_until(lambda: server.faults.injected["status"] == 2)
    two.all[0].call("hasten", factor=1000)
    results = two.send("result", step=1)
    assert [each[:2] for each in results] == [
        [False, "CheckpointError"],
        [False, "PermissionDeniedError" if status == 403 else "CheckpointError"],
    ]
    assert "rank 1 of 2 wrote no manifest" in results[0][2]
    assert status == 403 or results[0][2] in results[1][2]
    server.faults.clear()
    two.all[0].call("hasten", factor=1)
    two.call("save", step=2)
    two.call("close")


def test_a_manifest_without_a_response_counts(two: Ranks, server: GCSServer, uri: str) -> None:
    """It is there, without a response: the coordinator commits, and the rank notices that."""
    two.call("open", uri=uri)
    server.faults.add(WRITE, key="*/rank-00001.json", lost=True, times=2)
    server.faults.add("*objects.get", key="*/rank-00001.json", status=503, times=2)
    two.call("begin", step=1)
    results = two.send("result", step=1)
    assert [each[0] for each in results] == [True, True], results
    two.call("close")


def test_a_look_of_the_coordinator_that_fails_decides_nothing(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    two.call("open", uri=uri)
    server.faults.add("objects.media", key="*/rank-00001.json", status=503, times=2)
    two.call("begin", step=1)
    results = two.send("result", step=1)
    assert [each[0] for each in results] == [True, True], results
    assert server.faults.injected["status"] == 2
    two.call("close")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the uploader in /proc")
def test_a_failure_that_was_reported_is_final(two: Ranks, server: GCSServer, uri: str) -> None:
    """Also if the uploader that reported it dies before it has reported it to its trainer."""
    two.call("open", uri=uri, staging="process", keep_last=1)
    two.call("save", step=1)
    uploader = uploader_of(two.all[0].pid)
    server.faults.add(WRITE, key="*step-00000002/.metadata", status=403)
    # What it still does between the two.
    server.faults.add(WRITE, key="*.checkpoint-history*", delay_seconds=LONG, times=1)
    two.call("begin", step=2)
    wait_until(lambda: has_key(server, uri, "rank-00000.json"))
    os.kill(uploader, signal.SIGKILL)
    server.faults.clear()
    results = two.send("result", step=2)
    assert [each[0] for each in results] == [False, False], results
    assert "403" in results[0][2]
    assert two.call("load") == [[1, True], [1, True]]
    two.call("close")


def test_a_coordinator_that_may_not_delete_is_noticed_all_the_same(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    """Manifests stay then, and only the commit object tells of the commit."""
    server.faults.add("*objects.delete", status=403)
    two.call("open", uri=uri, commit_seconds=120)
    two.call("save", step=1)
    two.call("close")
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        assert checkpointer.steps() == [1]


def test_a_state_that_cannot_be_copied_on_one_rank(two: Ranks, server: GCSServer, uri: str) -> None:
    two.call("open", uri=uri)
    first, second = two.all
    first.send("save_broken", step=1)
    second.send("save_broken", step=1)
    results = [first.receive(), second.receive()]
    assert not any(each[0] for each in results)
    assert any("lambda" in each[2] for each in results)
    assert keys(server, uri) == []
    two.call("save", step=2)
    two.call("close")


def test_ranks_at_different_steps_are_reported(two: Ranks, uri: str) -> None:
    two.call("open", uri=uri)
    for step, each in enumerate(two.all):
        each.send("save", step=step)
    for each in two.all:
        _, kind, text = each.receive()
        assert kind == "ValueError"
        assert "different steps" in text
        assert "0 to 1" in text
    two.call("close")


def test_a_cancelled_save_is_one_on_no_rank(two: Ranks, server: GCSServer, uri: str) -> None:
    two.call("open", uri=uri)
    server.faults.add(WRITE, key="*/__1_0.distcp", delay_seconds=LONG)
    two.call("begin", step=1)
    # What comes to the server when its sender has gone would stay.
    wait_until(lambda: server.faults.injected["delay"])
    assert two.all[1].call("cancel", step=1)
    first = two.all[0]
    first.send("result", step=1)
    ok, kind, text = first.receive()
    assert (ok, kind) == (False, "CheckpointError")
    assert "rank 1" in text
    assert "cancelled" in text
    assert keys(server, uri) == []
    two.call("close")


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_has_uploaded_goes_by_the_coordinator(
    two: Ranks, server: GCSServer, uri: str, fails: bool
) -> None:
    """It cannot withdraw its manifest, and must not call a step cancelled that is there."""
    two.call("open", uri=uri, stubborn=[0])
    if fails:
        server.faults.add(WRITE, key="*/.metadata", status=403)
    with server.faults.inject(WRITE, key="*/__0_0.distcp", status=503):
        two.call("begin", step=1)
        wait_until(lambda: has_key(server, uri, "rank-00001.json"))
        two.all[1].call("ask_to_stop", step=1)
    assert two.all[1].call("cancel", step=1) is fails
    results = two.send("result", step=1)
    assert [each[0] for each in results] == [not fails] * 2, results
    two.call("close")


def test_damage_that_one_rank_meets_sends_all_to_the_step_before(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    two.call("open", uri=uri)
    for step in (1, 2):
        two.call("save", step=step)
    server.faults.add("objects.media", key="*step-00000002/*/__1_0.distcp", flip_at=100)
    assert two.call("load") == [[1, True], [1, True]]
    two.call("close")


def test_a_signal_to_one_rank_is_a_last_save_of_all(two: Ranks, uri: str) -> None:
    two.call("open", uri=uri)
    two.call("watch", deadline_seconds=LONG)
    assert two.call("should_save", step=1) == [[False, False], [False, False]]
    os.kill(two.all[1].pid, signal.SIGTERM)
    step, results = 1, [[False, False]] * 2
    while not results[0][0]:
        assert step < 10_000
        step += 1
        results = two.call("should_save", step=step)
        assert results[0] == results[1]
    assert results == [[True, True]] * 2
    two.call("begin", step=step)
    assert two.call("should_save", step=step + 1) == [[False, True]] * 2
    assert two.call("load") == [[step, True]] * 2
    two.call("close")


def test_a_coordinator_that_dies_is_missed_in_time(
    forks: Forks, server: GCSServer, tmp_path: Path, uri: str
) -> None:
    with Ranks(forks, server, 2, tmp_path) as ranks:
        ranks.call("open", uri=uri, commit_seconds=300, heartbeat_seconds=LONG)
        server.faults.add(WRITE, key="*/__0_0.distcp", delay_seconds=LONG)
        ranks.call("begin", step=1)
        ranks.all[0].kill()
        ranks.all[1].call("hasten", factor=1000)
        ranks.all[1].send("result", step=1)
        ok, _, text = ranks.all[1].receive()
        assert not ok
        assert "the coordinator (rank 0) did not report the outcome within 300 s" in text


def test_a_rank_that_dies_fails_the_save_in_time(
    forks: Forks, server: GCSServer, tmp_path: Path, uri: str
) -> None:
    with Ranks(forks, server, 2, tmp_path) as ranks:
        ranks.call("open", uri=uri, commit_seconds=300, heartbeat_seconds=LONG)
        ranks.call("save", step=1)
        server.faults.add(WRITE, key="*/__1_0.distcp", delay_seconds=LONG)
        ranks.call("begin", step=1, value=2)
        ranks.all[1].kill()
        first = ranks.all[0]
        first.call("hasten", factor=1000)
        first.send("result", step=1)
        ok, kind, text = first.receive()
        assert (ok, kind) == (False, "CheckpointError")
        assert "rank 1 of 2 wrote no manifest" in text
        assert "within 300 s after the upload of the coordinator" in text
        assert "rank-00001.json" in text
        first.send("save", step=2)
        ok, kind, text = first.receive()
        assert (ok, kind) == (False, "CheckpointError")
        assert "received nothing from the other ranks" in text
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        assert is_state_of(1, checkpointer.load())


def stop_uploads(rank: Rank, staging: str, how: signal.Signals) -> None:
    """Kill or stop a rank, and what uploads for it."""
    if staging == "process":
        os.kill(rank.call("uploader"), how)
    os.kill(rank.pid, how)


@pytest.mark.skipif(sys.platform != "linux", reason="stops processes by signals")
@pytest.mark.parametrize(
    ("staging", "how"),
    [
        ("thread", signal.SIGKILL),
        ("process", signal.SIGKILL),
        ("thread", signal.SIGSTOP),
    ],
)
def test_a_rank_that_is_gone_after_staging_is_named(
    forks: Forks,
    server: GCSServer,
    tmp_path: Path,
    uri: str,
    staging: str,
    how: signal.Signals,
) -> None:
    """Long before `commit_seconds`; the step before stays, and `clean` finds what is left."""
    with Ranks(forks, server, 4, tmp_path) as ranks:
        ranks.call("open", uri=uri, staging=staging, commit_seconds=100_000, heartbeat_seconds=3)
        ranks.call("save", step=1)
        before = keys(server, uri)
        server.faults.add(WRITE, key="*/__1_0.distcp", delay_seconds=LONG)
        ranks.call("begin", step=2)
        stop_uploads(ranks.all[1], staging, how)
        alive = [ranks.all[rank] for rank in (0, 2, 3)]
        for each in alive:
            each.send("result", step=2)
        results = [each.receive() for each in alive]
        assert [each[:2] for each in results] == [[False, "CheckpointError"]] * 3, results
        for each in results:
            assert re.search(r"no heartbeat of rank 1 for \d+ s \(of 4 ranks\)", each[2]), results
        if how is signal.SIGSTOP:
            server.faults.clear()
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        assert checkpointer.steps() == [1]
        assert is_state_of(1, checkpointer.load())
    clean(uri, older_than_seconds=0, endpoint_url=server.url)
    assert keys(server, uri) == before


@pytest.mark.skipif(sys.platform != "linux", reason="stops processes by signals")
@pytest.mark.parametrize("staging", ["thread", "process"])
def test_a_coordinator_that_is_gone_after_staging_is_named(
    forks: Forks, server: GCSServer, tmp_path: Path, uri: str, staging: str
) -> None:
    with Ranks(forks, server, 2, tmp_path) as ranks:
        ranks.call("open", uri=uri, staging=staging, commit_seconds=100_000, heartbeat_seconds=3)
        server.faults.add(WRITE, key="*/__0_0.distcp", delay_seconds=LONG)
        ranks.call("begin", step=1)
        stop_uploads(ranks.all[0], staging, signal.SIGKILL)
        ranks.all[1].send("result", step=1)
        ok, kind, text = ranks.all[1].receive()
        assert (ok, kind) == (False, "CheckpointError")
        assert "rank 1 has uploaded its part, but the coordinator (rank 0) did not" in text
        assert "no heartbeat of rank 0" in text


@pytest.mark.parametrize("staging", ["thread", "process"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_uploads_for_long_is_waited_for(
    two: Ranks, server: GCSServer, uri: str, staging: str, slow: int
) -> None:
    """As long as it lives; its heartbeats are gone with the commit.

    A machine may stall: a rank is silent after 20 s without a heartbeat, and the save takes longer.
    """
    two.call("open", uri=uri, staging=staging, stubborn=[slow], heartbeat_seconds=8)
    with server.faults.inject(WRITE, key=f"*/__{slow}_0.distcp", status=503):
        two.call("begin", step=1)
        try:
            wait_until(lambda: min(num_heartbeats(server, uri, rank) for rank in (0, 1)) >= 3)
        except AssertionError:
            pytest.fail(f"{keys(server, uri)}, {two.send('result', step=1, timeout=0.01)}")
    results = two.send("result", step=1)
    assert [each[0] for each in results] == [True, True], results
    assert not any(key.endswith(".beat") for key in keys(server, uri))
    two.call("close")


def num_heartbeats(server: GCSServer, uri: str, rank: int) -> int:
    """Return how many heartbeats a rank has written: each says which it is."""
    found = [key for key in keys(server, uri) if key.endswith(f"rank-{rank:05d}.beat")]
    return int(server.get("bucket", found[0])) if found else 0


def test_a_wait_that_ends_says_for_what(two: Ranks, server: GCSServer, uri: str) -> None:
    two.call("open", uri=uri, stubborn=[1])
    with server.faults.inject(WRITE, key="*/__1_0.distcp", status=503):
        two.call("begin", step=1)
        ok, kind, text = two.send("result", step=1, timeout=0.01)[1]
        assert (ok, kind) == (False, "TimeoutError")
        assert re.search(rf"step 1 to {uri}/? is not complete on rank 1 of 2 after \d+\.\d s", text)
    results = two.send("result", step=1)
    assert [each[0] for each in results] == [True, True], results
    two.call("close")

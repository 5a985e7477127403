"""Several ranks: a save is committed on all of them or on none, and nobody waits for ever."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioflux.checkpoint import Checkpointer, clean
from aioflux.testing import GCSServer
from tests.checkpoint.manager.desk import Ranks, wait_until
from tests.checkpoint.manager.trainer import is_state_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.checkpoint.manager.desk import Forks, Rank

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
    two.ask("open", uri=uri, staging=staging, keep_last=2)
    for step in (1, 2, 3):
        told = two.ask("save", step=step)
    # Half of the rows each, and what is the same on both is written once.
    assert all(900_000 < num_bytes < 1_300_000 for _, num_bytes in told)
    assert two.ask("load") == [[3, True], [3, True]]
    assert two.ask("load_whole") == [[3, True], [3, True]]
    two.ask("close")
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        assert checkpointer.steps() == [2, 3]
        state = checkpointer.load()
        assert is_state_of(3, state)
        assert state["rank0"] == {"number": 0}
        assert state["rank1"] == {"number": 1}
        assert checkpointer.history()[-1].world_size == 2
    assert len(keys(server, uri)) == 6  # no manifest stays


def test_numbers_for_keys_come_back_on_the_rank_that_alone_has_them(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    two.ask("open", uri=uri)
    two.ask("save_own", step=1)
    own = [f"{{5: {n}, 7: [tensor([{n}, {n}])], 'text': {{}}}}" for n in (0, 1)]
    whole = [f"{{'rank{n}': {own[n]}, 'both': {{1: 2}}}}" for n in (0, 1)]
    assert two.ask("load_own") == [[each, each] for each in whole]
    two.ask("close")
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        state = checkpointer.load()
    assert [str(state["rank0"]), str(state["rank1"])] == own


def test_tied_tensors_are_stored_once_by_one_of_the_ranks(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    two.ask("open", uri=uri)
    written = two.ask("save_tied", step=1)
    two.ask("close")
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
    two.ask("open", uri=uri)
    two.ask("save", step=1)
    before = keys(server, uri)
    server.faults.add(WRITE, key=f"*/__{rank}_0.distcp", status=403)
    two.ask("begin", step=1, value=2)
    told = two.tell("result", step=1)
    assert [each[0] for each in told] == [False, False]
    assert told[rank][1] == "PermissionDeniedError"
    for each in told:
        assert f"__{rank}_0.distcp" in each[2]
        assert f"rank {rank}" in each[2] or each is told[rank]
    assert keys(server, uri) == before
    assert two.ask("load") == [[1, True], [1, True]]
    two.ask("close")


@pytest.mark.parametrize("status", [403, 404, 503])
def test_a_look_that_fails_decides_nothing(
    two: Ranks, server: GCSServer, uri: str, status: int
) -> None:
    two.ask("open", uri=uri, stubborn=[0])
    with server.faults.inject(WRITE, key="*/.metadata", status=503):
        two.ask("begin", step=1)
        # The coordinator has looked at what the others told, and now only rank 1 looks.
        wait_until(lambda: server.stats.operation("objects.insert").statuses[503])
        before = server.stats.operation("objects.list").statuses[status]
        server.faults.add("*objects.list", status=status, times=2)
        wait_until(lambda: server.stats.operation("objects.list").statuses[status] == before + 2)
    told = two.tell("result", step=1)
    assert [each[0] for each in told] == [True, True], told
    two.ask("close")


@pytest.mark.parametrize("status", [403, 503])
def test_what_was_told_to_the_coordinator_or_not(
    two: Ranks, server: GCSServer, uri: str, status: int
) -> None:
    """A rank that cannot be sure of it goes by what the coordinator makes of it."""
    two.ask("open", uri=uri)
    server.faults.add(WRITE, key="*/rank-00001.json", status=status, times=2)
    two.ask("begin", step=1)
    wait_until(lambda: server.faults.injected["status"] == 2)
    two.all[0].ask("hasten", factor=1000)
    told = two.tell("result", step=1)
    assert [each[:2] for each in told] == [
        [False, "CheckpointError"],
        [False, "PermissionDeniedError" if status == 403 else "CheckpointError"],
    ]
    assert "rank 1 of 2 did not upload" in told[0][2]
    assert status == 403 or told[0][2] in told[1][2]
    server.faults.clear()
    two.all[0].ask("hasten", factor=1)
    two.ask("save", step=2)
    two.ask("close")


def test_what_was_told_without_an_answer_counts(two: Ranks, server: GCSServer, uri: str) -> None:
    """It is there, and nobody said so: the coordinator commits, and the rank hears of that."""
    two.ask("open", uri=uri)
    server.faults.add(WRITE, key="*/rank-00001.json", lost=True, times=2)
    server.faults.add("*objects.get", key="*/rank-00001.json", status=503, times=2)
    two.ask("begin", step=1)
    told = two.tell("result", step=1)
    assert [each[0] for each in told] == [True, True], told
    two.ask("close")


def test_a_look_of_the_coordinator_that_fails_decides_nothing(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    two.ask("open", uri=uri)
    server.faults.add("objects.media", key="*/rank-00001.json", status=503, times=2)
    two.ask("begin", step=1)
    told = two.tell("result", step=1)
    assert [each[0] for each in told] == [True, True], told
    assert server.faults.injected["status"] == 2
    two.ask("close")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the uploader in /proc")
def test_a_failure_that_was_told_is_final(two: Ranks, server: GCSServer, uri: str) -> None:
    """Also where the uploader that told it dies before it has told its trainer."""
    two.ask("open", uri=uri, staging="process", keep_last=1)
    two.ask("save", step=1)
    uploader = uploader_of(two.all[0].pid)
    server.faults.add(WRITE, key="*step-00000002/.metadata", status=403)
    # What it still does between the two.
    server.faults.add(WRITE, key="*.checkpoint-history*", delay_seconds=LONG, times=1)
    two.ask("begin", step=2)
    wait_until(lambda: has_key(server, uri, "rank-00000.json"))
    os.kill(uploader, signal.SIGKILL)
    server.faults.clear()
    told = two.tell("result", step=2)
    assert [each[0] for each in told] == [False, False], told
    assert "403" in told[0][2]
    assert two.ask("load") == [[1, True], [1, True]]
    two.ask("close")


def uploader_of(pid: int) -> int:
    """Return the child of a process that uploads."""
    for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"uploader_main" in Path(f"/proc/{number}/cmdline").read_bytes():
            return int(number)
    raise AssertionError("no uploader runs")


def test_a_coordinator_that_may_not_delete_is_heard_all_the_same(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    """Manifests stay then, and only the commit object tells of the commit."""
    server.faults.add("*objects.delete", status=403)
    two.ask("open", uri=uri, commit_seconds=120)
    two.ask("save", step=1)
    two.ask("close")
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        assert checkpointer.steps() == [1]


def test_a_state_that_cannot_be_copied_on_one_rank(two: Ranks, server: GCSServer, uri: str) -> None:
    two.ask("open", uri=uri)
    first, second = two.all
    first.tell("save_broken", step=1)
    second.tell("save_broken", step=1)
    told = [first.hear(), second.hear()]
    assert not any(each[0] for each in told)
    assert any("pickle" in each[2] for each in told)
    assert keys(server, uri) == []
    two.ask("save", step=2)
    two.ask("close")


def test_ranks_at_different_steps_are_told(two: Ranks, uri: str) -> None:
    two.ask("open", uri=uri)
    for step, each in enumerate(two.all):
        each.tell("save", step=step)
    for each in two.all:
        told = each.hear()
        assert told[:2] == [False, "ValueError"]
        assert "different steps" in told[2]
        assert "0 to 1" in told[2]
    two.ask("close")


def test_a_cancelled_save_is_one_on_no_rank(two: Ranks, server: GCSServer, uri: str) -> None:
    two.ask("open", uri=uri)
    server.faults.add(WRITE, key="*/__1_0.distcp", delay_seconds=LONG)
    two.ask("begin", step=1)
    # What comes to the server when its sender has gone would stay.
    wait_until(lambda: server.faults.injected["delay"])
    assert two.all[1].ask("cancel", step=1)
    told = two.all[0]
    told.tell("result", step=1)
    ok, kind, text = told.hear()
    assert (ok, kind) == (False, "CheckpointError")
    assert "rank 1" in text
    assert "cancelled" in text
    assert keys(server, uri) == []
    two.ask("close")


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_has_uploaded_goes_by_the_coordinator(
    two: Ranks, server: GCSServer, uri: str, fails: bool
) -> None:
    """It cannot take back what it told, and must not call a step cancelled that is there."""
    two.ask("open", uri=uri, stubborn=[0])
    if fails:
        server.faults.add(WRITE, key="*/.metadata", status=403)
    with server.faults.inject(WRITE, key="*/__0_0.distcp", status=503):
        two.ask("begin", step=1)
        wait_until(lambda: has_key(server, uri, "rank-00001.json"))
        two.all[1].ask("ask_to_stop", step=1)
    assert two.all[1].ask("cancel", step=1) is fails
    told = two.tell("result", step=1)
    assert [each[0] for each in told] == [not fails] * 2, told
    two.ask("close")


def test_damage_that_one_rank_meets_sends_all_to_the_step_before(
    two: Ranks, server: GCSServer, uri: str
) -> None:
    two.ask("open", uri=uri)
    for step in (1, 2):
        two.ask("save", step=step)
    server.faults.add("objects.media", key="*step-00000002/*/__1_0.distcp", flip_at=100)
    assert two.ask("load") == [[1, True], [1, True]]
    two.ask("close")


def test_a_signal_to_one_rank_is_a_last_save_of_all(two: Ranks, uri: str) -> None:
    two.ask("open", uri=uri)
    two.ask("watch", deadline_seconds=LONG)
    assert two.ask("should_save", step=1) == [[False, False], [False, False]]
    os.kill(two.all[1].pid, signal.SIGTERM)
    step, told = 1, [[False, False]] * 2
    while not told[0][0]:
        step += 1
        told = two.ask("should_save", step=step)
        assert told[0] == told[1]
    assert told == [[True, True]] * 2
    two.ask("begin", step=step)
    assert two.ask("load") == [[step, True]] * 2
    two.ask("close")


def test_a_coordinator_that_dies_is_missed_in_time(
    forks: Forks, server: GCSServer, tmp_path: Path, uri: str
) -> None:
    with Ranks(forks, server, 2, tmp_path) as ranks:
        ranks.ask("open", uri=uri, commit_seconds=300, heartbeat_seconds=LONG)
        server.faults.add(WRITE, key="*/__0_0.distcp", delay_seconds=LONG)
        ranks.ask("begin", step=1)
        ranks.all[0].kill()
        ranks.all[1].ask("hasten", factor=1000)
        ranks.all[1].tell("result", step=1)
        ok, _, text = ranks.all[1].hear()
        assert not ok
        assert "within 300 s the coordinator (rank 0) told neither" in text


def test_a_rank_that_dies_fails_the_save_in_time(
    forks: Forks, server: GCSServer, tmp_path: Path, uri: str
) -> None:
    with Ranks(forks, server, 2, tmp_path) as ranks:
        ranks.ask("open", uri=uri, commit_seconds=300, heartbeat_seconds=LONG)
        ranks.ask("save", step=1)
        server.faults.add(WRITE, key="*/__1_0.distcp", delay_seconds=LONG)
        ranks.ask("begin", step=1, value=2)
        ranks.all[1].kill()
        told = ranks.all[0]
        told.ask("hasten", factor=1000)
        told.tell("result", step=1)
        ok, kind, text = told.hear()
        assert (ok, kind) == (False, "CheckpointError")
        assert "rank 1 of 2 did not upload within 300 s" in text
        assert "rank-00001.json" in text
        told.tell("save", step=2)
        ok, kind, text = told.hear()
        assert (ok, kind) == (False, "CheckpointError")
        assert "did not hear of the others" in text
    with Checkpointer(uri, endpoint_url=server.url) as checkpointer:
        assert is_state_of(1, checkpointer.load())


def stop_uploads(rank: Rank, staging: str, how: signal.Signals) -> None:
    """Kill or stop a rank, and what uploads for it."""
    if staging == "process":
        os.kill(rank.ask("uploader"), how)
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
        ranks.ask("open", uri=uri, staging=staging, commit_seconds=100_000, heartbeat_seconds=3)
        ranks.ask("save", step=1)
        before = keys(server, uri)
        server.faults.add(WRITE, key="*/__1_0.distcp", delay_seconds=LONG)
        ranks.ask("begin", step=2)
        stop_uploads(ranks.all[1], staging, how)
        alive = [ranks.all[rank] for rank in (0, 2, 3)]
        for each in alive:
            each.tell("result", step=2)
        told = [each.hear() for each in alive]
        assert [each[:2] for each in told] == [[False, "CheckpointError"]] * 3, told
        for each in told:
            assert re.search(r"no sign of life of rank 1 for \d+ s \(of 4 ranks\)", each[2]), told
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
        ranks.ask("open", uri=uri, staging=staging, commit_seconds=100_000, heartbeat_seconds=3)
        server.faults.add(WRITE, key="*/__0_0.distcp", delay_seconds=LONG)
        ranks.ask("begin", step=1)
        stop_uploads(ranks.all[0], staging, signal.SIGKILL)
        ranks.all[1].tell("result", step=1)
        ok, kind, text = ranks.all[1].hear()
        assert (ok, kind) == (False, "CheckpointError")
        assert "rank 1 is done, and the coordinator is gone" in text
        assert "no sign of life of rank 0" in text


@pytest.mark.parametrize("staging", ["thread", "process"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_uploads_for_long_is_waited_for(
    two: Ranks, server: GCSServer, uri: str, staging: str, slow: int
) -> None:
    """As long as it lives; its heartbeats are gone with the commit."""
    two.ask("open", uri=uri, staging=staging, stubborn=[slow], heartbeat_seconds=3)
    with server.faults.inject(WRITE, key=f"*/__{slow}_0.distcp", status=503):
        two.ask("begin", step=1)
        wait_until(lambda: min(num_heartbeats(server, uri, rank) for rank in (0, 1)) >= 4)
    told = two.tell("result", step=1)
    assert [each[0] for each in told] == [True, True], told
    assert not any(key.endswith(".beat") for key in keys(server, uri))
    two.ask("close")


def num_heartbeats(server: GCSServer, uri: str, rank: int) -> int:
    """Return how many heartbeats a rank has written: each says which it is."""
    found = [key for key in keys(server, uri) if key.endswith(f"rank-{rank:05d}.beat")]
    return int(server.get("bucket", found[0])) if found else 0


def test_a_wait_that_ends_says_for_what(two: Ranks, server: GCSServer, uri: str) -> None:
    two.ask("open", uri=uri, stubborn=[1])
    with server.faults.inject(WRITE, key="*/__1_0.distcp", status=503):
        two.ask("begin", step=1)
        ok, kind, text = two.tell("result", step=1, timeout=0.01)[1]
        assert (ok, kind) == (False, "TimeoutError")
        assert re.search(rf"step 1 to {uri}/? is under way on rank 1 of 2 for \d+\.\d s", text)
    told = two.tell("result", step=1)
    assert [each[0] for each in told] == [True, True], told
    two.ask("close")

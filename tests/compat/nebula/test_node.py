"""The processes of a node: trainers and the daemon die, fork and commit together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioflux.checkpoint import verify
from aioflux.compat import nebula as nm
from aioflux.errors import CheckpointError
from tests.compat.nebula import trainer
from tests.compat.nebula.conftest import LINGER_SECONDS
from tests.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aioflux.testing import GCSServer

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[3]


@pytest.fixture
def start(node: Path, tmp_path: Path) -> Iterator[Callable[..., list[WorkerProcess]]]:
    started: list[WorkerProcess] = []

    def begin(world_size: int = 1, nodes: tuple[str, ...] = ("", "")) -> list[WorkerProcess]:
        group = {"world_size": world_size, "rendezvous": str(tmp_path / f"meet-{len(started)}")}
        trainers = []
        for rank in range(world_size):
            variables = {"AIOFLUX_NEBULA_DIR": nodes[rank]} if nodes[rank] else {}
            trainers.append(WorkerProcess(trainer.open_worker, variables, rank=rank, **group))
        started.extend(trainers)
        for each in trainers:
            assert each.receive() == (True, "ready")
        return trainers

    yield begin
    for each in started:
        if each.process.exitcode is None:
            each.end(signal.SIGKILL)


def pid_of_daemon(node: Path) -> int:
    """Return the process of the node daemon."""
    [pid] = (
        int(each.name)
        for each in Path("/proc").glob("[0-9]*")
        if b"_node_daemon_process" in (each / "cmdline").read_bytes()
        and f"AIOFLUX_NEBULA_DIR={node}".encode() in (each / "environ").read_bytes()
    )
    return pid


def test_memory_survives_the_death_of_the_trainer(
    start: Callable[..., list[WorkerProcess]], tmp_path: Path
) -> None:
    """What was not persisted is loaded by the next one, and persisted without the first."""
    (first,) = start()
    place = str(tmp_path / "tier3")
    first.call("init", persistent_storage_path=place, persistent_time_interval=1000)
    for number in range(3):
        first.call("save", tag=f"global_step{number}", name="model", number=number)
    first.call("begin", tag="torn", num_of_files=2)
    first.call("save", tag="torn", name="model", number=9)
    first.end(signal.SIGKILL)
    nm.init(place, persistent_time_interval=1000)
    found = nm.get_latest_checkpoint()
    assert found is not None
    assert found.tag == "global_step2"
    assert float(found.load("model")["weight"][0]) == 2
    assert "torn" not in nm.list_checkpoints()
    nm.flush_persistence()
    assert "storage" in nm.list_checkpoints()["global_step2"]["places"]


_PROGRAM = """
import resource, sys
import aioflux.compat.nebula as nm

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
nm.init(sys.argv[1], 0)
checkpoint = nm.Checkpoint("a", 130)
for number in range(130):
    checkpoint.save(f"part{number}", number)
nm.flush_persistence()
"""


def test_many_parts_are_kept_by_a_daemon_that_holds_no_pipe_of_the_trainer(
    node: Path, tmp_path: Path
) -> None:
    """Few descriptors are allowed; and a pipe that its output goes to ends when it does."""
    place = str(tmp_path / "tier3")
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, place],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LINGER_SECONDS / 3,  # the daemon would not have exited by then
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    nm.init(place, 0)
    found = nm.get_latest_checkpoint()
    assert found is not None
    assert [each.tier for each in found._saved_tag.sources] == ["memory", "storage"]  # type: ignore[union-attr]
    assert found.load("part129") == 129


def test_without_a_storage_memory_alone_survives(start: Callable[..., list[WorkerProcess]]) -> None:
    (first,) = start()
    first.call("init")
    first.call("save", tag="a", name="model", number=1)
    first.end(signal.SIGKILL)
    nm.init()
    found = nm.get_latest_checkpoint()
    assert found is not None
    assert float(found.load("model")["weight"][0]) == 1
    assert nm.list_checkpoints()["a"]["places"] == ["memory"]


def test_a_daemon_that_dies_is_an_error_and_is_started_again(node: Path, tmp_path: Path) -> None:
    nm.init(tmp_path / "tier3", 0)
    checkpoint = nm.Checkpoint("a", -2)
    checkpoint.save("x", 1)
    os.kill(pid_of_daemon(node), signal.SIGKILL)
    with pytest.raises(CheckpointError, match="save again"):
        checkpoint.commit()
    with pytest.raises(CheckpointError, match="nothing to commit"):
        checkpoint.commit()
    again = nm.Checkpoint("a", -2)
    again.save("x", 2)
    assert again.commit()
    assert nm.Checkpoint("a").load("x") == 2


def test_ranks_commit_together(start: Callable[..., list[WorkerProcess]], tmp_path: Path) -> None:
    """On all ranks or on none: parts of all are there, and a rank that failed is named by all."""
    ranks = start(2)
    place = str(tmp_path / "tier3")
    for rank in ranks:
        rank.call("init", persistent_storage_path=place, persistent_time_interval=0)
    for number, rank in enumerate(ranks):
        rank.call("begin", tag="good", num_of_files=-2)
        rank.call("save", tag="good", name=f"rank{number}", number=number)
    assert ranks[0].call("latest", name="rank0") is None
    for rank in ranks:
        rank.send("commit", tag="good")
    assert [rank.receive() for rank in ranks] == [(True, True)] * 2
    ranks[0].call("flush")
    tag, value, listed = ranks[0].call("latest", name="rank1")  # of the other one
    assert (tag, value) == ("good", 1)
    assert listed["files"] == ["rank0", "rank1"]
    assert listed["places"] == ["memory", "storage"]

    for number, rank in enumerate(ranks):
        rank.call("begin", tag="bad", num_of_files=-2)
        rank.call("save", tag="bad", name=f"rank{number}", number=number)
    ranks[1].call("save_what_does_not_pickle", tag="bad")
    for rank in ranks:
        rank.send("commit", tag="bad")
    for rank in ranks:
        succeeded, error = rank.receive()
        assert not succeeded
        assert "rank 1: 'lambda'" in error
    assert ranks[0].call("latest", name="rank0")[0] == "good"

    # One budget: a rank takes what the other leaves.
    for rank in ranks:
        rank.call("init", persistent_storage_path=place, memory_buffer_size=8_000_000)
    ranks[1].call("save", tag="large", name="model", number=7, size=1_600_000)
    tag, value, listed = ranks[0].call("latest", name="model")
    assert (tag, value) == ("large", 7)
    assert "memory" in listed["places"]
    nm.init(place)  # so that the test ends with the memory
    for rank in ranks:
        assert rank.end() == 0


def test_nodes_commit_together(
    start: Callable[..., list[WorkerProcess]], node: Path, tmp_path: Path, server: GCSServer
) -> None:
    """Each daemon stores the parts of its node, and one commit lists them all."""
    elsewhere = node / "other"
    elsewhere.mkdir(mode=0o700)
    ranks = start(2, ("", str(elsewhere)))
    settings = {"persistent_storage_path": "gs://bucket/run", "persistent_time_interval": 1000}
    for number, rank in enumerate(ranks):
        rank.call("init", **settings)
        rank.call("begin", tag="a", num_of_files=-2)
        rank.call("save", tag="a", name=f"rank{number}", number=number)
    for rank in ranks:
        rank.send("commit", tag="a")
    assert [rank.receive() for rank in ranks] == [(True, True)] * 2
    for rank in ranks:
        rank.send("flush")
    assert [rank.receive() for rank in ranks] == [(True, None)] * 2
    latest = [rank.call("latest", name="rank0") for rank in ranks]
    assert [each[:2] for each in latest] == [["a", 0.0]] * 2
    assert verify("gs://bucket/run/a", deep=True).num_objects == 2

    # Not yet persisted: each node has a part of it in memory, and no node all.
    for number, rank in enumerate(ranks):
        rank.call("begin", tag="b", num_of_files=-2)
        rank.call("save", tag="b", name=f"rank{number}", number=number)
    for rank in ranks:
        rank.send("commit", tag="b")
    assert [rank.receive() for rank in ranks] == [(True, True)] * 2
    assert [rank.call("latest", name="rank0")[0] for rank in ranks] == ["a", "a"]
    # The end of the training: every node saves its share of the newest, and ends.
    for rank in ranks:
        rank.send("shutdown")
    assert [rank.receive() for rank in ranks] == [(True, None)] * 2
    for rank in ranks:
        assert rank.end() == 0
    assert verify("gs://bucket/run/b", deep=True).is_valid


def test_a_forked_process_has_a_connection_of_its_own(node: Path, tmp_path: Path) -> None:
    nm.init(tmp_path / "tier3", 0)
    nm.Checkpoint("a").save("x", 1)
    child = os.fork()
    if not child:
        status = 1
        try:
            nm.Checkpoint("b").save("x", 2)
            nm.flush_persistence()  # a newer tag may evict it from memory otherwise
            status = 0 if nm.Checkpoint("b").load("x") == 2 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    nm.Checkpoint("c").save("x", 3)
    assert set(nm.list_checkpoints()) >= {"b", "c"}


def test_a_socket_directory_of_other_users_is_rejected(node: Path, tmp_path: Path) -> None:
    node.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write there"):
        nm.init(tmp_path / "tier3")
    node.chmod(0o700)

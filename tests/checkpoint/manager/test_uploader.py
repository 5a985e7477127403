"""Trainers and their uploaders: a process outlives a trainer, and a trainer outlives it."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import aioflux
from aioflux.checkpoint._save.process_uploader import Inbox, encode, picklable_error, send
from aioflux.errors import CheckpointError, PermissionDeniedError
from tests.checkpoint.manager.trainer import is_state_of, state_of
from tests.checkpoint.manager.worker_process import (
    FAST,
    SLOW,
    Checkpointer,
    Forked,
    Rank,
    find_uploaders,
    is_alive,
    uploader_of,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer
    from tests.checkpoint.manager.worker_process import Forks

URI = "gs://bucket/run"
WRITE = "*insert*"
DATA = "*.distcp"
LONG = 250
"""Seconds for which what is not to be answered is held up."""


@pytest.fixture
def checkpointer(server: GCSServer) -> Iterator[Checkpointer]:
    with Checkpointer(URI, staging="process", retry=FAST, timeouts=SLOW) as checkpointer:
        yield checkpointer


def keys() -> list[str]:
    with aioflux.sync.open_store(URI) as store:
        return [meta.key for meta in store.list("step-")]


def test_saves_and_their_progress_cross_the_border(checkpointer: Checkpointer) -> None:
    state = state_of(1)
    handle = checkpointer.save_async(1, state, {"loss": 0.5})
    state["model"]["cut"].zero_()
    assert handle.result().num_bytes == handle.num_bytes
    assert handle.progress == 1
    assert is_state_of(1, checkpointer.load())
    assert checkpointer.verify(1).metrics == {"loss": 0.5}
    pid = uploader_of(os.getpid())
    checkpointer.save(2, state_of(2))
    assert uploader_of(os.getpid()) == pid
    checkpointer.close()
    assert not is_alive(pid)


def test_errors_and_cancellations_cross_it_too(
    checkpointer: Checkpointer, server: GCSServer
) -> None:
    server.faults.add(WRITE, key="*step-00000001/*" + DATA, status=403)
    with pytest.raises(PermissionDeniedError, match="step-00000001") as caught:
        checkpointer.save(1, state_of(1))
    assert caught.value.status == 403
    server.faults.add(WRITE, key="*step-00000002/*" + DATA, delay_seconds=LONG)
    handle = checkpointer.save_async(2, state_of(2))
    # What comes to the server when its sender has gone would stay.
    wait_until(lambda: server.faults.injected["delay"])
    assert handle.cancel()
    assert keys() == []


def test_a_save_that_was_staged_outlives_its_trainer(forks: Forks, server: GCSServer) -> None:
    rank = Rank(forks, server, 0, 1, "")
    try:
        rank.call("open", uri=URI, staging="process", stubborn=[0])
        rank.call("save", step=1)
        uploader = rank.call("uploader")
        with Checkpointer(URI) as checkpointer:
            with server.faults.inject(WRITE, key=DATA, status=503):
                rank.call("begin", step=2)
                rank.call("begin", step=3)
                rank.kill()
                assert checkpointer.steps() == [1]
            wait_until(lambda: not is_alive(uploader))
            assert checkpointer.steps() == [1, 2, 3]
            assert is_state_of(3, checkpointer.load())
    finally:
        rank.end()


def test_a_trainer_killed_after_a_preparation_leaves_no_process_or_memory(
    forks: Forks, server: GCSServer
) -> None:
    shared = set(Path("/dev/shm").glob("*"))
    rank = Rank(forks, server, 0, 1, "")
    try:
        rank.call("open", uri=URI, staging="process")
        assert rank.call("prepare") == 1
        uploader = rank.call("uploader")
        rank.kill()
        wait_until(lambda: not is_alive(uploader))
        assert not [
            each for each in set(Path("/dev/shm").glob("*")) - shared if "aioflux" in each.name
        ]
    finally:
        rank.end()


@pytest.mark.parametrize("when", ["idle", "uploading"])
def test_an_uploader_that_dies_is_started_again(
    checkpointer: Checkpointer, server: GCSServer, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer.save(1, state_of(1))
    pid = uploader_of(os.getpid())
    if when == "idle":
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        handle = checkpointer.save_async(1, state_of(2))
    else:
        server.faults.add(WRITE, key="*__0_0.distcp", delay_seconds=LONG, times=1)
        handle = checkpointer.save_async(1, state_of(2))
        wait_until(lambda: server.faults.injected["delay"])
        os.kill(pid, signal.SIGKILL)
        handle.result()
        assert "starting 1 saves again" in caplog.text
    handle.result()
    assert uploader_of(os.getpid()) != pid
    assert is_state_of(2, checkpointer.load())
    wait_until(lambda: len(keys()) == 2)  # nothing of the attempt that died


def test_a_save_that_kills_its_uploaders_is_given_up(
    checkpointer: Checkpointer, server: GCSServer
) -> None:
    server.faults.add(WRITE, key=DATA, delay_seconds=LONG)
    handle = checkpointer.save_async(1, state_of(1))
    killed: set[int] = set()
    while not handle.done():
        for pid in {*find_uploaders(os.getpid())} - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        handle.wait(0.05)
    with pytest.raises(CheckpointError, match="4 uploader processes died during its upload"):
        handle.result()
    server.faults.clear()
    checkpointer.save(2, state_of(2))


def test_signals_mean_the_trainer(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, state_of(1))
    pid = uploader_of(os.getpid())
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    checkpointer.save(2, state_of(2))
    assert uploader_of(os.getpid()) == pid


def test_a_trainer_that_ends_without_close_leaves_its_saves_behind(
    forks: Forks, server: GCSServer
) -> None:
    with server.faults.inject(WRITE, key=DATA, status=503):
        trainer = Forked(forks, "leave", server, URI, [1, 2], "process")
        assert trainer.wait() == 0
        trainer.end()
    with Checkpointer(URI) as checkpointer:
        wait_until(lambda: checkpointer.steps() == [1, 2])


def test_a_trainer_that_ends_logs_what_failed(
    forks: Forks, server: GCSServer, tmp_path: Path
) -> None:
    """Where its own thread uploads, too, which it waits for."""
    server.faults.add(WRITE, key="*step-00000001/*" + DATA, status=403)
    errors = tmp_path / "errors"
    # The one that fails comes last: the save after it would raise its error.
    trainer = Forked(forks, "leave", server, URI, [2, 1], "thread", errors=errors)
    assert trainer.wait() == 0
    trainer.end()
    assert "no caller read the error from its handle" in errors.read_text()
    with Checkpointer(URI) as checkpointer:
        assert checkpointer.steps() == [2]


def test_memory_of_another_process_is_refused() -> None:
    with pytest.raises(ValueError, match="only in the memory of this process"):
        Checkpointer("memory://here/run", staging="process")


def test_a_store_that_does_not_pickle_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="holds credentials and cannot be pickled"):
        Checkpointer(URI, staging="process", credentials=lambda: "token")


def test_messages_arrive_whole_and_in_order() -> None:
    here, there = socket.socketpair()
    with here, there:
        read, write = os.pipe()
        send(here, ("arena", 1), [write])
        send(here, ("job", b"x" * 1000))
        inbox = Inbox()
        messages = []
        while len(messages) < 2:
            data, fds, _, _ = socket.recv_fds(there, 7, 4)
            messages += inbox.feed(data, fds)
        assert messages == [("arena", 1), ("job", b"x" * 1000)]
        (fd,) = inbox.fds
        os.write(fd, b"!")
        assert os.read(read, 1) == b"!"
        for each in (fd, read, write):
            os.close(each)
    assert list(Inbox().feed(encode("a") + encode("b")[:-1])) == ["a"]


def test_every_error_crosses() -> None:
    class LocalError(Exception):
        pass

    error = picklable_error(LocalError("here"))
    assert isinstance(error, CheckpointError)
    assert str(error) == "LocalError: here"
    mine = PermissionDeniedError("no", uri="gs://b/k", status=403)
    assert pickle.loads(pickle.dumps(picklable_error(mine))).uri == "gs://b/k"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for shared memory in /proc")
def shared_by(pid: int) -> set[str]:
    """Return the pieces of shared memory that a process has, by the numbers of their files."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:aioflux-staging" in line}


def test_arenas_are_shared_once_and_given_back(checkpointer: Checkpointer) -> None:
    def num_descriptors() -> int:
        gc.collect()
        targets = []
        for each in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # that of this look, and what others close now
                targets.append(str(each.readlink()))
        return sum("memfd:aioflux-staging" in each for each in targets)

    others = shared_by(os.getpid())
    state = {"a": torch.ones(600_000)}
    checkpointer.save(1, state)
    (first,) = shared_by(os.getpid()) - others
    before = num_descriptors()
    for step in (2, 3, 4):
        checkpointer.save(step, state)
    assert shared_by(os.getpid()) - others == {first}
    assert shared_by(uploader_of(os.getpid())) == {first}
    assert num_descriptors() == before
    for size in (2, 3, 4):
        checkpointer.save(9, {"a": torch.ones(size * 600_000)})
    gc.collect()
    (last,) = shared_by(os.getpid()) - others
    assert last != first
    wait_until(lambda: shared_by(uploader_of(os.getpid())) == {last})
    assert num_descriptors() == before


def test_an_arena_is_given_back_after_a_save_that_failed(
    checkpointer: Checkpointer, server: GCSServer
) -> None:
    """The traceback of the error refers to slices of the arena."""
    server.faults.add(WRITE, key="*step-00000001/*" + DATA, status=403)
    others = shared_by(os.getpid())
    with pytest.raises(PermissionDeniedError):
        checkpointer.save(1, {"a": torch.ones(600_000)})
    checkpointer.save(2, {"a": torch.ones(1_200_000)})
    mapped = shared_by(os.getpid()) - others
    assert len(mapped) == 1
    wait_until(lambda: shared_by(uploader_of(os.getpid())) == mapped)


def test_an_uploader_that_cannot_be_started_again_fails_what_waits_for_it(
    checkpointer: Checkpointer, server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer.save(1, state_of(1))
    server.faults.add(WRITE, key="*__0_0.distcp", delay_seconds=LONG, times=1)
    handle = checkpointer.save_async(2, state_of(2))

    def refuse(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        os.kill(uploader_of(os.getpid()), signal.SIGKILL)
        with pytest.raises(CheckpointError, match="no other could be started: too many open files"):
            handle.result()
        again = checkpointer.save_async(3, state_of(3))
        with pytest.raises(CheckpointError, match="no other could be started"):
            again.result()
    server.faults.clear()
    checkpointer.save(4, state_of(4))
    assert is_state_of(4, checkpointer.load())

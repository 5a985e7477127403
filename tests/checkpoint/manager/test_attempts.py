"""A save whose uploader died: what the first attempt did is neither lost nor undone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aioflux
from aioflux.checkpoint._format.commit import SaveFacts, StoredItem, data_key, new_save_id
from aioflux.checkpoint._save.job import GlobalSavePlan, Job, UploadSettings
from aioflux.checkpoint._save.manifests import Manifests
from aioflux.checkpoint._save.save import Save
from aioflux.checkpoint._store import steps as _steps
from aioflux.checkpoint._store.steps import read_commit
from aioflux.errors import CheckpointError, PermissionDeniedError
from tests.checkpoint.manager.worker_process import (
    FAST,
    SLOW,
    Checkpointer,
    uploader_of,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.checkpoint import SaveHandle
    from aioflux.testing import GCSServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for the uploader in /proc")

URI = "gs://bucket/run"
LONG = 250
"""Seconds for which what is not to be answered is held up."""


@pytest.fixture
def checkpointer(server: GCSServer) -> Iterator[Checkpointer]:
    with Checkpointer(URI, staging="process", retry=FAST, timeouts=SLOW) as checkpointer:
        yield checkpointer


def state_of(number: int) -> dict[str, Any]:
    return {"weights": torch.full((8,), float(number)), "number": number}


@contextmanager
def clock_ahead(seconds: int) -> Iterator[None]:
    now = time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now() + seconds * 10**9)
        yield


def save_killed_at(
    checkpointer: Checkpointer, server: GCSServer, key: str, number: int
) -> SaveHandle:
    """Save a step, and kill the uploader once it has written an object, before it knows of that."""
    server.faults.add("*insert*", key=key, delay_seconds=LONG, times=1)
    handle = checkpointer.save_async(1, state_of(number))
    wait_until(lambda: server.faults.injected["delay"])
    os.kill(uploader_of(os.getpid()), signal.SIGKILL)
    return handle


def test_a_step_whose_clock_was_ahead_is_replaced(
    checkpointer: Checkpointer, server: GCSServer
) -> None:
    """What was there is not taken for what an upload that died had committed."""
    with clock_ahead(300):
        checkpointer.save(1, state_of(1))
    save_killed_at(checkpointer, server, "*.distcp", 2).result()
    assert checkpointer.load(1)["number"] == 2


def test_a_commit_that_was_made_is_found(checkpointer: Checkpointer, server: GCSServer) -> None:
    save_killed_at(checkpointer, server, "*step-00000001/.metadata", 1).result()
    assert [each.outcome for each in checkpointer.history()] == ["committed"]
    assert checkpointer.load(1)["number"] == 1


def test_nothing_is_removed_if_it_is_unknown_what_was_committed(
    checkpointer: Checkpointer, server: GCSServer
) -> None:
    checkpointer.save(2, state_of(2))
    server.faults.add("*objects.get", key="*step-00000001/.metadata", status=403, skip=1, times=1)
    handle = save_killed_at(checkpointer, server, "*step-00000001/.metadata", 1)
    with pytest.raises(CheckpointError, match="unknown whether it had committed the step"):
        handle.result()
    assert checkpointer.verify(1, deep=True).is_valid
    assert checkpointer.load(1)["number"] == 1


def test_what_a_commit_names_stays_though_it_was_uploaded_again(server: GCSServer) -> None:
    """The coordinator committed by what the first upload had told, just before the second one."""
    with Checkpointer(URI, retry=FAST) as checkpointer:
        result = checkpointer.save(1, state_of(1))
        # A rank whose second upload found no word of the first: it was committed and removed.
        job = Job(
            facts=SaveFacts(step=1, save_id=result.save_id, world_size=2),
            rank=0,
            started=0.0,
            staged_seconds=0.0,
            attempt=1,
        )

        async def forget() -> list[str]:
            async with aioflux.open_store(URI) as store:
                second = f"step-00000001/{data_key(result.save_id, 0, 1)}"
                await store.put(second, b"again")
                save = Save(store, UploadSettings(), job, memoryview(b""), lambda _: None)
                await save.delete_earlier_attempts()
                return [meta.key for meta in await store.list_all("step-")]

        assert f"step-00000001/{data_key(result.save_id, 0, 0)}" in (left := asyncio.run(forget()))
        assert f"step-00000001/{data_key(result.save_id, 0, 1)}" not in left
        assert checkpointer.verify(1, deep=True).is_valid


async def save_again(monkeypatch: pytest.MonkeyPatch, step: str) -> tuple[Save, bool]:
    """Run the second attempt of a save, which is cancelled in a step after its commit.

    Returns the save, and whether all objects of its commit exist.
    """
    started, goes_on = asyncio.Event(), asyncio.Event()

    async def wait(_: Save) -> None:
        started.set()
        await goes_on.wait()

    monkeypatch.setattr(Save, step, wait)
    job = Job(
        facts=SaveFacts(step=1, save_id=new_save_id(datetime(2026, 1, 1, tzinfo=UTC), "00000001")),
        rank=0,
        arena=1,
        arena_bytes=8,
        items=(StoredItem(0, 8),),
        global_plan=GlobalSavePlan(b"", ((b"",),)),
        started=0.0,
        attempt=1,
    )
    async with aioflux.open_store(f"memory://attempts/{step}") as store:
        save = Save(store, UploadSettings(), job, memoryview(bytes(8)), lambda _: None)
        running = asyncio.create_task(save.run())
        await started.wait()
        running.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        assert (await running).num_bytes == 8
        commit = (await read_commit(store, "step-00000001")).commit
        assert commit is not None
        stored = {meta.key for meta in await store.list_all("step-00000001/")}
        return save, {f"step-00000001/{each.key}" for each in commit.objects} <= stored


@pytest.mark.parametrize("step", ["_after_commit", "delete_earlier_attempts"])
def test_a_cancel_after_the_commit_comes_too_late(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    save, is_whole = asyncio.run(save_again(monkeypatch, step))
    assert is_whole
    assert save.record is not None
    assert save.record.outcome == "committed"


def test_an_error_after_the_commit_deletes_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("after the commit")

    monkeypatch.setattr(Save, "_after_commit", fail)
    with Checkpointer("memory://attempts/run", retry=FAST) as checkpointer:
        with pytest.raises(RuntimeError):
            checkpointer.save(1, state_of(1))
        assert checkpointer.verify(1, deep=True).is_valid


def test_what_cannot_be_pruned_does_not_fail_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("no permission")

    monkeypatch.setattr("aioflux.checkpoint._save.save.prune", fail)
    with Checkpointer("memory://attempts/pruned", retry=FAST, keep_last=1) as checkpointer:
        checkpointer.save(1, state_of(1))
        assert checkpointer.verify(1, deep=True).is_valid


def test_a_failed_roll_back_keeps_the_error_of_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr("aioflux.checkpoint._save.save.write_object", fail)
    monkeypatch.setattr(Save, "_roll_back", fail)
    with Checkpointer("memory://attempts/undone", retry=FAST) as checkpointer:
        with pytest.raises(OSError, match="read-only") as caught:
            checkpointer.save(1, state_of(1))
        assert any("aioflux clean" in note for note in caught.value.__notes__)


def fail_commits(monkeypatch: pytest.MonkeyPatch, error: Exception, *, is_done: bool) -> None:
    """Have writes of commit objects fail, after they were carried out if `is_done`."""
    put = aioflux.Store.put

    async def fail(self: aioflux.Store, key: str, *args: Any, **options: Any) -> Any:
        is_commit = key.endswith(".metadata")
        meta = await put(self, key, *args, **options) if is_done or not is_commit else None
        if is_commit:
            raise error
        return meta

    monkeypatch.setattr(aioflux.Store, "put", fail)


def test_an_error_of_any_class_after_the_commit_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_commits(monkeypatch, LookupError("no token for another attempt"), is_done=True)
    with Checkpointer("memory://attempts/token", retry=FAST) as checkpointer:
        checkpointer.save(1, state_of(1))
        assert checkpointer.verify(1, deep=True).is_valid


def test_the_data_stays_if_the_commit_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no token")

    uri = "memory://attempts/unread"
    with Checkpointer(uri, retry=FAST) as checkpointer, pytest.MonkeyPatch.context() as patch:
        fail_commits(patch, ConnectionError("no token"), is_done=True)
        read = _steps.read_commits
        answers = iter([read])
        patch.setattr(_steps, "read_commits", lambda *args: next(answers, fail)(*args))
        with pytest.raises(CheckpointError, match="unknown whether"):
            checkpointer.save(1, state_of(1))
    with Checkpointer(uri, retry=FAST) as checkpointer:
        assert checkpointer.verify(1, deep=True).is_valid


@pytest.mark.parametrize("maybe_done", [True, False])
def test_a_refused_commit_that_may_be_done_keeps_the_data(
    monkeypatch: pytest.MonkeyPatch, maybe_done: bool
) -> None:
    error = PermissionDeniedError("HTTP 403", maybe_done=maybe_done)
    fail_commits(monkeypatch, error, is_done=False)
    uri = f"memory://attempts/refused-{maybe_done}"
    expected = CheckpointError if maybe_done else PermissionDeniedError
    with Checkpointer(uri, retry=FAST) as checkpointer, pytest.raises(expected):
        checkpointer.save(1, state_of(1))
    with aioflux.sync.open_store(uri) as store:
        assert any("distcp" in meta.key for meta in store.list()) == maybe_done


@pytest.mark.parametrize("maybe_done", [True, False])
def test_a_manifest_that_may_be_written_is_reported(
    monkeypatch: pytest.MonkeyPatch, maybe_done: bool
) -> None:
    """The coordinator may commit what it lists, so this rank waits, and deletes nothing."""

    async def refuse(*_: Any) -> None:
        raise PermissionDeniedError("HTTP 403", maybe_done=maybe_done)

    monkeypatch.setattr(Manifests, "write", refuse)

    async def report() -> bool:
        async with aioflux.open_store("memory://attempts/manifest") as store:
            facts = SaveFacts(step=1, save_id=new_save_id(datetime.now(UTC), "1"), world_size=2)
            job = Job(
                facts=facts,
                rank=1,
                arena=1,
                arena_bytes=8,
                items=(StoredItem(0, 8),),
                global_plan=None,
                started=time.time(),
                attempt=0,
                staged_seconds=0.0,
            )
            save = Save(store, UploadSettings(), job, memoryview(b""), lambda _: None)
            return await save._report(Manifests(store, UploadSettings(), job), ())

    if maybe_done:
        assert asyncio.run(report()) is False
    else:
        with pytest.raises(PermissionDeniedError):
            asyncio.run(report())

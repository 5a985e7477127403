"""A save whose upload died and is begun anew: what the first one did is neither lost nor undone."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aioflux
from aioflux import RetryPolicy
from aioflux.checkpoint import Checkpointer, SaveHandle, _checkpointer
from aioflux.checkpoint._format.commit import data_key
from aioflux.checkpoint._save.commit_protocol import Save
from aioflux.checkpoint._save.job import Job, UploadSettings
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aioflux.testing import GCSServer

URI = "gs://bucket/run"
FAST = RetryPolicy(max_attempts=2, initial_seconds=0.01)


def state_of(number: int) -> dict[str, Any]:
    return {"weights": torch.full((8,), float(number)), "number": number}


@contextmanager
def clock_ahead(seconds: int) -> Iterator[None]:
    now = time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checkpointer.time, "time_ns", lambda: now() + seconds * 10**9)
        yield


@contextmanager
def begun_anew(checkpointer: Checkpointer, between: Callable[[], object] | None) -> Iterator[None]:
    """Hand saves over as those that an uploader died of.

    Args:
        checkpointer: Of the saves.
        between: Called when the first upload has committed; None where it had not begun.
    """
    submit = checkpointer._uploader.submit

    def again(job: Job, arena: Any, handle: SaveHandle) -> None:
        if between is not None:
            first = SaveHandle(job.step, job.num_bytes)
            submit(job, arena, first)
            first.result()
            between()
        submit(replace(job, attempt=1), arena, handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer._uploader, "submit", again)
        yield


def test_a_step_whose_clock_was_ahead_is_replaced(server: GCSServer) -> None:
    """What was there is not taken for what an upload that died had committed."""
    with Checkpointer(URI, retry=FAST) as checkpointer:
        with clock_ahead(300):
            checkpointer.save(1, state_of(1))
        with begun_anew(checkpointer, None):
            checkpointer.save(1, state_of(2))
        assert checkpointer.load(1)["number"] == 2


def test_a_commit_that_was_made_is_found(server: GCSServer) -> None:
    with Checkpointer(URI, retry=FAST) as checkpointer:
        with begun_anew(checkpointer, lambda: None):
            checkpointer.save(1, state_of(1))
        assert [each.outcome for each in checkpointer.history()] == ["committed"]
        assert checkpointer.load(1)["number"] == 1


def test_nothing_is_removed_where_nobody_can_tell_what_was_committed(server: GCSServer) -> None:
    with Checkpointer(URI, retry=FAST) as checkpointer:

        def refuse() -> None:
            server.faults.add("*objects.get", key="*.metadata", status=403, times=1)

        with (
            begun_anew(checkpointer, refuse),
            pytest.raises(CheckpointError, match="whether it had committed it"),
        ):
            checkpointer.save(1, state_of(1))
        assert checkpointer.verify(1, deep=True).is_valid
        assert checkpointer.load(1)["number"] == 1


def test_what_a_commit_names_stays_though_it_was_uploaded_again(server: GCSServer) -> None:
    """The coordinator committed by what the first upload had told, just before the second one."""
    with Checkpointer(URI, retry=FAST) as checkpointer:
        result = checkpointer.save(1, state_of(1))
        # A rank whose second upload found no word of the first: it was committed and removed.
        job = Job(
            step=1, save_id=result.save_id, rank=0, world_size=2, arena=0, size=0, tail=(),
            items=(), element_sizes=(), whole=None, metrics={}, begun=0.0, staged_seconds=0.0,
            attempt=1,
        )  # fmt: skip

        async def forget() -> list[str]:
            async with aioflux.open_store(URI) as store:
                second = f"step-00000001/{data_key(result.save_id, 0, 1)}"
                await store.put(second, b"again")
                save = Save(store, UploadSettings(), job, memoryview(b""), lambda _: None)
                await save._forget_attempts()
                return [meta.key for meta in await store.list_all("step-")]

        assert f"step-00000001/{data_key(result.save_id, 0, 0)}" in (left := asyncio.run(forget()))
        assert f"step-00000001/{data_key(result.save_id, 0, 1)}" not in left
        assert checkpointer.verify(1, deep=True).is_valid

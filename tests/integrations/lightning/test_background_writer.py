"""Saving in the background: order, back-pressure, and errors that surface."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aioflux
from aioflux import RetryPolicy
from aioflux.integrations.lightning import AiofluxCheckpointIO
from aioflux.integrations.lightning._background_writer import BackgroundWriter
from aioflux.integrations.lightning._serialized_copy import MemoryPool, SerializedCopy

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.testing import GCSServer

OLD, NEW = "gs://bucket/run/old.ckpt", "gs://bucket/run/new.ckpt"
KEEP_TRYING = RetryPolicy(max_attempts=10_000, initial_seconds=0.01, max_seconds=0.02)


def failing(message: str = "no room") -> Callable[[], None]:
    def work() -> None:
        raise OSError(message)

    return work


def test_work_runs_in_the_order_of_submission() -> None:
    background, done = BackgroundWriter(max_pending=9), []
    for number in range(3):
        background.write(f"gs://b/{number}", lambda number=number: done.append(("write", number)))
        background.remove(f"gs://b/{number}", lambda number=number: done.append(("remove", number)))
    background.close()
    assert done == [(kind, number) for number in range(3) for kind in ("write", "remove")]


def test_another_write_waits_for_a_slot() -> None:
    background, gate = BackgroundWriter(max_pending=2), Event()
    with ThreadPoolExecutor(1) as other:
        background.write("gs://b/1", gate.wait)
        background.wait_for_slot()
        background.write("gs://b/2", gate.wait)
        background.remove("gs://b/0", gate.wait)  # takes no memory, and no slot
        waiting = other.submit(background.wait_for_slot)
        assert not waiting.done()
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        gate.set()
        waiting.result(30)
    background.close()


def test_a_failed_write_keeps_what_it_was_to_replace(caplog: pytest.LogCaptureFixture) -> None:
    background, removed = BackgroundWriter(max_pending=9), []
    background.write("gs://b/new", failing())
    background.remove("gs://b/old", lambda: removed.append("old"))
    background.write("gs://b/newer", lambda: None)
    background.remove("gs://b/older", lambda: removed.append("older"))
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="no room"):
        background.wait()
    assert removed == ["older"]
    assert "gs://b/new could not be stored: no room" in caplog.text
    assert "gs://b/old is kept" in caplog.text
    background.close()  # raised once


def test_errors_surface_at_the_next_save_and_at_the_end_with_those_that_followed() -> None:
    background = BackgroundWriter(max_pending=9)
    background.write("gs://b/1", failing("first"))
    background.write("gs://b/2", failing("second"))
    with pytest.raises(OSError, match="first") as caught:
        background.wait()
    assert any("second" in note for note in caught.value.__notes__)
    background.write("gs://b/3", failing("third"))
    with pytest.raises(OSError, match="third"):
        background.close()
    background.write("gs://b/4", failing("fourth"))
    while background.is_pending("gs://b/4"):
        time.sleep(0.001)
    with ThreadPoolExecutor(1) as other, pytest.raises(OSError, match="fourth"):
        other.submit(background.wait_for_slot).result(30)


def test_a_removal_that_fails_is_raised() -> None:
    background = BackgroundWriter(max_pending=1)
    background.write("gs://b/new", lambda: None)
    background.remove("gs://b/old", failing("forbidden"))
    with pytest.raises(OSError, match="forbidden"):
        background.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_thread() -> None:
    """The thread of the parent does not run there."""
    background, gate = BackgroundWriter(max_pending=1), Event()
    background.write("gs://b/1", gate.wait)
    child = os.fork()
    if not child:
        background.write("gs://b/2", lambda: None)
        background.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    gate.set()
    background.close()


def test_a_checkpoint_is_stored_as_it_was_when_it_was_saved(server: GCSServer) -> None:
    """Tensors, what shares their memory, and plain objects."""
    plugin = AiofluxCheckpointIO(background=True, retry=KEEP_TRYING)
    weight = torch.zeros(100, 100)
    state: dict[str, Any] = {"weight": weight, "tied": weight[:10], "losses": [1.0]}
    with server.faults.inject("*insert*", status=503):
        plugin.save_checkpoint(state, NEW)
        weight += 1
        state["losses"].append(2.0)
        assert server.keys("bucket") == []
        assert plugin.exists(NEW)
    loaded = plugin.load_checkpoint(NEW)  # waits for it
    assert not loaded["weight"].any()
    assert loaded["losses"] == [1.0]
    loaded["tied"] += 5
    assert (loaded["weight"][:10] == 5).all()
    plugin.teardown()


def test_an_object_that_cannot_be_pickled_fails_its_save(server: GCSServer) -> None:
    plugin = AiofluxCheckpointIO(background=True)
    with pytest.raises(AttributeError, match="local object"):
        plugin.save_checkpoint({"hook": lambda: None}, NEW)
    plugin.teardown()
    assert server.keys("bucket") == []


def test_memory_is_reused() -> None:
    memory = MemoryPool()
    first = SerializedCopy.of({"weight": torch.ones(10_000_000)}, memory)
    assert first.num_bytes > 40_000_000
    slabs = {id(view.obj) for view in first.views()}
    first.release()
    second = SerializedCopy.of({"weight": torch.ones(10_000_000)}, memory)
    assert {id(view.obj) for view in second.views()} == slabs
    joined = b"".join(second.views())
    assert len(joined) == second.num_bytes
    assert joined[:4] == b"PK\x03\x04"


def test_a_failed_save_is_raised_at_the_end_and_the_older_checkpoint_stays(
    server: GCSServer,
) -> None:
    plugin = AiofluxCheckpointIO(background=True)
    plugin.save_checkpoint({"step": 1}, OLD)
    plugin.wait()
    with server.faults.inject("*insert*", status=403):
        plugin.save_checkpoint({"step": 2}, NEW)
        plugin.remove_checkpoint(OLD)
        with pytest.raises(aioflux.PermissionDeniedError, match=NEW):
            plugin.teardown()
    assert server.keys("bucket") == ["run/old.ckpt"]
    plugin.save_checkpoint({"step": 2}, NEW)
    plugin.remove_checkpoint(OLD)
    plugin.teardown()
    assert server.keys("bucket") == ["run/new.ckpt"]


def test_a_copy_on_the_service_waits_for_earlier_saves(server: GCSServer) -> None:
    plugin = AiofluxCheckpointIO(background=True)
    plugin.save_checkpoint({"step": 1}, OLD)
    plugin.copy_checkpoint(OLD, NEW)
    plugin.remove_checkpoint(OLD)
    assert plugin.load_checkpoint(NEW) == {"step": 1}
    plugin.teardown()
    assert server.keys("bucket") == ["run/new.ckpt"]
    assert server.stats.operation("objects.insert").requests == 1
    plugin.copy_checkpoint(OLD, NEW)
    with pytest.raises(aioflux.NotFoundError, match="old"):
        plugin.wait()
    plugin.copy_checkpoint("gs://elsewhere/run/old.ckpt", NEW)
    with pytest.raises(ValueError, match="within its bucket"):
        plugin.wait()

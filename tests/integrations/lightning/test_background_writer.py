"""Saving in the background: order, back-pressure, and errors that surface."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aioflux
from aioflux import RetryPolicy
from aioflux.integrations.lightning import AiofluxCheckpointIO
from tests.integrations.lightning.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aioflux.testing import GCSServer

OLD, NEW = "gs://bucket/run/old.ckpt", "gs://bucket/run/new.ckpt"
KEEP_TRYING = RetryPolicy(max_attempts=10_000, initial_seconds=0.01, max_seconds=0.02)


@pytest.fixture
def plugin(server: GCSServer) -> AiofluxCheckpointIO:
    return AiofluxCheckpointIO(background=True, max_pending=9, retry=KEEP_TRYING)


@contextmanager
def stalled(server: GCSServer, refused: str) -> Iterator[None]:
    """Store nothing until the block ends, and the keys of a pattern not then either."""
    with server.faults.inject("*insert*", status=503):
        server.faults.add("*insert*", status=403, key=refused)
        yield


def test_work_runs_in_the_order_of_submission(
    server: GCSServer, plugin: AiofluxCheckpointIO
) -> None:
    watch = Watch(server)
    for step in range(3):
        plugin.save_checkpoint({"step": step}, f"gs://bucket/{step}")
        plugin.remove_checkpoint(f"gs://bucket/{step - 1}")
    plugin.teardown()
    assert watch.seen == [set(), {"0"}, {"0", "1"}, {"1"}, {"1", "2"}, {"2"}]


def test_another_save_waits_for_a_slot(server: GCSServer) -> None:
    plugin = AiofluxCheckpointIO(background=True, max_pending=2, retry=KEEP_TRYING)
    with ThreadPoolExecutor(1) as other:
        with server.faults.inject("*insert*", status=503):
            plugin.save_checkpoint({"step": 1}, OLD)
            plugin.remove_checkpoint("gs://bucket/run/older.ckpt")  # takes no memory, and no slot
            plugin.save_checkpoint({"step": 2}, NEW)
            waiting = other.submit(plugin.save_checkpoint, {"step": 3}, NEW)
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
        waiting.result(30)
    plugin.teardown()
    assert plugin.load_checkpoint(NEW) == {"step": 3}


def test_a_failed_save_keeps_the_checkpoint_that_it_was_to_replace(
    server: GCSServer, plugin: AiofluxCheckpointIO, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.save_checkpoint({"step": 1}, OLD)
    plugin.wait()
    with stalled(server, "run/new.ckpt"):
        plugin.save_checkpoint({"step": 2}, NEW)
        plugin.remove_checkpoint(OLD)
        plugin.save_checkpoint({"step": 3}, "gs://bucket/run/newer.ckpt")
        plugin.save_checkpoint({"step": 4}, "gs://bucket/run/newest.ckpt")
        plugin.remove_checkpoint("gs://bucket/run/newer.ckpt")
    with caplog.at_level(logging.WARNING), pytest.raises(PermissionError, match=NEW):
        plugin.wait()
    assert server.keys("bucket") == ["run/newest.ckpt", "run/old.ckpt"]
    assert f"{NEW} could not be stored" in caplog.text
    assert f"{OLD} is not removed" in caplog.text
    plugin.teardown()  # raised once


def test_errors_surface_at_the_next_save_and_at_the_end_with_those_that_followed(
    server: GCSServer, plugin: AiofluxCheckpointIO
) -> None:
    with stalled(server, "refused/*"):
        plugin.save_checkpoint({}, "gs://bucket/refused/1")
        plugin.save_checkpoint({}, "gs://bucket/refused/2")
    with pytest.raises(PermissionError, match="refused/1") as caught:
        plugin.wait()
    assert any("refused/2" in note for note in caught.value.__notes__)
    plugin.save_checkpoint({}, "gs://bucket/refused/3")
    while plugin.exists("gs://bucket/refused/3"):  # pending
        time.sleep(0.001)
    with pytest.raises(PermissionError, match="refused/3"):
        plugin.save_checkpoint({}, NEW)
    plugin.save_checkpoint({}, "gs://bucket/refused/4")
    with pytest.raises(PermissionError, match="refused/4"):
        plugin.teardown()


def test_a_removal_that_fails_is_raised(server: GCSServer, plugin: AiofluxCheckpointIO) -> None:
    with server.faults.inject("objects.delete", status=403):
        plugin.save_checkpoint({"step": 1}, OLD)
        plugin.remove_checkpoint(OLD)
        with pytest.raises(PermissionError, match=OLD):
            plugin.teardown()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_thread(server: GCSServer) -> None:
    plugin = AiofluxCheckpointIO(background=True, retry=KEEP_TRYING)
    with server.faults.inject("*insert*", status=503, key="run/new.ckpt"):
        plugin.save_checkpoint({"step": 2}, NEW)
        child = os.fork()
        if not child:
            plugin.save_checkpoint({"step": 1}, OLD)
            plugin.teardown()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert server.keys("bucket") == ["run/old.ckpt"]
    plugin.teardown()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_save_after_the_end_of_training_is_whole_when_its_process_ends(tmp_path: Path) -> None:
    """Lightning returns weights from forked processes in such a file."""
    plugin = AiofluxCheckpointIO(background=True)
    plugin.teardown()
    path, weight = tmp_path / "weights.ckpt", torch.arange(1_000_000)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=plugin.save_checkpoint, args=({"weight": weight}, path))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert torch.equal(plugin.load_checkpoint(path)["weight"], weight)


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
    with pytest.raises(TypeError, match="'hook' cannot be pickled"):
        plugin.save_checkpoint({"hook": lambda: None}, NEW)
    plugin.teardown()
    assert server.keys("bucket") == []


def test_memory_is_reused(server: GCSServer, plugin: AiofluxCheckpointIO) -> None:
    state = {"weight": torch.ones(10_000_000)}
    plugin.save_checkpoint({"step": 0}, "gs://bucket/run/first.ckpt")
    plugin.save_checkpoint(state, OLD)
    plugin.wait()
    # The upload waits for the removal: the copy is complete, and still in memory.
    with server.faults.inject("objects.delete", status=503):
        plugin.remove_checkpoint("gs://bucket/run/first.ckpt")
        tracemalloc.start()
        try:
            plugin.save_checkpoint(state, NEW)
            num_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert server.keys("bucket") == ["run/first.ckpt", "run/old.ckpt"]
    assert num_bytes < 10_000_000 < len(server.get("bucket", "run/old.ckpt"))
    plugin.teardown()
    assert len(server.get("bucket", "run/new.ckpt")) > 40_000_000


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

"""The checkpoint engine by its interface, on one rank and on two."""

from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aioflux
from aioflux.checkpoint import load, verify
from aioflux.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
)
from aioflux.integrations.deepspeed import AiofluxCheckpointEngine, attach
from tests.integrations.deepspeed import rank_task
from tests.integrations.deepspeed.fake_engine import CommitInfo, Engine
from tests.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aioflux.testing import GCSServer

URI = "gs://bucket/run"


@pytest.fixture
def engine(server: GCSServer) -> Iterator[Engine]:
    torch.set_num_threads(1)
    engine = Engine()
    attach(engine)
    yield engine
    engine.checkpoint_engine.cleanup()


def save(engine: Engine, tag: str, number: float) -> None:
    engine.number = number
    engine.save_checkpoint(URI, tag)


def restored(engine: Engine, tag: str | None = None) -> float:
    engine.number = -1
    original = engine._tensor
    engine._tensor = lambda: torch.full((20_000,), engine.number)  # type: ignore[method-assign]
    path, _ = engine.load_checkpoint(URI, tag)
    engine._tensor = original  # type: ignore[method-assign]
    assert path is not None
    assert path.startswith(f"{URI}/global_step")
    return engine.number


def latest() -> str:
    with aioflux.sync.open_store(URI) as store:
        return store.get("latest").decode()


def test_a_uri_is_saved_to_and_loaded_from(engine: Engine) -> None:
    for number in (1, 2):
        save(engine, f"global_step{number}", number)
    assert latest() == "global_step2"
    assert restored(engine) == 2
    assert restored(engine, "global_step1") == 1
    assert verify(f"{URI}/global_step2", deep=True).is_valid


def test_a_new_process_loads_what_another_saved(engine: Engine) -> None:
    save(engine, "global_step7", 7)
    other = Engine()
    attach(other)
    assert restored(other) == 7
    other.checkpoint_engine.cleanup()


def test_a_directory_is_saved_to_and_loaded_from(engine: Engine, tmp_path: Path) -> None:
    engine.number = 3
    engine.save_checkpoint(str(tmp_path), "a")
    assert (tmp_path / "latest").read_text() == "a"
    path, _ = engine.load_checkpoint(str(tmp_path))
    assert path == str(tmp_path / "a" / "mp_rank_00_model_states.pt")
    assert verify(f"file://{tmp_path}/a", deep=True).is_valid


def test_a_part_of_deepspeed_itself_is_loaded(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    torch.save({"x": 1}, tmp_path / "a" / "part.pt")
    assert engine.checkpoint_engine.load(str(tmp_path / "a" / "part.pt")) == {"x": 1}


def test_a_model_of_16_bits_is_an_object_of_its_own(engine: Engine) -> None:
    engine.number = 5
    assert engine.save_16bit_model(URI, "model.bin")
    assert float(load(f"{URI}/model.bin")["w"][0]) == 5
    with aioflux.sync.open_store(URI) as store:
        assert [meta.key for meta in store.list()] == ["model.bin"]


def test_a_save_that_fails_leaves_latest_and_the_tag_as_they_were(
    engine: Engine, server: GCSServer
) -> None:
    save(engine, "global_step1", 1)
    engine.fails = True
    with pytest.raises(CheckpointError, match="lambda"):
        save(engine, "global_step1", 2)
    engine.fails = False
    assert latest() == "global_step1"
    assert restored(engine) == 1
    save(engine, "global_step1", 3)
    assert restored(engine) == 3


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_a_save_that_fails_between_two_parts_is_not_committed(
    server: GCSServer, is_decoupled: bool
) -> None:
    """The engine does not see an exception of DeepSpeed itself."""
    engine = Engine()
    ours = attach(engine, decoupled=is_decoupled)
    engine.breaks_off = True
    with pytest.raises(MemoryError):
        save(engine, "global_step1", 1)
    engine.breaks_off = False
    if is_decoupled:
        with pytest.raises(CheckpointError, match=r"global_step1 was not saved.*gathering"):
            save(engine, "global_step2", 2)
    save(engine, "global_step2", 2)
    ours.cleanup()
    with aioflux.sync.open_store(URI) as store:
        assert store.get("latest") == b"global_step2"
        assert not store.list_all("global_step1/")


def test_a_checkpoint_that_was_not_committed_is_deleted_at_the_end(server: GCSServer) -> None:
    engine = AiofluxCheckpointEngine()
    directory = engine.placeholders.directory_of(URI)
    engine.create(CommitInfo("a", directory, True))
    engine.save({"x": 1}, f"{directory}/a/x.pt")
    engine.cleanup()
    with aioflux.sync.open_store(URI) as store:
        assert not store.list_all()


def test_a_tag_may_have_slashes(engine: Engine) -> None:
    save(engine, "global_step1/best", 1)
    assert restored(engine) == 1


@pytest.mark.parametrize("tag", ["..", "../../x", "."])
def test_a_tag_is_below_its_directory(engine: Engine, tag: str) -> None:
    with pytest.raises(CheckpointError, match="not below"):
        save(engine, tag, 1)
    with aioflux.sync.open_store(URI) as store:
        assert not store.list_all()


def test_a_damaged_tag_is_rejected(engine: Engine, server: GCSServer) -> None:
    save(engine, "global_step1", 1)
    with aioflux.sync.open_store(URI) as store:
        (part,) = [meta for meta in store.list() if "part-mp_rank" in meta.key]
        store.delete(part)
    with pytest.raises(CheckpointCorruptError, match="not complete"):
        restored(engine)


def test_a_missing_tag_or_part_is_named(engine: Engine) -> None:
    assert engine.load_checkpoint(URI) == (None, None)  # as DeepSpeed says it
    with pytest.raises(CheckpointError, match=f"there is no checkpoint .nothing. at {URI}"):
        restored(engine, "nothing")
    save(engine, "global_step1", 1)
    shadow = engine.checkpoint_engine.placeholders.directory_of(URI)
    with pytest.raises(CheckpointNotFoundError, match="the tag has mp_rank"):
        engine.checkpoint_engine.load(f"{shadow}/global_step1/other.pt")
    with aioflux.sync.open_store(URI) as store:
        store.put("latest", b"gone")
    with pytest.raises(CheckpointError, match="latest names it"):
        restored(engine)


def test_work_that_deepspeed_does_itself_is_rejected(engine: Engine) -> None:
    save(engine, "global_step1", 1)
    engine.stage = 3
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        engine.load_checkpoint(URI, load_optimizer_states=False)
    engine.is_universal = True
    with pytest.raises(CheckpointError, match="universal"):
        engine.load_checkpoint(URI)
    nvme = Engine()
    nvme.has_nvme = True
    with pytest.raises(CheckpointError, match="NVMe"):
        attach(nvme)
    with pytest.raises(CheckpointError, match="already"):
        attach(engine)


def test_a_uri_without_a_slash_is_rejected(engine: Engine) -> None:
    with pytest.raises(ValueError, match="pass it as a string"):
        engine.save_checkpoint("gs:/bucket/run", "a")


def test_an_engine_that_is_not_attached_rejects_uris() -> None:
    engine = AiofluxCheckpointEngine()
    with pytest.raises(CheckpointError, match=r"attach\(engine\)"):
        engine.makedirs(URI, exist_ok=True)
    with pytest.raises(CheckpointError, match="call create first"):
        engine.save({}, "/tmp/a/b")
    with pytest.raises(CheckpointError, match="call create first"):
        engine.commit(CommitInfo("a", "/tmp/a", True))
    with pytest.raises(ValueError, match="commit_seconds"):
        AiofluxCheckpointEngine(commit_seconds=0)


def test_placeholders_are_removed_with_the_engine(server: GCSServer) -> None:
    engine = Engine()
    attach(engine)
    engine.save_checkpoint(URI, "a")
    directory = engine.checkpoint_engine.placeholders.directory_of(URI)
    assert os.path.isdir(directory)
    engine.checkpoint_engine.cleanup()
    assert not os.path.exists(directory)


def test_a_decoupled_save_is_committed_after_the_step_in_which_it_ends(
    server: GCSServer,
) -> None:
    engine = Engine()
    attach(engine, decoupled=True)
    engine.number = 1
    engine.save_checkpoint(URI, "global_step1")
    engine.number = 2  # training goes on
    deadline = time.monotonic() + 120
    while engine.checkpoint_engine.pending is not None:
        assert time.monotonic() < deadline, "it was not committed"
        time.sleep(0.01)
        engine.step()
    assert latest() == "global_step1"
    assert restored(engine) == 1
    engine.number = 3
    engine.save_checkpoint(URI, "global_step3")
    engine.number = 4
    engine.save_checkpoint(URI, "global_step4")  # commits the one before
    assert latest() == "global_step3"
    engine.checkpoint_engine.cleanup()
    assert latest() == "global_step4"


def test_two_ranks_commit_together_or_not_at_all(server: GCSServer) -> None:
    with tempfile.TemporaryDirectory(prefix="ds-") as rendezvous:
        group = {"world_size": 2, "rendezvous": f"{rendezvous}/meet"}
        ranks = [WorkerProcess(rank_task.open_worker, rank=rank, **group) for rank in range(2)]

        def call(command: str, **arguments: Any) -> list[tuple[bool, Any]]:
            for rank in ranks:
                rank.send(command, **arguments)
            return [rank.receive() for rank in ranks]

        try:
            assert [rank.receive() for rank in ranks] == [(True, "ready")] * 2
            assert call("attach") == [(True, None)] * 2
            assert call("save", save_dir=URI, tag="one", number=1) == [(True, True)] * 2
            assert latest() == "one"
            # A rank that fails fails the save on all, and `latest` stays.
            ranks[0].send("save", save_dir=URI, tag="two", number=2)
            ranks[1].send("save", save_dir=URI, tag="two", number=2, fails=True)
            for succeeded, error in [rank.receive() for rank in ranks]:
                assert not succeeded
                assert "CheckpointError: two was not saved to gs://bucket/run" in error
                assert "optim_states.pt" in error
            assert latest() == "one"
            with aioflux.sync.open_store(URI) as store:
                assert not [meta.key for meta in store.list("two/")]
            loaded = call("load", load_dir=URI)
            assert loaded == [(True, [f"{URI}/one/mp_rank_00_model_states.pt", 1.0])] * 2
            assert call("attach", decoupled=True) == [(True, None)] * 2
            assert call("save", save_dir=URI, tag="three", number=3) == [(True, True)] * 2
            assert call("cleanup") == [(True, None)] * 2
            assert latest() == "three"
        finally:
            statuses = [rank.end() for rank in ranks]
        assert statuses == [0, 0]

"""AiofluxCheckpointIO alone, without a trainer."""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aioflux
from aioflux import RetryPolicy
from aioflux.integrations.lightning import AiofluxCheckpointIO
from tests.integrations.lightning.watch import Watch

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

URI = "gs://bucket/run/last.ckpt"
KEEP_TRYING = RetryPolicy(max_attempts=10_000, initial_seconds=0.01, max_seconds=0.02)


def state(step: int = 1) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((1000,), float(step))}, "global_step": step}


def stored(server: GCSServer, key: str = "run/last.ckpt") -> int:
    """The step of a checkpoint, read directly from the server."""
    data = server.get("bucket", key)
    with open(memfd(data), "rb") as file:
        return torch.load(file)["global_step"]


def memfd(data: bytes) -> int:
    descriptor = os.memfd_create("checkpoint")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class Custom:
    pass


@pytest.mark.parametrize("is_background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("place", ["gs", "uri", "path", "relative"])
def test_a_checkpoint_comes_back(
    server: GCSServer,
    is_background: bool,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = {
        "gs": URI,
        "uri": f"file://{tmp_path}/run/last.ckpt",
        "path": tmp_path / "run" / "last.ckpt",
        "relative": "run/last.ckpt",
    }[place]
    plugin = AiofluxCheckpointIO(background=is_background)
    plugin.save_checkpoint(state(7), path)
    loaded = plugin.load_checkpoint(path)
    assert torch.equal(loaded["state_dict"]["weight"], torch.full((1000,), 7.0))
    assert plugin.exists(path)
    plugin.remove_checkpoint(path)
    plugin.remove_checkpoint(path)
    plugin.teardown()
    assert not plugin.exists(path)
    with pytest.raises(FileNotFoundError, match=r"last\.ckpt"):
        plugin.load_checkpoint(path)
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_a_uri_without_a_slash_is_rejected() -> None:
    plugin = AiofluxCheckpointIO()
    with pytest.raises(ValueError, match=r"uri 'gs:/bucket/run/last\.ckpt'"):
        plugin.save_checkpoint(state(), Path(URI))
    with pytest.raises(ValueError, match="FSDPStrategy"):
        plugin.load_checkpoint(Path(URI))


def test_weights_only_is_passed_to_torch(server: GCSServer) -> None:
    plugin = AiofluxCheckpointIO()
    plugin.save_checkpoint({"custom": Custom()}, URI)
    assert isinstance(plugin.load_checkpoint(URI, weights_only=False)["custom"], Custom)
    for value in (True, None):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            plugin.load_checkpoint(URI, weights_only=value)


def test_tensors_are_loaded_to_host_memory_by_default(server: GCSServer) -> None:
    """A checkpoint of an accelerator that this host does not have."""
    registry = torch.serialization._package_registry
    entry = (0, lambda _: "cuda:0", lambda *_: None)
    registry.insert(0, entry)
    try:
        plugin = AiofluxCheckpointIO()
        plugin.save_checkpoint(state(3), URI)
    finally:
        registry.remove(entry)
    assert plugin.load_checkpoint(URI)["state_dict"]["weight"].device.type == "cpu"
    moved = plugin.load_checkpoint(URI, map_location="meta")
    assert moved["state_dict"]["weight"].device.type == "meta"


def test_storage_options_apply_to_one_save(server: GCSServer) -> None:
    plugin = AiofluxCheckpointIO()
    plugin.save_checkpoint(state(1), URI, storage_options={"metadata": {"run": "7"}})
    with aioflux.sync.open_store("gs://bucket") as store:
        assert store.head("run/last.ckpt").metadata == {"run": "7"}
    with pytest.raises(aioflux.AlreadyExistsError):
        plugin.save_checkpoint(state(2), URI, storage_options={"mode": "create"})
    assert stored(server) == 1
    with pytest.raises(TypeError, match="has no option threads; its options are credentials"):
        plugin.save_checkpoint(state(), URI, storage_options={"threads": 4})
    with pytest.raises(TypeError, match="must be a mapping"):
        plugin.save_checkpoint(state(), URI, storage_options=4)


def test_settings_without_effect_are_rejected() -> None:
    with pytest.raises(TypeError, match="has no option bucket"):
        AiofluxCheckpointIO(bucket="b")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no effect without background"):
        AiofluxCheckpointIO(max_pending=2)
    with pytest.raises(ValueError, match="max_pending must be"):
        AiofluxCheckpointIO(background=True, max_pending=0)


def test_the_endpoint_of_the_constructor_is_used(
    server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    plugin = AiofluxCheckpointIO(endpoint_url=server.url)
    plugin.save_checkpoint(state(4), URI)
    assert pickle.loads(pickle.dumps(plugin)).load_checkpoint(URI)["global_step"] == 4


def test_it_pickles_without_pending_saves_and_without_secrets(server: GCSServer) -> None:
    plugin = AiofluxCheckpointIO(background=True, max_pending=3, retry=KEEP_TRYING)
    plugin.save_checkpoint(state(1), URI)
    other = pickle.loads(pickle.dumps(plugin))
    assert other.is_background
    assert other.options == plugin.options
    plugin.teardown()
    other.save_checkpoint(state(2), URI)
    other.teardown()
    assert stored(server) == 2
    with pytest.raises(TypeError, match="credentials are passed to processes"):
        pickle.dumps(AiofluxCheckpointIO(credentials=Custom()))
    set_spawning_popen(object())
    try:
        spawned = pickle.dumps(AiofluxCheckpointIO(credentials=Custom()))
    finally:
        set_spawning_popen(None)
    assert isinstance(pickle.loads(spawned).options["credentials"], Custom)


def test_pytorch_lightning_takes_it_for_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import abc

    standalone = ModuleType("lightning_fabric.plugins.io.checkpoint_io")
    kind = abc.ABCMeta("CheckpointIO", (), {})
    standalone.CheckpointIO = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, standalone.__name__, standalone)
    assert isinstance(AiofluxCheckpointIO(), kind)


def test_a_checkpoint_of_several_objects_is_removed_commit_first(server: GCSServer) -> None:
    save_id = "20261122T031500.123Z-3f9a12cd"
    parts = [".metadata", "__0_0.distcp", f"{save_id}/__1_0.distcp", "meta.pt"]
    for key in [*parts, "notes.txt"]:
        server.put("bucket", f"run/last.ckpt/{key}", b"x")
    server.put("bucket", "run/last.ckpt.bak", b"x")
    watch = Watch(server)
    AiofluxCheckpointIO().remove_checkpoint(URI)
    assert server.keys("bucket") == ["run/last.ckpt.bak", "run/last.ckpt/notes.txt"]
    before, after = watch.seen[:2]
    assert before - after == {"run/last.ckpt/.metadata"}


def test_objects_that_no_save_writes_stay(server: GCSServer) -> None:
    parts = (
        ".metadata",
        "meta.pt",
        "__0_0.distcp",
        "__3.metadata",
        "20261122T031500.123Z-3f9a12cd/__0_0.distcp",
        "20261122T031500.123Z-3f9a12cd/rank-00000.json",
    )
    others = ("__0_0.distcp.bak", "images/__0_0.distcp", "notes.txt")
    for key in (*parts, *others):
        server.put("bucket", f"run/last.ckpt/{key}", b"")
    AiofluxCheckpointIO().remove_checkpoint(URI)
    assert server.keys("bucket") == [f"run/last.ckpt/{key}" for key in others]

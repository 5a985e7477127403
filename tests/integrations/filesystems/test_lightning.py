"""Lightning with a `gs://` dirpath, and nothing of aioflux but the registration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from fsspec.registry import _registry as registry
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

import aioflux
from aioflux.integrations.fsspec import GSFileSystem, register

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer


@pytest.fixture(autouse=True)
def gs_is_ours(shared: GCSServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", shared.url)
    before = dict(registry)
    register(replace=("gs",))
    GSFileSystem.clear_instance_cache()
    yield
    GSFileSystem.clear_instance_cache()
    registry.clear()
    registry.update(before)


def test_its_own_io_saves_loads_and_removes(bucket: str, fs: GSFileSystem) -> None:
    plugin = TorchCheckpointIO()
    path = f"gs://{bucket}/run/a.ckpt"
    for value in (1.0, 2.0):
        plugin.save_checkpoint({"w": torch.full((1000,), value)}, path)
        assert plugin.load_checkpoint(path)["w"][0] == value
    plugin.remove_checkpoint(path)
    assert not fs.exists(f"{bucket}/run")


def test_a_save_that_breaks_keeps_the_old_checkpoint(shared: GCSServer, bucket: str) -> None:
    """Where Lightning lets the error pass: it swallows any PermissionError of a save."""
    plugin = TorchCheckpointIO()
    path = f"gs://{bucket}/run/a.ckpt"
    plugin.save_checkpoint({"w": 1}, path)
    shared.faults.add(operation="multipart.part", status=400)
    try:
        with pytest.raises(aioflux.StorageError):
            plugin.save_checkpoint({"w": torch.zeros(20 * 1024 * 1024)}, path)
    finally:
        shared.faults.clear()
    assert plugin.load_checkpoint(path)["w"] == 1
    assert shared.stats.open_uploads == 0
    plugin.save_checkpoint({"w": 2}, path)
    assert plugin.load_checkpoint(path)["w"] == 2

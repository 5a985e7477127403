"""Lightning with a `gs://` dirpath, and nothing of aioflux but the registration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fsspec.registry import _registry as registry
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

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


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
def test_a_model_is_trained_kept_and_resumed(shared: GCSServer, bucket: str) -> None:
    torch.set_num_threads(1)

    def fit(epochs: int, **options: Any) -> ModelCheckpoint:
        callback = ModelCheckpoint(dirpath=f"gs://{bucket}/run", save_last=True)
        trainer = Trainer(
            max_epochs=epochs,
            callbacks=[callback],
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Line(), DataLoader(torch.ones(8, 4), batch_size=4), **options)
        assert trainer.global_step == 2 * epochs
        return callback

    first = fit(2)
    assert first.last_model_path == f"gs://{bucket}/run/last.ckpt"
    assert shared.keys(bucket) == ["run/epoch=1-step=4.ckpt", "run/last.ckpt"]
    fit(3, ckpt_path=first.last_model_path)
    assert shared.keys(bucket) == ["run/epoch=2-step=6.ckpt", "run/last.ckpt"]

"""Nebula in Lightning: the callback begins it, the plugin saves by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

from aioflux.compat import nebula as nm
from aioflux.errors import CheckpointError, CheckpointNotFoundError
from tests.integrations.lightning.tiny import OF_LIGHTNING

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    *OF_LIGHTNING,
    pytest.mark.filterwarnings("ignore:The .train_dataloader. does not have many workers"),
]


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        torch.nn.init.constant_(self.layer.weight, 1.0)  # so that the last epoch is the best

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)


def train(where: Path, max_epochs: int, callback: Any, ckpt_path: str | None = None) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=where,
        plugins=[nm.NebulaCheckpointIO()],
        callbacks=[callback],
    )
    trainer.fit(Line(), ckpt_path=ckpt_path, weights_only=False)
    return trainer


def test_training_goes_on_with_the_last_one(inside: str, tmp_path: Path) -> None:
    """Lightning looks for it in a directory, and else trains from the beginning."""
    params = {"persistent_storage_path": inside, "persistent_time_interval": 10}

    def callback() -> nm.NebulaCallback:
        return nm.NebulaCallback(tmp_path / "run", save_last=True, config_params=params)

    train(tmp_path, 2, callback())
    trainer = train(tmp_path, 3, callback(), ckpt_path="last")
    assert trainer.fit_loop.epoch_progress.total.ready == 3  # of both
    assert trainer.ckpt_path == "aioflux-nebula://last.ckpt"


def test_training_saves_by_nebula_and_goes_on(node: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "tier3")
    params = {"persistent_storage_path": place, "persistent_time_interval": 10}
    callback = nm.NebulaCallback(
        tmp_path / "run", monitor="loss", save_top_k=-1, config_params=params
    )
    trainer = train(tmp_path, 3, callback)
    listed = nm.list_checkpoints()
    assert next(iter(listed)).startswith("epoch=2")
    assert "storage" in next(iter(listed.values()))["places"]  # the end of fit waits for it
    path = nm.get_latest_checkpoint_path("checkpoint", place)
    assert path is not None
    loaded = Line.load_from_checkpoint(path, weights_only=False)
    assert torch.equal(loaded.layer.weight, trainer.lightning_module.layer.weight)

    best = str(callback.best_model_path)
    again = train(tmp_path, 4, nm.NebulaCallback(tmp_path / "run", monitor="loss"), ckpt_path=best)
    assert again.global_step > trainer.global_step
    from_path = train(
        tmp_path, 4, nm.NebulaCallback(tmp_path / "run", monitor="loss"), ckpt_path=path
    )
    assert from_path.global_step == again.global_step


def test_a_checkpoint_is_persisted_where_its_options_say(inside: str) -> None:
    nm.init(inside, 1000)
    plugin = nm.NebulaCheckpointIO()
    options = {"is_best": True, "persist_path": f"{inside}-other"}
    plugin.save_checkpoint({"a": 1}, "run/best.ckpt", storage_options=options)
    found = nm.get_latest_checkpoint(persist_path=f"{inside}-other")
    assert found is not None
    assert (found.tag, found.load("checkpoint")) == ("best", {"a": 1})
    assert nm.get_latest_checkpoint() is None
    plugin.save_checkpoint({"a": 2}, "run/best.ckpt", storage_options={"is_best": True})
    assert nm.list_checkpoints()["best"]["places"] == ["memory", "storage"]
    with pytest.raises(TypeError, match="unknown storage_options: other"):
        plugin.save_checkpoint({}, "run/best.ckpt", storage_options={"other": 1})


def test_a_removed_checkpoint_goes_when_the_next_is_persisted(inside: str) -> None:
    nm.init(inside, 0, 1)
    plugin = nm.NebulaCheckpointIO()
    for number in range(3):
        plugin.save_checkpoint({"a": number}, f"run/{number}.ckpt")
        nm.flush_persistence()
        if number:
            plugin.remove_checkpoint(f"run/{number - 1}.ckpt")
    assert set(nm.list_checkpoints()) == {"1", "2"}  # what replaces 1 comes behind it
    assert plugin.load_checkpoint("run/2.ckpt") == {"a": 2}
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint '0'"):
        plugin.load_checkpoint("run/0.ckpt")


def test_a_checkpoint_of_lightning_itself_is_loaded(inside: str, tmp_path: Path) -> None:
    nm.init(inside)
    torch.save({"a": 1}, tmp_path / "old.ckpt")
    assert nm.NebulaCheckpointIO().load_checkpoint(tmp_path / "old.ckpt") == {"a": 1}


def test_the_end_of_training_raises_what_could_not_be_persisted(node: Path, tmp_path: Path) -> None:
    nm.init(tmp_path, 0)
    (tmp_path / "last").write_text("in the way")
    plugin = nm.NebulaCheckpointIO()
    plugin.save_checkpoint({"a": 1}, "run/last.ckpt")
    with pytest.raises(CheckpointError, match="last was not saved"):
        plugin.teardown()


def test_the_callback_needs_the_plugin(node: Path, tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(TypeError, match="NebulaCheckpointIO"):
        nm.NebulaCallback(tmp_path).setup(trainer, Line(), "fit")

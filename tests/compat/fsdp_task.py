"""Training of one of two ranks, like in the demo of gcs-torch-dataflux."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from aioflux.compat.dataflux.lightning import DatafluxFSDPStrategy
from aioflux.integrations.fsspec import register


class OnProcessors(DatafluxFSDPStrategy):
    """DatafluxFSDPStrategy on the CPU; torch requires the device for this."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        device = torch.device("cpu")
        return FullyShardedDataParallel(model, device_id=device, use_orig_params=True)


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=0.1)


def train(max_steps: int, ckpt_path: Any = None, *, use_async: bool, **options: Any) -> pl.Trainer:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=max_steps,
        strategy=OnProcessors(
            project_name="project",
            storage_client=None,
            use_async=use_async,
            state_dict_type="sharded",
        ),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Tiny(), DataLoader(torch.ones(16, 32), batch_size=2), ckpt_path=ckpt_path)
    return trainer


def weights(trainer: pl.Trainer) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.strategy.model.parameters()])


def main() -> dict[str, Any]:
    register(replace=("gs", "gcs"))  # the demo uses gcsfs for these schemes
    found: dict[str, Any] = {}
    for use_async in (False, True):
        directory = f"gs://bucket/{'async' if use_async else 'sync'}"
        callback = ModelCheckpoint(
            save_top_k=-1,
            every_n_train_steps=1,
            filename="checkpoint-{epoch:02d}-{step:02d}",
            enable_version_counter=True,
            dirpath=directory,
        )
        unbroken = train(3, use_async=use_async, callbacks=[callback])
        # The demo passes a Path, which turns `gs://` into `gs:/`.
        unbroken.strategy.save_checkpoint({"state_dict": {}, "x": 1}, Path(directory) / "extra")
        unbroken.strategy.checkpoint_io.teardown()
    path = "gs://bucket/async/checkpoint-epoch=00-step=02.ckpt"
    resumed = train(3, path, use_async=False, enable_checkpointing=False)
    found["is_same"] = torch.equal(weights(unbroken), weights(resumed))
    found["num_steps"] = resumed.global_step
    return found


def train_and_tell(directory: str) -> None:
    """Train on one rank, and write the results to a file."""
    path = Path(directory, f"{os.environ['LOCAL_RANK']}.json")
    path.write_text(json.dumps(main()), encoding="utf-8")

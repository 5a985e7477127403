"""A small Lightning module that trains fast, and trainers for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STEPS_PER_EPOCH = 8

OF_LIGHTNING = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "Checkpoint directory .* exists and is not empty",
        "`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    )
]
"""Warnings to ignore: of Lightning about these tests, and of torch about calls of Lightning."""


class Batches:
    """The same batches in each epoch; resumes at the position of a checkpoint."""

    def __init__(self) -> None:
        self.num_given = 0

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        data = torch.randn(STEPS_PER_EPOCH, 2, 8, generator=torch.Generator().manual_seed(1))
        self.num_given %= len(self)  # a loop that counts batches never exhausts an iterator
        while self.num_given < len(self):
            self.num_given += 1
            yield data[self.num_given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_given = state["num_given"]


class Tiny(pl.LightningModule):
    """A module whose loss decreases, with an optimizer and a schedule that have a state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self) -> Batches:
        return Batches()


class At(pl.Callback):
    """Calls a function before one step, or before every step."""

    def __init__(self, step: int | None, action: Any) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.step in {None, trainer.global_step}:
            self.action(trainer)


def trainer(
    max_steps: int, plugin: Any, callbacks: Sequence[pl.Callback], **options: Any
) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=options.pop("devices", 1),
        max_steps=max_steps,
        plugins=[plugin],
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(
    max_steps: int,
    plugin: Any,
    callbacks: Sequence[pl.Callback],
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[pl.Trainer, Tiny]:
    model, running = Tiny(), trainer(max_steps, plugin, callbacks, **options)
    running.fit(model, ckpt_path=ckpt_path)
    return running, model

"""Jobs that tests run in separate processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy as StockFSDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as StockModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import aioflux
from aioflux.integrations.lightning import (
    AiofluxCheckpointIO,
    FSDPStrategy,
    ModelCheckpoint,
    ModelParallelStrategy,
)
from tests.integrations.lightning import tiny
from tests.integrations.lightning.tiny import At, Tiny


class ShardedTiny(Tiny):
    """`Tiny` sharded by FSDP2 in `configure_model`, or by the strategy."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        if self.kind == "model-parallel":
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def on_processors(kind: type) -> type:
    """Return a subclass of FSDPStrategy for the CPU; torch requires the device for this."""

    class OnProcessors(kind):  # type: ignore[misc]
        def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
            return FullyShardedDataParallel(
                model, device_id=torch.device("cpu"), use_orig_params=True
            )

    return OnProcessors


def strategy(kind: str, *, is_ours: bool = True, is_whole: bool = False) -> Any:
    if kind == "model-parallel":
        parallel = ModelParallelStrategy if is_ours else StockModelParallelStrategy
        return parallel(2, 1, save_distributed_checkpoint=not is_whole)
    fsdp = on_processors(FSDPStrategy if is_ours else StockFSDPStrategy)
    return fsdp(state_dict_type="full" if is_whole else "sharded")


def fit(kind: str, max_steps: int, ckpt_path: str | None = None, **options: Any) -> Any:
    plugin = options.pop("plugin", None)
    callbacks = options.pop("callbacks", [])
    running = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=max_steps,
        strategy=strategy(kind, **options),
        plugins=[plugin] if plugin else [],
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    running.fit(ShardedTiny(kind), ckpt_path=ckpt_path)
    return running


def weights(running: pl.Trainer) -> list[torch.Tensor]:
    """Return the weights of this rank."""
    parameters = running.strategy.model.parameters()
    return [getattr(each, "_local_tensor", each).detach().clone() for each in parameters]


def is_equal(one: pl.Trainer, other: pl.Trainer) -> bool:
    pairs = zip(weights(one), weights(other), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def download(uri: str, directory: Path) -> None:
    with aioflux.sync.open_store(uri) as store:
        for key, data in store.get_many([meta.key for meta in store.list()]):
            (directory / key).parent.mkdir(parents=True, exist_ok=True)
            (directory / key).write_bytes(data)


def upload(directory: Path, uri: str) -> None:
    with aioflux.sync.open_store(uri) as store:
        for path in directory.iterdir():
            store.put(path.name, path.read_bytes())


def run(kind: str, uri: str, directory: Path) -> dict[str, Any]:
    unbroken = fit(kind, 8)
    is_first = unbroken.is_global_zero
    found: dict[str, Any] = {}
    for is_background in (False, True):
        name = f"{uri}/{'background' if is_background else 'foreground'}"
        for max_steps in (4, 8):
            plugin = AiofluxCheckpointIO(background=is_background)
            saving = ModelCheckpoint(name, every_n_train_steps=2, save_last=True)
            running = fit(
                kind,
                max_steps,
                "last" if max_steps == 8 else None,
                plugin=plugin,
                callbacks=[saving],
            )
        found[f"resumed, {is_background=}"] = is_equal(running, unbroken)
    plugin = AiofluxCheckpointIO()
    half = fit(kind, 4, plugin=plugin)
    half.save_checkpoint(f"{uri}/half")
    if is_first:
        download(f"{uri}/half", directory / "half")
    half.strategy.barrier()
    stock = fit(kind, 8, str(directory / "half"), is_ours=False)
    found["stock loads ours"] = is_equal(stock, unbroken)
    half_stock = fit(kind, 4, is_ours=False)
    half_stock.save_checkpoint(directory / "stock")
    if is_first:
        upload(directory / "stock", f"{uri}/stock")
    half_stock.strategy.barrier()
    ours = fit(kind, 8, f"{uri}/stock", plugin=plugin)
    found["ours loads stock's"] = is_equal(ours, unbroken)
    ours = fit(kind, 8, "gs://bucket/whole.ckpt", plugin=plugin)
    found["ours loads a whole one"] = is_equal(ours, unbroken)
    if kind != "fsdp":  # without an accelerator, torch crashes when it gathers a full FSDP state
        whole = fit(kind, 4, plugin=plugin, is_whole=True)
        whole.save_checkpoint(f"{uri}/whole-too.ckpt")
        ours = fit(kind, 8, f"{uri}/whole-too.ckpt", plugin=plugin)
        found["ours loads a whole one of ours"] = is_equal(ours, unbroken)
    try:
        ours.save_checkpoint(f"{uri}/refused")
    except aioflux.CheckpointError as exc:
        found["refused, foreground"] = str(exc)
    ours.strategy.checkpoint_io = AiofluxCheckpointIO(background=True)
    ours.save_checkpoint(f"{uri}/refused")
    try:
        ours.save_checkpoint(f"{uri}/next")
    except aioflux.CheckpointError as exc:
        found["refused, background"] = str(exc)
    ours.strategy.checkpoint_io.teardown()
    try:
        fit(kind, 9, f"{uri}/nothing", plugin=plugin)
    except (aioflux.NotFoundError, aioflux.CheckpointError) as exc:
        found["nothing"] = str(exc)
    return found


def shard(uri: str, directory: str) -> None:
    """Test the strategies on one of two ranks, and write the results to a file."""
    found = {}
    for kind in ("model-parallel", "fsdp"):
        place = Path(directory, kind)
        place.mkdir(exist_ok=True)
        found[kind] = run(kind, f"{uri}/{kind}", place)
    Path(directory, f"found-{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))


def killed(uri: str) -> None:
    """Train, and die at step 7 during a save."""
    saving = ModelCheckpoint(uri, every_n_train_steps=2, save_last=True)
    kill = At(7, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    tiny.fit(12, AiofluxCheckpointIO(background=True), [saving, kill])


def forked(uri: str, directory: str) -> None:
    """Train in two processes that Lightning forks, and write the trainer's results to a file."""
    del os.environ["LOCAL_RANK"]
    saving = ModelCheckpoint(uri, every_n_train_steps=2, save_last=True)
    plugin = AiofluxCheckpointIO(background=True)
    _, model = tiny.fit(
        4,
        plugin,
        [saving],
        strategy="ddp_fork",
        devices=2,
        use_distributed_sampler=False,
        default_root_dir=directory,
    )
    torch.save(model.state_dict(), Path(directory, "home.pt"))

"""Checkpoints of Lightning in a bucket: a checkpoint plugin, ModelCheckpoint, and strategies.

    Trainer(
        plugins=[AiofluxCheckpointIO(background=True)],
        callbacks=[ModelCheckpoint("gs://bucket/run-7", save_last=True)],
    ).fit(model, ckpt_path="last")

The package needs `lightning`: `pip install 'aioflux-storage[lightning]'`.
"""

from __future__ import annotations

try:
    import lightning  # noqa: F401
except ModuleNotFoundError as exc:
    if exc.name not in {"lightning", "torch"}:
        raise
    from aioflux._values.distribution import pip_install

    raise ModuleNotFoundError(
        f"aioflux.integrations.lightning needs lightning: {pip_install('lightning')}",
        name=exc.name,
    ) from exc

from aioflux.integrations.lightning._checkpoint_io import AiofluxCheckpointIO
from aioflux.integrations.lightning._model_checkpoint import ModelCheckpoint
from aioflux.integrations.lightning._strategies import FSDPStrategy, ModelParallelStrategy

__all__ = ["AiofluxCheckpointIO", "FSDPStrategy", "ModelCheckpoint", "ModelParallelStrategy"]

"""Checkpoints of DeepSpeed in a bucket: `save_dir` and `load_dir` are uris.

    engine, *_ = deepspeed.initialize(...)
    attach(engine)
    engine.save_checkpoint("gs://bucket/run-7")
    engine.load_checkpoint("gs://bucket/run-7")

A tag is one checkpoint of named parts: it is committed when every rank has stored its own, or not
at all, and `latest` is moved then and not before. With `attach(engine, decoupled=True)` training
continues while the parts are stored.

DeepSpeed has no setting for a checkpoint engine other than its own. `attach` replaces the engine,
and gives DeepSpeed, which also inspects directories itself, one with empty files as placeholders.
"""

from __future__ import annotations

from aioflux.integrations.deepspeed._attach import attach
from aioflux.integrations.deepspeed._engine import AiofluxCheckpointEngine

__all__ = ["AiofluxCheckpointEngine", "attach"]

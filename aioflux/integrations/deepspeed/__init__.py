"""Checkpoints of DeepSpeed in a bucket: `save_dir` and `load_dir` are uris.

    engine, *_ = deepspeed.initialize(...)
    attach(engine)
    engine.save_checkpoint("gs://bucket/run-7")
    engine.load_checkpoint("gs://bucket/run-7")

A tag is one checkpoint of named parts: it counts when every rank has stored its own, or not at all,
and `latest` is moved then and not before. With `attach(engine, decoupled=True)` training goes on
while the parts are stored.

DeepSpeed has no way to name another checkpoint engine than its own. `attach` puts one in its place
and gives DeepSpeed, which looks at directories beside it, a directory with empty files to look at.
"""

from __future__ import annotations

from aioflux.integrations.deepspeed._attach import attach
from aioflux.integrations.deepspeed._engine import AiofluxCheckpointEngine

__all__ = ["AiofluxCheckpointEngine", "attach"]

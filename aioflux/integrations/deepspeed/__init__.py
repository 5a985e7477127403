"""Checkpoints of DeepSpeed in a bucket, with uris as `save_dir` and `load_dir`.

    engine, *_ = deepspeed.initialize(...)
    attach(engine)
    engine.save_checkpoint("gs://bucket/run-7")
    engine.load_checkpoint("gs://bucket/run-7")

A tag names one checkpoint. Its parts are the files that DeepSpeed would write to a directory; here
each part is an object. The tag is committed when every rank has stored its parts. Only then the
object `latest` is updated. With `attach(engine, decoupled=True)` training continues while the parts
are uploaded.

DeepSpeed has no setting for the checkpoint engine of another library, so `attach` replaces the
attribute `checkpoint_engine`. DeepSpeed also looks for files in the directory of a checkpoint: for
each uri it works with a temporary local directory that contains empty placeholder files.
"""

from __future__ import annotations

from aioflux.integrations.deepspeed._attach import attach
from aioflux.integrations.deepspeed._engine import AiofluxCheckpointEngine

__all__ = ["AiofluxCheckpointEngine", "attach"]

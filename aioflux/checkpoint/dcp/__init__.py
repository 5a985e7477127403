"""Checkpoints of `torch.distributed.checkpoint` in object storage.

    dcp.save(state, storage_writer=StorageWriter("gs://bucket/run-7/step-00000100"))
    dcp.load(state, storage_reader=StorageReader("gs://bucket/run-7/step-00000100"))

The format is PyTorch's own. `FileSystemReader` loads a checkpoint whose objects were copied to a
directory, and `StorageReader` loads checkpoints of `FileSystemWriter` and `FsspecWriter`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aioflux.checkpoint._require_torch import require_torch

if TYPE_CHECKING:
    from aioflux.checkpoint._load.state import load_state
    from aioflux.checkpoint.dcp._reader import StorageReader
    from aioflux.checkpoint.dcp._writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "load_state"]

_MODULES = {
    "StorageReader": "dcp._reader",
    "StorageWriter": "dcp._writer",
    "load_state": "_load.state",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_torch(__name__)
    return getattr(import_module(f"aioflux.checkpoint.{_MODULES[name]}"), name)

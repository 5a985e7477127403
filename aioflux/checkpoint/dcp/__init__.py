"""Checkpoints of `torch.distributed.checkpoint` in object storage.

    dcp.save(state, storage_writer=StorageWriter("gs://bucket/run-7/step-00000100"))
    dcp.load(state, storage_reader=StorageReader("gs://bucket/run-7/step-00000100"))

Both ways compatible with what comes with PyTorch: copied to a directory, `FileSystemReader` loads
what was saved here, and what `FileSystemWriter` or `FsspecWriter` saved loads here.
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

_WHERE = {
    "StorageReader": "dcp._reader",
    "StorageWriter": "dcp._writer",
    "load_state": "_load.state",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_torch(__name__)
    return getattr(import_module(f"aioflux.checkpoint.{_WHERE[name]}"), name)

"""Checkpoints in object storage.

    save(state_dict, "gs://bucket/model.pt")
    state_dict = load("gs://bucket/model.pt")

    with open_writer("gs://bucket/model.pt") as file: torch.save(state_dict, file)
    with open_reader("gs://bucket/model.pt") as file: state_dict = torch.load(file)

The file objects work with `torch.save`, `torch.load` and other libraries that use binary files:
pickle, zipfile, numpy, safetensors. `open_writer` and `open_reader` do not need PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aioflux.checkpoint._format.commit import StepInfo
from aioflux.checkpoint._load.torch_file import CheckpointReader, MappedReader, load, open_reader
from aioflux.checkpoint._maintenance import clean, copy, verify
from aioflux.checkpoint._require_torch import require_torch
from aioflux.checkpoint._save.handle import SaveHandle
from aioflux.checkpoint._save.job import SaveResult
from aioflux.checkpoint._save.torch_file import CheckpointWriter, open_writer, save

if TYPE_CHECKING:
    from aioflux.checkpoint._checkpointer import Checkpointer
    from aioflux.checkpoint._training_state import TrainingState

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "Checkpointer",
    "MappedReader",
    "SaveHandle",
    "SaveResult",
    "StepInfo",
    "TrainingState",
    "clean",
    "copy",
    "load",
    "open_reader",
    "open_writer",
    "save",
    "verify",
]

_WITH_TORCH = {
    "Checkpointer": "aioflux.checkpoint._checkpointer",
    "TrainingState": "aioflux.checkpoint._training_state",
}
"""Names whose modules import torch, each with its module."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_torch(f"{__name__}.{name}")
    return getattr(importlib.import_module(_WITH_TORCH[name]), name)

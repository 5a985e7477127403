"""Checkpoints in object storage.

    save(state_dict, "gs://bucket/model.pt")
    state_dict = load("gs://bucket/model.pt")

    with open_writer("gs://bucket/model.pt") as file: torch.save(state_dict, file)
    with open_reader("gs://bucket/model.pt") as file: state_dict = torch.load(file)

The file objects here are for `torch.save` and `torch.load`, and for whatever else takes a binary
file: pickle, zipfile, numpy, safetensors. They need no PyTorch themselves.
"""

from __future__ import annotations

from aioflux.checkpoint._load import load
from aioflux.checkpoint._reader import CheckpointReader, MappedReader, open_reader
from aioflux.checkpoint._save import save
from aioflux.checkpoint._writer import CheckpointWriter, open_writer

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "MappedReader",
    "load",
    "open_reader",
    "open_writer",
    "save",
]

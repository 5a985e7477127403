"""Checkpoint functions for the integrations of DeepSpeed, Lightning and Nebula.

Checkpoints of named parts under a tag:

    save: pickle_state -> write_part for each part -> TagSave commits the parts of all ranks
    load: read_tag -> read_part for each part

One object in the format of torch.save: save_by_torch writes it, read_into_memory reads it.

Names that need torch are imported on first use, because the node daemon of Nebula has no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aioflux.checkpoint._format.commit import COMMIT_KEY, StoredObject, is_save_id, new_save_id
from aioflux.checkpoint._save.job import Job, UploadSettings
from aioflux.checkpoint._save.tag_save import PartData, TagSave, tag_job, write_part
from aioflux.checkpoint._store.history import HistoryWriter
from aioflux.checkpoint._store.mapping import MemoryFile, read_into_memory
from aioflux.checkpoint._store.tag_names import quote_name
from aioflux.checkpoint._store.tags import (
    StoredTag,
    is_valid,
    keep_newest,
    list_tags,
    read_part,
    read_tag,
    remove_tag,
)

if TYPE_CHECKING:
    from aioflux.checkpoint._save.ranks import Ranks, open_ranks
    from aioflux.checkpoint._save.staging import Arena
    from aioflux.checkpoint._save.tensor_memory import pickle_state, save_by_torch

__all__ = [
    "COMMIT_KEY",
    "Arena",
    "HistoryWriter",
    "Job",
    "MemoryFile",
    "PartData",
    "Ranks",
    "StoredObject",
    "StoredTag",
    "TagSave",
    "UploadSettings",
    "is_save_id",
    "is_valid",
    "keep_newest",
    "list_tags",
    "new_save_id",
    "open_ranks",
    "pickle_state",
    "quote_name",
    "read_into_memory",
    "read_part",
    "read_tag",
    "remove_tag",
    "save_by_torch",
    "tag_job",
    "write_part",
]

_WITH_TORCH = {
    "Arena": "staging",
    "Ranks": "ranks",
    "open_ranks": "ranks",
    "pickle_state": "tensor_memory",
    "save_by_torch": "tensor_memory",
}
"""Names that need torch, each with its module in `checkpoint/_save`."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"aioflux.checkpoint._save.{_WITH_TORCH[name]}")
    return getattr(module, name)

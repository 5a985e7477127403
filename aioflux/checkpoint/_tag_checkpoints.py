"""Checkpoints of named parts under a tag, for packages that adapt another library to them.

save: pickle_state -> write_part, several times -> TagSave commits what all ranks wrote
load: read_tag -> read_part

Names that need torch are imported on first use: the node daemon of Nebula has none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aioflux.checkpoint._format.commit import StoredObject, new_save_id
from aioflux.checkpoint._maintain.tags import (
    StoredTag,
    is_valid,
    keep_newest,
    list_tags,
    read_part,
    read_tag,
    remove_tag,
)
from aioflux.checkpoint._save.job import Job, UploadSettings
from aioflux.checkpoint._save.tag_save import PartData, TagSave, tag_job, write_part
from aioflux.checkpoint._store.objects import open_checkpoint
from aioflux.checkpoint._store.tag_names import quote_name

if TYPE_CHECKING:
    from aioflux.checkpoint._save.ranks import Ranks, open_ranks
    from aioflux.checkpoint._save.staging import Arena
    from aioflux.checkpoint._save.state_pickle import pickle_state

__all__ = [
    "Arena",
    "Job",
    "PartData",
    "Ranks",
    "StoredObject",
    "StoredTag",
    "TagSave",
    "UploadSettings",
    "is_valid",
    "keep_newest",
    "list_tags",
    "new_save_id",
    "open_checkpoint",
    "open_ranks",
    "pickle_state",
    "quote_name",
    "read_part",
    "read_tag",
    "remove_tag",
    "tag_job",
    "write_part",
]

_WITH_TORCH = {
    "Arena": "staging",
    "Ranks": "ranks",
    "open_ranks": "ranks",
    "pickle_state": "state_pickle",
}
"""Names whose modules import torch, and those modules."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"aioflux.checkpoint._save.{_WITH_TORCH[name]}")
    return getattr(module, name)

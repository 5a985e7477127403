"""Checkpoints for packages that adapt another library to them.

Checkpoints of named parts under a tag:

    save: pickle_state -> write_part, several times -> TagSave commits what all ranks wrote
    load: read_tag -> read_part

Objects that torch.save wrote: save_by_torch, and read_into_memory for a load.
"""

from __future__ import annotations

from aioflux.checkpoint._format.commit import COMMIT_KEY, StoredObject, is_save_id, new_save_id
from aioflux.checkpoint._maintain.tags import is_valid, read_part, read_tag
from aioflux.checkpoint._save.job import Job, UploadSettings
from aioflux.checkpoint._save.ranks import Ranks, open_ranks
from aioflux.checkpoint._save.save import save_by_torch
from aioflux.checkpoint._save.staging import Arena
from aioflux.checkpoint._save.state_pickle import pickle_state
from aioflux.checkpoint._save.tag_save import PartData, TagSave, tag_job, write_part
from aioflux.checkpoint._store.mapping import MemoryFile, read_into_memory
from aioflux.checkpoint._store.objects import open_checkpoint

__all__ = [
    "COMMIT_KEY",
    "Arena",
    "Job",
    "MemoryFile",
    "PartData",
    "Ranks",
    "StoredObject",
    "TagSave",
    "UploadSettings",
    "is_save_id",
    "is_valid",
    "new_save_id",
    "open_checkpoint",
    "open_ranks",
    "pickle_state",
    "read_into_memory",
    "read_part",
    "read_tag",
    "save_by_torch",
    "tag_job",
    "write_part",
]

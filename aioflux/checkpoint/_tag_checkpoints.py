"""Checkpoints of named parts under a tag, for packages that adapt another library to them.

save: pickle_state -> write_part, several times -> TagSave commits what all ranks wrote
load: read_tag -> read_part
"""

from __future__ import annotations

from aioflux.checkpoint._format.commit import StoredObject, new_save_id
from aioflux.checkpoint._maintain.tags import is_valid, read_part, read_tag
from aioflux.checkpoint._save.job import Job, UploadSettings
from aioflux.checkpoint._save.ranks import Ranks, open_ranks
from aioflux.checkpoint._save.staging import Arena
from aioflux.checkpoint._save.state_pickle import pickle_state
from aioflux.checkpoint._save.tag_save import PartData, TagSave, tag_job, write_part
from aioflux.checkpoint._store.objects import open_checkpoint

__all__ = [
    "Arena",
    "Job",
    "PartData",
    "Ranks",
    "StoredObject",
    "TagSave",
    "UploadSettings",
    "is_valid",
    "new_save_id",
    "open_checkpoint",
    "open_ranks",
    "pickle_state",
    "read_part",
    "read_tag",
    "tag_job",
    "write_part",
]

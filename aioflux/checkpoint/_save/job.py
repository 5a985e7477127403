"""What is handed to an upload, and what comes back: plain data, which crosses processes."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from aioflux.checkpoint._format.commit import StoredItem, StoredObject
from aioflux.checkpoint._maintain.retention import Retention
from aioflux.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Compression",
    "Job",
    "Manifest",
    "SaveResult",
    "UploadSettings",
    "Whole",
    "manifest_key",
    "portable",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """How tensors are compressed; `aioflux.checkpoint.compression.ZStandard` without torch."""

    level: int
    """zstd's."""
    threads: int
    """Threads of a save."""
    byte_planes: bool
    """Whether byte k of all elements is compressed together."""
    descriptor: str
    """How the metadata calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadSettings:
    """What all saves of a Checkpointer have in common."""

    commit_seconds: float = 600.0
    """How long a rank that is done waits for the others, in seconds; 600 by default."""
    heartbeat_seconds: float = math.inf
    """How often a rank whose save takes long says that it is alive, in seconds; infinity for never,
    which is the default."""
    retention: Retention = field(default_factory=Retention)
    """Which steps are kept."""
    compression: Compression | None = None
    """How tensors are compressed; None where they are not."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What the coordinator knows of a save: the plan of all ranks."""

    metadata: bytes
    """DCP's metadata, pickled, without where things are stored."""
    orders: tuple[tuple[bytes, ...], ...]
    """The indices of what each rank writes, pickled, in the order in which it does."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """What the metadata does not tell of the state, for the commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One save of one rank, staged."""

    step: int
    """The training step."""
    save_id: str
    """Names the save; the same on all ranks."""
    rank: int
    """Who saves."""
    world_size: int
    """How many save together."""
    arena: int
    """Number of the arena that holds the tensors; 0 where there are none."""
    size: int
    """Bytes in the arena."""
    tail: tuple[bytes, ...]
    """What follows them in the data object."""
    items: tuple[StoredItem, ...]
    """What lies in the data object."""
    element_sizes: tuple[int, ...]
    """Bytes of an element of each; 0 for a value that is no tensor."""
    whole: Whole | None
    """The plan of all ranks, on the coordinator."""
    metrics: Mapping[str, float]
    """What retention may choose by."""
    protected: tuple[int, ...] = ()
    """Steps that retention leaves alone."""
    begun: float
    """Time of the call, in seconds since 1970, UTC."""
    staged_seconds: float
    """How long the training was held up, in seconds."""
    failure: str = ""
    """Why it could not be staged: then it fails, on all ranks."""
    is_urgent: bool = False
    """It does not wait for the saves before it."""
    attempt: int = 0
    """How many uploads of it were begun before and not heard of again."""
    prefix: str = ""
    """Prefix of the checkpoint; that of its step where it is empty."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the data object."""
        return self.size + sum(map(len, self.tail))


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """A save that is committed."""

    step: int
    """The training step."""
    uri: str
    """Uri of the checkpoint."""
    save_id: str
    """Names the save."""
    num_bytes: int
    """Bytes that this rank uploaded."""
    staged_seconds: float
    """How long the training was held up, in seconds."""
    upload_seconds: float
    """How long this rank's upload took, in seconds."""
    seconds: float
    """From the call to the commit, in seconds."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the coordinator, or the coordinator all ranks, through the bucket."""

    rank: int
    """Who."""
    objects: tuple[StoredObject, ...] = ()
    """What it uploaded."""
    error: str = ""
    """Why it did not."""
    is_unknown: bool = False
    """The commit may be there all the same: nothing is removed."""


def manifest_key(save_id: str, rank: int) -> str:
    """Return the key of a rank's manifest, below the checkpoint's prefix."""
    return f"{save_id}/rank-{rank:05d}.json"


def portable(error: BaseException) -> BaseException:
    """Return an error that pickles: itself, or what says the same."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:
        return CheckpointError(f"{type(error).__name__}: {error}")
    return error

"""Job: a staged save as it is handed to an upload, and its results. Plain data for processes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from aioflux.checkpoint._format.commit import StoredItem, StoredObject, step_prefix
from aioflux.checkpoint._maintain.retention_rules import Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "Compression",
    "GlobalSavePlan",
    "Job",
    "Manifest",
    "SaveResult",
    "StagedState",
    "UploadSettings",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """Settings of `aioflux.checkpoint.compression.ZStandard`, without torch."""

    level: int
    """Level of zstd."""
    threads: int
    """Threads of a save."""
    byte_planes: bool
    """Whether byte k of all elements is compressed together."""
    descriptor: str
    """Its name in the metadata."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadSettings:
    """Settings of all saves of a Checkpointer."""

    commit_seconds: float = 600.0
    """Time for which a rank that is done waits for the others, in seconds; 600 by default."""
    heartbeat_seconds: float = math.inf
    """Time between two heartbeats of a rank, in seconds; infinity, the default, for none."""
    retention: Retention = field(default_factory=Retention)
    """The steps that are kept."""
    compression: Compression | None = None
    """Compression of tensors; None for none."""
    cleanup_seconds: float = 10.0
    """Time for the removal of what a failed save wrote, in seconds; 10 by default."""
    max_poll_seconds: float = 1.0
    """Longest time between two polls of the other ranks, in seconds; 1 by default."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock of those waits."""

    def __post_init__(self) -> None:
        for name in ("commit_seconds", "heartbeat_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class GlobalSavePlan:
    """The plan of all ranks; on the coordinator."""

    metadata: bytes
    """DCP's metadata, pickled, without the locations of items."""
    orders: tuple[tuple[bytes, ...], ...]
    """The pickled indices of the items of each rank, in the order in which they are written."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Parts of the state that the metadata lacks, for the commit."""


@dataclass(frozen=True, slots=True)
class StagedState:
    """One state, copied: the bytes of its data object, and the items that they are."""

    arena: int = 0
    """Number of the arena that holds the tensors; 0 if there are none."""
    size: int = 0
    """Bytes in the arena."""
    tail: tuple[bytes, ...] = ()
    """The bytes that follow those of the arena."""
    items: tuple[StoredItem, ...] = ()
    """The items, in the order of the plan."""
    element_sizes: tuple[int, ...] = ()
    """Bytes of an element of each item; 0 for a value that is no tensor."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena and the tail, before compression."""
        return self.size + sum(map(len, self.tail))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One save of one rank, staged."""

    step: int
    """The training step."""
    save_id: str
    """Names the save; the same on all ranks."""
    rank: int
    """This rank."""
    world_size: int
    """Ranks that save together."""
    staged: StagedState = StagedState()
    """The data object."""
    global_plan: GlobalSavePlan | None = None
    """The plan of all ranks, on the coordinator."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step, for retention."""
    protected: tuple[int, ...] = ()
    """Steps that retention leaves alone."""
    started: float
    """Time of the call, in seconds since 1970, UTC."""
    staged_seconds: float
    """Time for which the training was held up, in seconds."""
    failure: str = ""
    """Message if it could not be staged; then the save fails on all ranks."""
    is_urgent: bool = False
    """It does not wait for the saves before it."""
    attempt: int = 0
    """Number of earlier uploads of it whose process died."""
    prefix: str = ""
    """Prefix of the checkpoint; empty for that of its step."""

    @property
    def checkpoint_prefix(self) -> str:
        """Prefix of the checkpoint."""
        return self.prefix or step_prefix(self.step)


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
    """Bytes of the data objects that this rank uploaded, as they are stored."""
    staged_seconds: float
    """Time for which the training was held up, in seconds."""
    upload_seconds: float
    """Time of this rank's upload, in seconds."""
    seconds: float
    """Time from the call to the commit, in seconds."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a rank to the coordinator, or of the coordinator to all ranks."""

    rank: int
    """The rank that wrote it."""
    objects: tuple[StoredObject, ...] = ()
    """The objects that it uploaded."""
    error: str = ""
    """The error of the save."""
    is_unknown: bool = False
    """The step may have been committed: nothing is removed."""

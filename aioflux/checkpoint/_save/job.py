"""Job: one staged save for the uploader, and its result. All classes here can be pickled.

The request rates of a save with many ranks are planned here, too. A bucket serves about 1,000
writes and 5,000 reads a second before Cloud Storage scales it up
(docs.cloud.google.com/storage/docs/request-rate), and all ranks of a save start at the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from aioflux.checkpoint._format.commit import SaveFacts, StoredItem, StoredObject, step_prefix
from aioflux.checkpoint._store.retention_rules import Retention
from aioflux.options import TransferOptions

_STARTS_PER_SECOND: Final = 400
"""Single-request uploads that start in a second; later, each of them writes a manifest, too."""
_MULTIPART_STARTS_PER_SECOND: Final = 250
_HEARTBEATS_PER_SECOND: Final = 150
_POLLS_PER_SECOND: Final = 120
DELETES_PER_SECOND: Final = 500
_RANKS_OF_ONE_BURST: Final = 256
"""Number of ranks that may start at the same time."""
_PART_BYTES_PER_RANK: Final = 384 * 1024
"""If each rank sends 156 MB/s (8 share 10 Gbit/s), all ranks together send 400 parts a second.
From 43 ranks on, parts are larger than the default of 16 MiB."""
_MAX_PLANNED_BYTES: Final = 16 * 1024**4
_MAX_PART_BYTES: Final = 2 * 1024**3
"""A part of this size needs 7 MB/s to be sent within the default deadline of a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """Settings of `aioflux.checkpoint.compression.ZStandard`, for a process without torch."""

    level: int
    threads: int
    byte_planes: bool
    descriptor: str
    """Name and version of the compression in the metadata."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadSettings:
    """Settings of all saves of a Checkpointer."""

    commit_seconds: float = 600.0
    """Timeout of a rank that has uploaded its part and waits for other ranks, in seconds."""
    heartbeat_seconds: float = math.inf
    """Interval of the heartbeats of a rank, in seconds. The default, infinity, disables them."""
    retention: Retention = field(default_factory=Retention)
    """Rules for the steps to keep; by default all steps are kept."""
    compression: Compression | None = None
    """Compression of tensors; by default tensors are not compressed."""
    cleanup_seconds: float = 10.0
    """Timeout of the clean-up after a failed save, in seconds."""
    max_poll_seconds: float = 1.0
    """Longest time between two polls of the manifests, in seconds."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock that measures `commit_seconds` and heartbeats."""

    def __post_init__(self) -> None:
        for name in ("commit_seconds", "heartbeat_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class GlobalSavePlan:
    """The plan of all ranks, which only the coordinator has."""

    metadata: bytes
    """DCP's metadata, pickled, without the locations of items."""
    orders: tuple[tuple[bytes, ...], ...]
    """For each rank, DCP's pickled indices of its items, in the order in which it writes them."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Facts about the state that DCP's metadata cannot store, by name; the commit stores them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One save of one rank, with the staged copy of its state.

    The bytes of an arena and the tail are the data object.
    """

    facts: SaveFacts
    """The facts of the save; the commit sets `uri` and `created`."""
    rank: int
    arena: int = 0
    """Number of the arena with the tensors; 0 if the state has no tensors."""
    arena_bytes: int = 0
    """Number of bytes used in the arena."""
    tail: tuple[bytes, ...] = ()
    """Pickled values, which follow the bytes of the arena in the data object."""
    items: tuple[StoredItem, ...] = ()
    """The items of the data object, in the order of the plan."""
    element_sizes: tuple[int, ...] = ()
    """Size of one element of each item in bytes; 0 for a value that is not a tensor."""
    global_plan: GlobalSavePlan | None = None
    """The plan of all ranks; None except on the coordinator."""
    protected: tuple[int, ...] = ()
    """Steps that retention must keep, besides its rules."""
    started: float
    """Time of the call of `save_async`, in seconds since 1970, UTC."""
    staged_seconds: float = 0.0
    """Time for which `save_async` blocked the training, in seconds."""
    failure: str = ""
    """Error message if staging failed. The save then fails on all ranks."""
    is_urgent: bool = False
    """Whether the save starts without waiting for earlier saves."""
    attempt: int = 0
    """Number of earlier attempts whose uploader process died."""
    prefix: str = ""
    """Prefix of the checkpoint; if empty, the prefix of its step."""

    @property
    def num_bytes(self) -> int:
        """Size of the data object in bytes, before compression."""
        return self.arena_bytes + sum(map(len, self.tail))

    @property
    def step(self) -> int:
        """The training step."""
        assert self.facts.step is not None
        return self.facts.step

    @property
    def save_id(self) -> str:
        """Unique name of the save, the same on all ranks."""
        return self.facts.save_id

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.facts.world_size

    @property
    def checkpoint_prefix(self) -> str:
        return self.prefix or step_prefix(self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """The result of a committed save."""

    step: int
    """Number of the training step."""
    uri: str
    """Uri of the checkpoint."""
    save_id: str
    """Unique name of the save."""
    num_bytes: int
    """Size of the data objects that this rank uploaded, in bytes, as they are stored."""
    staged_seconds: float
    """Time for which `save_async` blocked the training, in seconds."""
    upload_seconds: float
    """Time of this rank's upload, in seconds."""
    seconds: float
    """Time from the call of `save_async` to the commit, in seconds."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one rank to the other ranks: its data objects, or an error."""

    rank: int
    objects: tuple[StoredObject, ...] = ()
    """The data objects of the rank; empty in the coordinator's manifest."""
    error: str = ""
    """Message of the error if the save failed; empty otherwise."""
    is_unknown: bool = False
    """Whether it is unknown if the step was committed; then no object is deleted."""


def start_delay(rank: int, world_size: int, *, is_multipart: bool) -> float:
    """Return the seconds after which a rank starts its upload; 0 for few ranks.

    Ranks start in order, so that the uploads of the nodes also end one after another.
    """
    if world_size <= _RANKS_OF_ONE_BURST:
        return 0.0
    return rank / (_MULTIPART_STARTS_PER_SECOND if is_multipart else _STARTS_PER_SECOND)


def first_heartbeat_delay(rank: int, every_seconds: float) -> float:
    """Return the seconds until the first heartbeat of a rank: fewer for ranks that start later."""
    return max(0.0, every_seconds - rank / _HEARTBEATS_PER_SECOND)


def plan_settings(settings: UploadSettings, world_size: int) -> UploadSettings:
    """Return settings whose intervals of heartbeats and polls suit the number of ranks."""
    return replace(
        settings,
        heartbeat_seconds=max(settings.heartbeat_seconds, world_size / _HEARTBEATS_PER_SECOND),
        max_poll_seconds=max(settings.max_poll_seconds, world_size / _POLLS_PER_SECOND),
    )


def plan_transfer(world_size: int) -> TransferOptions:
    """Return the default options with parts that grow with the number of ranks."""
    options = TransferOptions()
    size = max(options.part_size_bytes, min(world_size * _PART_BYTES_PER_RANK, _MAX_PART_BYTES))
    return replace(options, part_size_bytes=size, max_buffered_bytes=4 * size)


def plan_blocks_for(num_bytes: int, world_size: int) -> int:
    """Return the size of an object for `plan_block_size`.

    A commit lists the checksums of all blocks: with the smallest blocks, 1.4 GB for 2 GiB of each
    of 8,000 ranks. Above 16 TiB, the blocks would be larger than a commit may have.
    """
    scaled = num_bytes * max(1, 4 * world_size // _RANKS_OF_ONE_BURST)
    return max(num_bytes, min(scaled, _MAX_PLANNED_BYTES))

"""Request rates of a save with many ranks. Pure.

A bucket serves about 1,000 writes and 5,000 reads a second before Cloud Storage scales it up
(docs.cloud.google.com/storage/docs/request-rate), and all ranks of a save start at the same time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aioflux.options import TransferOptions

if TYPE_CHECKING:
    from aioflux.checkpoint._save.job import UploadSettings

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

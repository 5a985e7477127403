"""Keyword arguments of the datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from aioflux.data._sharding import ShardBy, Tail, check_rank
from aioflux.options import TransferOptions

if TYPE_CHECKING:
    import os
    import ssl

    from aioflux.data._error_policy import OnError
    from aioflux.data._store_reader import Compose
    from aioflux.options import RetryPolicy, Timeouts

DATASET_TRANSFER = TransferOptions(max_in_flight=256)
"""Four times the default of a store. With 20 ms to the first byte and 50 MB/s for each connection,
64 requests in flight read at most 2,900 objects of 100 KiB per second. Measured without workers:
2,300 with 64 requests in flight, 4,700 with 128 and 7,200 with 256, at 202, 165 and 133 us of CPU
for each object. Objects of 3 MiB, of which `max_in_flight_bytes` admits 85, take as long."""


class MapOptions(TypedDict, total=False):
    """Keyword arguments of both datasets."""

    on_error: OnError
    compose: Compose
    cache: str | os.PathLike[str] | None
    cache_bytes: int
    share_listing: bool | str
    transfer: TransferOptions | None
    retry: RetryPolicy | None
    timeouts: Timeouts | None
    credentials: Any
    endpoint_url: str | None
    ssl_context: ssl.SSLContext | None


class IterableOptions(MapOptions, total=False):
    """Keyword arguments of `IterableDataset`."""

    rank: int | None
    world_size: int | None
    shuffle: bool
    seed: int
    tail: Tail
    shard_by: ShardBy
    ordered: bool
    shuffle_buffer: int
    progress: bool


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """Settings for ordering objects and sharing them among ranks."""

    rank: int | None = None
    world_size: int | None = None
    shuffle: bool = False
    seed: int = 0
    tail: Tail = "pad"
    shard_by: ShardBy = "count"

    def __post_init__(self) -> None:
        check_rank(self.rank, self.world_size)
        for name, kind in (("tail", Tail), ("shard_by", ShardBy)):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def unknown_option_error(kind: type, options: dict[str, Any]) -> TypeError:
    """Return the error for keywords that `MapDataset` does not have."""
    names = sorted(options)
    sharding = {name: options[name] for name in names if name in ShardingConfig.__annotations__}
    remedy = (
        f"it takes {', '.join(sorted(MapOptions.__annotations__))}"
        if len(sharding) < len(options)
        else f"pass them to the loader or sampler: {_sharding_call(sharding)}"
    )
    return TypeError(f"{kind.__name__} takes no {', '.join(names)}; {remedy}")


def _sharding_call(sharding: dict[str, Any]) -> str:
    """Return an example of a call that accepts these options, for an error message."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in sharding.items())
    if sharding.keys() <= {"shuffle", "seed", "tail"}:
        return f"aioflux.data.loader(dataset, {arguments})"
    return f"DataLoader(dataset, sampler=aioflux.data.ObjectSampler(dataset, {arguments}))"

"""Keywords of the datasets, and their defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypedDict, cast, get_args

from aioflux.data._cache.cache import Cache
from aioflux.data._sharding import ShardBy, Tail, check_rank
from aioflux.data._store_objects import Access
from aioflux.options import MIB, StoreOptions, TransferOptions

if TYPE_CHECKING:
    import ssl

    from aioflux.data._composites import Compose
    from aioflux.data._on_error import OnError
    from aioflux.options import RetryPolicy, Timeouts

__all__ = [
    "IterableOptions",
    "IterableSettings",
    "MapOptions",
    "MapSettings",
    "Sharing",
    "take_store_options",
]


class MapOptions(TypedDict, total=False):
    """Keywords that both datasets take."""

    on_error: OnError
    compose: Compose
    cache: str | os.PathLike[str] | None
    cache_bytes: int
    transfer: TransferOptions | None
    retry: RetryPolicy | None
    timeouts: Timeouts | None
    credentials: Any
    endpoint_url: str | None
    ssl_context: ssl.SSLContext | None


class IterableOptions(MapOptions, total=False):
    """Keywords of `IterableDataset`."""

    rank: int | None
    world_size: int | None
    shuffle: bool
    seed: int
    tail: Tail
    shard_by: ShardBy
    ordered: bool
    shuffle_buffer: int
    progress: bool


_STORE = frozenset(StoreOptions.__annotations__) - {"progress"}
_TRANSFER = TransferOptions(max_in_flight=128)
"""Twice what a store has under way: a batch of 100 is read in one round of the latency, not in two.
With 20 ms to the first byte, 100 x 100 KiB at once take 37 ms at best, and 73 ms 64 at a time."""


def take_store_options(options: dict[str, Any], *, is_stream: bool = False) -> StoreOptions:
    """Take out of `options` what a store is opened with.

    Args:
        options: What the user gave.
        is_stream: Objects are read ahead across batches: what a store has under way by default is
            enough, and of objects of 3 MiB twice as many were a quarter slower.
    """
    taken = {name: options.pop(name) for name in list(options) if name in _STORE}
    if taken.get("transfer") is None and not is_stream:
        taken["transfer"] = _TRANSFER
    return cast("StoreOptions", taken)


@dataclass(frozen=True, kw_only=True)
class MapSettings:
    """How a dataset reads."""

    on_error: OnError = "raise"
    compose: Compose = "off"
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int = 64 * 1024 * MIB

    def access(self) -> Access:
        """Return how objects are read."""
        if self.cache is not None and not os.fspath(self.cache):
            raise ValueError('cache="" names no directory; None keeps nothing')
        cache = None if self.cache is None else Cache(self.cache, max_bytes=self.cache_bytes)
        return Access(self.compose, cache=cache)

    @classmethod
    def take(cls, kind: type, options: dict[str, Any]) -> Self:
        """Build it of keywords.

        Raises:
            TypeError: One is not known.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(options) - known):
            order = {name: options[name] for name in unknown if name in Sharing.__annotations__}
            remedy = (
                f"it takes {', '.join(sorted(known | _STORE))}"
                if len(order) < len(unknown)
                else f"its order is set by what reads it: {_ordering_call(order)}"
            )
            raise TypeError(f"{kind.__name__} takes no {', '.join(unknown)}; {remedy}")
        return cls(**options)


def _ordering_call(order: dict[str, Any]) -> str:
    """Return the call that orders and shares a `MapDataset` as these keywords say."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in order.items())
    if order.keys() <= {"shuffle", "seed", "tail"}:
        return f"aioflux.data.loader(dataset, {arguments})"
    return f"DataLoader(dataset, sampler=aioflux.data.ObjectSampler(dataset, {arguments}))"


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How objects are ordered and shared."""

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


@dataclass(frozen=True, kw_only=True)
class IterableSettings(Sharing, MapSettings):
    """How a stream is ordered, shared and read."""

    ordered: bool = True
    shuffle_buffer: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle_buffer < 0:
            raise ValueError(f"shuffle_buffer must be 0 or more, not {self.shuffle_buffer!r}")
        if not self.ordered and (self.cache is not None or self.compose != "off"):
            raise ValueError(
                "ordered=False has no effect with cache= or compose=, which read in order; leave "
                "one of them out"
            )

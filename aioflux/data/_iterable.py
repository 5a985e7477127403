"""IterableDataset: objects as a stream, split by rank and worker."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch.distributed as dist
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info

from aioflux.data._objects import Objects
from aioflux.data._sharding import check_rank, rank_from_environment, shard
from aioflux.data._transform import transformed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Unpack

    from aioflux._meta import ObjectMeta
    from aioflux._policy import StoreOptions
    from aioflux.data._sample import Sample

__all__ = ["IterableDataset"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class IterableDataset(TorchIterableDataset[T_co]):
    """The objects below a uri as a stream, sorted by key, each read by one worker of one rank.

    Lists once, when it is built, and fetches ahead of the consumer within the limits of
    `TransferOptions`. Reads are pinned to the generations that were listed: an object that was
    deleted or replaced since is a NotFoundError that names it, also through DataLoader.

    Rank and world_size are, in this order: those given here; those of torch.distributed, where it
    is initialised when an iteration begins; the environment variables RANK and WORLD_SIZE, which
    torchrun sets; else 0 of 1. Each rank reads every world_size-th object, so that two ranks may
    differ by one object: where they must take equally many steps, count steps or drop the rest.

    Objects of size 0 whose key ends with "/" are left out: consoles put them in place of empty
    directories.

    Without a transform the items are `Sample`, which DataLoader's default collate does not know:
    give a transform that returns tensors, numbers, strings or tuples of these, or `DataLoader(...,
    collate_fn=list)` for lists of samples. With spawn or forkserver workers the transform must
    pickle, as a function at the top of a module does.
    """

    @overload
    def __init__(
        self: IterableDataset[Sample],
        uri: str,
        *,
        transform: None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[StoreOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        uri: str,
        *,
        transform: Callable[[Sample], T_co],
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[StoreOptions],
    ) -> None: ...
    def __init__(
        self,
        uri: str,
        *,
        transform: Callable[[Sample], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        """List the objects below `uri`.

        Args:
            uri: As `aioflux.open_store` takes it; keys are relative to it.
            transform: Makes an item of a `Sample`, in the process that reads it.
            rank: Rank of this process, from 0; goes with `world_size`.
            world_size: Number of ranks that share the objects.
            options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and
                `ssl_context`, as `aioflux.open_store`. Limits hold for each DataLoader worker by
                itself.

        Raises:
            NotFoundError: There is no object below `uri`.
            ValueError: `rank` and `world_size` do not go together.
        """
        given = check_rank(rank, world_size)
        self._build(Objects.listed(uri, options), transform, given)

    @overload
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[StoreOptions],
    ) -> IterableDataset[Sample]: ...
    @overload
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: Callable[[Sample], T],
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[StoreOptions],
    ) -> IterableDataset[T]: ...
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: Callable[[Sample], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Unpack[StoreOptions],
    ) -> IterableDataset[Any]:
        """Build a dataset of these objects, in this order, without a listing.

        Args:
            uri: What the keys are relative to.
            keys: Names, read in whatever generation they have then; or metadata of a listing, which
                pins them. All ranks must give the same.
            transform: As for the class.
            rank: As for the class.
            world_size: As for the class.
            options: As for the class.
        """
        dataset: IterableDataset[Any] = cls.__new__(cls)
        dataset._build(Objects.named(uri, keys, options), transform, check_rank(rank, world_size))
        return dataset

    def _build(
        self,
        objects: Objects,
        transform: Callable[[Sample], Any] | None,
        given: tuple[int, int] | None,
    ) -> None:
        self._objects = objects
        self._transform = transform
        self._given = given
        self._inherited: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"<IterableDataset of {len(self._objects)} objects below {self._objects.uri}>"

    def __iter__(self) -> Iterator[T_co]:
        """Read the share of this worker, or of the rank where there are no workers."""
        rank, world_size = self._rank()
        worker = get_worker_info()
        share = shard(
            len(self._objects),
            rank=rank,
            world_size=world_size,
            worker_id=worker.id if worker else 0,
            num_workers=worker.num_workers if worker else 1,
        )
        for sample in self._objects.read(share):
            yield transformed(sample, self._transform)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group; it is of the rank that pickled the dataset for it.
        return {**self.__dict__, "_inherited": _group_rank() or self._inherited}

    def _rank(self) -> tuple[int, int]:
        known = self._given or _group_rank() or self._inherited
        return known or rank_from_environment(os.environ) or (0, 1)


def _group_rank() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None

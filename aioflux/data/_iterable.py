"""IterableDataset: objects as a stream, split by rank and worker."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info

from aioflux.data._objects import Objects
from aioflux.data._on_error import Failures
from aioflux.data._options import IterableSettings, take_store_options
from aioflux.data._progress import shown
from aioflux.data._reading import How, Reading
from aioflux.data._resume import MARK, VERSION, Phase, check_state, take_share
from aioflux.data._sharding import Reader, rank_from_environment
from aioflux.data._shared import Shared
from aioflux.data._shuffle import permutation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from typing import Unpack

    from aioflux._meta import ObjectMeta
    from aioflux.data._meter import LoadStats
    from aioflux.data._options import IterableOptions
    from aioflux.data._records import Records
    from aioflux.data._resume import Progress
    from aioflux.data._sample import Sample

__all__ = ["IterableDataset"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Begun(NamedTuple):
    """An iteration that was begun in this process."""

    epoch: int
    phases: tuple[Phase, ...]
    reader: Reader
    reading: Reading


class IterableDataset(TorchIterableDataset[T_co]):
    """The objects below a uri as a stream, each read by one worker of one rank.

    Lists once, when it is built, and fetches ahead of the consumer within the limits of
    `TransferOptions`, across the borders of batches. Reads are pinned to the generations that were
    listed: an object that was deleted or replaced since is a NotFoundError that names it, also
    through DataLoader.

    Rank and world_size are, in this order: those given here; those of torch.distributed, where it
    is initialised when an iteration begins; the environment variables RANK and WORLD_SIZE, which
    torchrun sets; else 0 of 1. All ranks take equally many objects, unless `tail="uneven"`.

    With `shuffle=True` all objects are permuted, not only those that are near each other, and each
    `set_epoch` permutes them anew. Call it before each epoch; workers that live on hear of it, too.

    `state_dict` tells at any sample what was read, and `load_state_dict` goes on from there, in
    processes of their own through torchdata's `StatefulDataLoader`. `merge_states` makes one of the
    states of all ranks and workers, with which other numbers of ranks and workers go on.

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
        uri: str | Sequence[str],
        *,
        transform: None = None,
        records: None = None,
        **options: Unpack[IterableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Any], T_co],
        records: Records[Any] | None = None,
        **options: Unpack[IterableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        uri: str | Sequence[str],
        *,
        transform: None = None,
        records: Records[T_co],
        **options: Unpack[IterableOptions],
    ) -> None: ...
    def __init__(
        self,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Any], Any] | None = None,
        records: Records[Any] | None = None,
        **options: Any,
    ) -> None:
        """List the objects below `uri`.

        Args:
            uri: As `aioflux.open_store` takes it; keys are relative to it. Of several uris the
                objects follow each other; limits hold for each uri by itself.
            transform: Makes an item of a `Sample`, or of a record, in the process that reads it.
            records: Makes the records of an object, each of which is an item then: a function of
                its `Sample`, or one of `aioflux.data.jsonl()`, `tar()` and `parquet()`. These take
                objects larger than `TransferOptions.max_buffered_bytes` as they stream in.
            options: `rank` (of this process, from 0) goes with `world_size` (how many ranks share
                the objects).

                `shuffle=False` keeps the order of the keys; `seed=0` goes with `shuffle=True`.

                `tail="pad"`: where the objects do not go evenly into the ranks, "pad" reads the
                first ones twice, so that each is read and no rank waits for another; "drop" leaves
                out the last ones; "uneven" lets some ranks read one more, as evaluations need it.

                `shard_by="count"`; "bytes" gives ranks and workers alike many bytes, too.

                `ordered=True`; False hands objects out as they arrive.

                `shuffle_buffer=0`: how many records wait to be mixed, with `records`.

                `on_error="raise"`; "skip" logs what cannot be read or transformed, counts it in
                `stats.num_skipped` and goes on; a function of the error and the uri may also raise.

                `compose="off"`; "on" composes small objects on the service and reads many at once;
                "auto" measures both on the first objects, and keeps what is faster.

                `cache=None`; a local directory keeps objects between epochs and runs, `cache_bytes`
                (64 GiB) at most, and what is in it is not requested again.

                `progress=False`; True shows a line on stderr, of rank 0.

                `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context` as
                `aioflux.open_store`. Limits hold for each DataLoader worker by itself.

        Raises:
            NotFoundError: There is no object below `uri`.
            ValueError: Options do not go together, such as `rank` without `world_size`.
        """
        store_options = take_store_options(options)
        settings = IterableSettings.take(type(self), options)
        uris = [uri] if isinstance(uri, str) else list(uri)
        objects = Objects.listed(uris, store_options, settings.access())
        self._build(objects, transform, records, settings)

    @overload
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: None = None,
        records: None = None,
        **options: Unpack[IterableOptions],
    ) -> IterableDataset[Sample]: ...
    @overload
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: Callable[[Any], T],
        records: Records[Any] | None = None,
        **options: Unpack[IterableOptions],
    ) -> IterableDataset[T]: ...
    @overload
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: None = None,
        records: Records[T],
        **options: Unpack[IterableOptions],
    ) -> IterableDataset[T]: ...
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: Callable[[Any], Any] | None = None,
        records: Records[Any] | None = None,
        **options: Any,
    ) -> IterableDataset[Any]:
        """Build a dataset of these objects, in this order, without a listing.

        Args:
            uri: What the keys are relative to.
            keys: Names, read in whatever generation they have then; or metadata of a listing, which
                pins them. All ranks must give the same.
            transform: As for the class.
            records: As for the class.
            options: As for the class.
        """
        store_options = take_store_options(options)
        settings = IterableSettings.take(cls, options)
        dataset: IterableDataset[Any] = cls.__new__(cls)
        objects = Objects.named(uri, keys, store_options, settings.access())
        dataset._build(objects, transform, records, settings)
        return dataset

    @overload
    @classmethod
    def from_manifest(
        cls,
        uri: str | Sequence[str],
        *,
        transform: None = None,
        records: None = None,
        **options: Unpack[IterableOptions],
    ) -> IterableDataset[Sample]: ...
    @overload
    @classmethod
    def from_manifest(
        cls,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Any], T],
        records: Records[Any] | None = None,
        **options: Unpack[IterableOptions],
    ) -> IterableDataset[T]: ...
    @overload
    @classmethod
    def from_manifest(
        cls,
        uri: str | Sequence[str],
        *,
        transform: None = None,
        records: Records[T],
        **options: Unpack[IterableOptions],
    ) -> IterableDataset[T]: ...
    @classmethod
    def from_manifest(
        cls,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Any], Any] | None = None,
        records: Records[Any] | None = None,
        **options: Any,
    ) -> IterableDataset[Any]:
        """Build a dataset of a listing that `Store.save_manifest` or `aioflux ls` has saved.

        One request, however many objects there are, and the same objects in every process and run.

        Args:
            uri: Of the manifest, or of several.
            transform: As for the class.
            records: As for the class.
            options: As for the class.

        Raises:
            NotFoundError: There is no such object, or it lists none.
            ValueError: It is no manifest, or a damaged one.
        """
        store_options = take_store_options(options)
        settings = IterableSettings.take(cls, options)
        dataset: IterableDataset[Any] = cls.__new__(cls)
        uris = [uri] if isinstance(uri, str) else list(uri)
        objects = Objects.of_manifests(uris, store_options, settings.access())
        dataset._build(objects, transform, records, settings)
        return dataset

    def _build(
        self,
        objects: Objects,
        transform: Callable[[Any], Any] | None,
        records: Records[Any] | None,
        settings: IterableSettings,
    ) -> None:
        if settings.shuffle_buffer and records is None:
            raise ValueError(
                "shuffle_buffer mixes records and has no effect without records=; "
                "shuffle=True permutes all objects"
            )
        self._objects = objects
        self._settings = settings
        self._shared = Shared()
        self._how = How(
            transform,
            records,
            settings.ordered,
            settings.shuffle_buffer,
            Failures(settings.on_error, objects.meter),
            objects.meter,
            is_streaming=settings.cache is None,
        )
        if settings.shard_by == "bytes":
            objects.sizes([])
        self._inherited: tuple[int, int] | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._num_loads = 0
        self._begun: _Begun | None = None

    def __repr__(self) -> str:
        return f"<IterableDataset of {len(self._objects)} objects below {self._objects.uri}>"

    @property
    def num_objects(self) -> int:
        """Objects that all ranks share."""
        return len(self._objects)

    @property
    def stats(self) -> LoadStats:
        """What this process and its workers have read, waited for and skipped so far."""
        return self._how.meter.snapshot()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins with the next iteration: it orders the objects anew.

        Args:
            epoch: From 0. All ranks must say the same.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, not {epoch}")
        self._shared.epoch = epoch

    def __iter__(self) -> Iterator[T_co]:
        """Read the share of this worker, or of the rank where there are no workers."""
        if get_worker_info() is not None and self._num_loads != self._shared.num_loads:
            raise RuntimeError(
                "a state was loaded after this worker had started, which has the one from before; "
                "load it first, and build the DataLoader then"
            )
        # Before anything is read: StatefulDataLoader asks for the state then.
        self._begun = self._begin()
        self._shared.use()
        items = self._begun.reading.items()
        reader = self._begun.reader
        if self._settings.progress and reader.rank == 0 and reader.worker_id == 0:
            return self._shown(items, reader)
        return items

    def _shown(self, items: Generator[T_co, None, None], reader: Reader) -> Iterator[T_co]:
        label = f"{self._objects.uri} epoch {self._shared.epoch or 0}"
        total = len(self._objects) // reader.world_size
        with closing(items):
            yield from shown(items, self._how.meter, label=label, total_objects=total)

    def _begin(self) -> _Begun:
        reader = self._reader()
        state = None if self._shared.is_used() else self._resumed
        epoch = self._shared.epoch
        if state is not None and epoch is None:
            epoch = self._shared.epoch = state["epoch"]
        if state is not None and epoch != state["epoch"]:
            begun = self._reading(reader, state["epoch"], state)
            if begun.reading.has_left():
                raise ValueError(
                    f"a state of epoch {state['epoch']} was loaded, which is not over, and "
                    f"set_epoch({epoch}) called; call set_epoch({state['epoch']}) to go on with it"
                )
            state = None
        return self._reading(reader, epoch or 0, state)

    def _reading(self, reader: Reader, epoch: int, state: Mapping[str, Any] | None) -> _Begun:
        settings = self._settings
        phases = () if state is None else tuple(map(Phase.unpack, state["phases"]))
        past, share, progress = take_share(
            self._order(epoch),
            phases,
            reader,
            tail=settings.tail,
            sizes=self._sizes if settings.shard_by == "bytes" else None,
        )
        who = f"{settings.seed} {epoch} {reader} {progress.num_taken}"
        reading = Reading(self._objects, share, progress, self._how, seed=who)
        return _Begun(epoch, past, reader, reading)

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._settings.shuffle:
            return torch.arange(len(self._objects))
        return permutation(len(self._objects), seed=self._settings.seed, epoch=epoch)

    def _sizes(self, positions: torch.Tensor) -> list[int]:
        return self._objects.sizes(positions.tolist())

    def _header(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "num_objects": len(self._objects),
            "listing": self._objects.checksum(),
            "shuffle": settings.shuffle,
            "seed": settings.seed,
            "tail": settings.tail,
            "shard_by": settings.shard_by,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what of the epoch was read, by this worker or by this rank without workers.

        It consists of numbers, strings, lists and dictionaries.

        Raises:
            RuntimeError: Workers read, which only they know of: take the state of torchdata's
                `StatefulDataLoader`, or of the dataset within a worker.
        """
        if self._begun is None:
            if get_worker_info() is None and self._shared.is_used_by_any():
                raise RuntimeError(
                    "workers have read, and this process does not know how far; use "
                    "torchdata.stateful_dataloader.StatefulDataLoader and its state_dict()"
                )
            if self._resumed is not None:
                return dict(self._resumed)
            return {MARK: VERSION, "epoch": self._shared.epoch or 0, **self._header(), "phases": []}
        epoch, past, reader, reading = self._begun
        who: dict[tuple[int, int], Progress] = {(reader.rank, reader.worker_id): reading.progress}
        now = Phase(reader.world_size, reader.num_workers, who)
        phases = [phase.pack() for phase in (*past, now)]
        return {MARK: VERSION, "epoch": epoch, **self._header(), "phases": phases}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next iteration of this dataset, and of each worker it gets.

        The one after that reads a whole epoch again. Where the state is of other numbers of ranks
        or workers, it must be `merge_states` of all of theirs.

        Args:
            state: From `state_dict` or `merge_states`.

        Raises:
            ValueError: It is of other objects, or of another order.
        """
        check_state(state, self._header())
        self._resumed = dict(state)
        self._begun = None
        self._shared.count_load()
        if get_worker_info() is None:
            self._num_loads = self._shared.num_loads

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group; it is of the rank that pickled the dataset for it.
        inherited = _group_rank() or self._inherited
        return {**self.__dict__, "_inherited": inherited, "_begun": None}

    def _reader(self) -> Reader:
        rank, world_size = self._rank()
        worker = get_worker_info()
        if worker is None:
            return Reader(rank, world_size)
        return Reader(rank, world_size, worker.id, worker.num_workers)

    def _rank(self) -> tuple[int, int]:
        rank, world_size = self._settings.rank, self._settings.world_size
        if rank is not None and world_size is not None:
            return rank, world_size
        known = _group_rank() or self._inherited
        return known or rank_from_environment(os.environ) or (0, 1)


def _group_rank() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None

"""IterableDataset: objects as a stream, split by rank and worker."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, cast, overload

from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info

from aioflux.data._epoch import EpochPlanner
from aioflux.data._epoch_reader import EpochReader, ReadConfig
from aioflux.data._error_policy import ErrorPolicy
from aioflux.data._options import ShardingConfig
from aioflux.data._progress import show_progress
from aioflux.data._sample import Item_co, ItemOfRecord, Record
from aioflux.data._source import from_keys, from_manifests, open_source
from aioflux.data._store_reader import DEFAULT_CACHE_BYTES, FetchConfig
from aioflux.data._transform import check_pickles

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from typing import Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._composed_read import Compose
    from aioflux.data._counters import LoadStats
    from aioflux.data._epoch import EpochPlan
    from aioflux.data._error_policy import OnError
    from aioflux.data._options import IterableOptions
    from aioflux.data._records.formats import Records
    from aioflux.data._sharding import ShardBy, Tail
    from aioflux.data._source import SourceOpener
    from aioflux.options import RetryPolicy, Timeouts, TransferOptions

__all__ = ["IterableDataset"]


class IterableDataset(TorchIterableDataset[Item_co]):
    """The objects below a uri as a stream, each read by one worker of one rank.

    Lists once, when it is built, and prefetches within the limits of `TransferOptions`, across
    batches. Reads are pinned to the generations that were listed: an object that was deleted or
    replaced since raises a NotFoundError that names it, also through DataLoader.

    Rank and world_size are, in this order: those given here; those of torch.distributed, if it
    is initialised when an iteration begins; the environment variables RANK and WORLD_SIZE, which
    torchrun sets; else 0 of 1. All ranks read the same number of objects, unless `tail="uneven"`.

    With `shuffle=True` all objects are permuted, not only those that are near each other, and each
    `set_epoch` changes the permutation. Call it before each epoch; it reaches persistent
    workers, too.

    `state_dict` returns the progress after any item, and `load_state_dict` resumes from it; with
    worker processes, use torchdata's `StatefulDataLoader`. `merge_states` merges the states of all
    ranks and workers into one, from which other numbers of ranks and workers can resume.

    Objects of size 0 whose key ends with "/" are left out: consoles put them in place of empty
    directories.

    Without a transform the items are `Sample`, which DataLoader's default collate rejects:
    give a transform that returns tensors, numbers, strings or tuples of these, or `DataLoader(...,
    collate_fn=list)` for lists of samples. With spawn or forkserver workers the transform must
    pickle, as a function at the top of a module does.
    """

    @overload
    def __init__(
        self,
        uri: str | Sequence[str] | SourceOpener,
        *,
        transform: Callable[[Any], Item_co],
        records: Records[Any] | None = None,
        **options: Unpack[IterableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: IterableDataset[Record],
        uri: str | Sequence[str] | SourceOpener,
        *,
        transform: None = None,
        records: Records[Record] | None = None,
        **options: Unpack[IterableOptions],
    ) -> None: ...
    def __init__(
        self,
        uri: str | Sequence[str] | SourceOpener,
        *,
        transform: Callable[[Any], Any] | None = None,
        records: Records[Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "pad",
        shard_by: ShardBy = "count",
        ordered: bool = True,
        shuffle_buffer: int = 0,
        progress: bool = False,
        on_error: OnError = "raise",
        compose: Compose = "off",
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        transfer: TransferOptions | None = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        credentials: Any = None,
        endpoint_url: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """List the objects below `uri`.

        Args:
            uri: As in `aioflux.open_store`; keys are relative to it. The objects of
                several uris are in the order of the uris; limits apply to each uri separately.
            transform: Makes an item of a `Sample`, or of a record, in the process that reads it.
            records: Makes the records of an object, each of which is an item then: a function of
                its `Sample`, or one of `aioflux.data.jsonl()`, `tar()` and `parquet()`. These
                stream objects larger than `TransferOptions.max_buffered_bytes`.
            rank: Rank of this process, from 0; needs `world_size`.
            world_size: Number of ranks that share the objects.
            shuffle: Whether all objects are permuted, differently in each epoch; else they are
                in the order of their keys.
            seed: Seed of the permutations and of the shuffle buffer.
            tail: If the objects do not divide evenly among the ranks, "pad" reads the first ones
                twice, so that each is read and no rank waits for another; "drop" leaves out the
                last ones; "uneven" lets some ranks read one more, for evaluation.
            shard_by: "bytes" also balances bytes among ranks and workers, which takes seconds at
                the start of an epoch of a million objects.
            ordered: False yields objects as they arrive.
            shuffle_buffer: Size of the shuffle buffer in records; needs `records`.
            progress: Whether rank 0 shows a progress line on stderr.
            on_error: "skip" logs objects that cannot be read or transformed, counts them in
                `stats.num_skipped` and goes on; a function of the error and the uri may also raise.
            compose: "on" composes small objects on the service and reads each composite by one
                request; "auto" measures reads with and without it, and keeps the faster.
            cache: Local directory that keeps objects between epochs and runs; cached objects are
                not requested again.
            cache_bytes: Size of the cache, at most; 64 GiB by default.
            transfer: As in `aioflux.open_store`. Limits apply to each DataLoader worker
                separately.
            retry: As in `aioflux.open_store`.
            timeouts: As in `aioflux.open_store`.
            credentials: As in `aioflux.open_store`.
            endpoint_url: As in `aioflux.open_store`.
            ssl_context: As in `aioflux.open_store`.

        Raises:
            NotFoundError: There is no object below `uri`.
            ValueError: Options contradict each other, such as `rank` without `world_size`.
        """
        self._sharding = ShardingConfig(
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            shard_by=shard_by,
        )
        if not ordered and (cache is not None or compose != "off"):
            raise ValueError(
                "ordered=False has no effect with cache= or compose=, which read in order; leave "
                "one of them out"
            )
        fetch_config = FetchConfig.with_cache(cache, cache_bytes=cache_bytes, compose=compose)
        self._counters = fetch_config.counters
        self._config = ReadConfig(
            transform=transform,
            records=records,
            is_ordered=ordered,
            shuffle_buffer=shuffle_buffer,
            may_stream=cache is None,
            errors=ErrorPolicy(on_error, self._counters),
            counters=self._counters,
        )
        self._shows_progress = progress
        self._source = open_source(
            uri,
            {
                "transfer": transfer,
                "retry": retry,
                "timeouts": timeouts,
                "credentials": credentials,
                "endpoint_url": endpoint_url,
                "ssl_context": ssl_context,
            },
            fetch_config,
        )
        self._planner = EpochPlanner(self._source, self._sharding, has_workers=True)
        self._current: tuple[EpochPlan, EpochReader] | None = None

    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: Callable[[Record], ItemOfRecord] | None = None,
        records: Records[Record] | None = None,
        **options: Unpack[IterableOptions],
    ) -> IterableDataset[ItemOfRecord]:
        """Build a dataset of these objects, in this order, without a listing.

        Args:
            uri: Prefix that the keys are relative to.
            keys: Keys, whose newest generations are read; or metadata of a listing, which pins
                generations. All ranks must pass the same.
            transform: As for the class.
            records: As for the class.
            options: As for the class.
        """
        dataset = cast("IterableDataset[ItemOfRecord]", cls.__new__(cls))
        build: Any = IterableDataset.__init__  # no overload matches: both may be None
        build(dataset, from_keys(uri, keys), transform=transform, records=records, **options)
        return dataset

    @classmethod
    def from_manifest(
        cls,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Record], ItemOfRecord] | None = None,
        records: Records[Record] | None = None,
        **options: Unpack[IterableOptions],
    ) -> IterableDataset[ItemOfRecord]:
        """Build a dataset of a listing that `Store.save_manifest` or `aioflux ls` has saved.

        Costs one request for any number of objects; every process and run has the same ones.

        Args:
            uri: Uri of the manifest, or of several.
            transform: As for the class.
            records: As for the class.
            options: As for the class.

        Raises:
            NotFoundError: There is no such object, or it lists none.
            ValueError: It is not a manifest, or a damaged one.
        """
        dataset = cast("IterableDataset[ItemOfRecord]", cls.__new__(cls))
        build: Any = IterableDataset.__init__  # no overload matches: both may be None
        build(dataset, from_manifests(uri), transform=transform, records=records, **options)
        return dataset

    def __getstate__(self) -> dict[str, Any]:
        check_pickles(transform=self._config.transform, records=self._config.records)
        return {**self.__dict__, "_current": None}

    def __repr__(self) -> str:
        return f"<IterableDataset of {len(self._source)} objects below {self._source.uri}>"

    @property
    def has_transform(self) -> bool:
        """Return whether items are results of a transform, rather than samples or records."""
        return self._config.transform is not None

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and the number of ranks, as they are known now."""
        return self._planner.rank()

    @property
    def num_objects(self) -> int:
        """Objects that all ranks share."""
        return len(self._source)

    @property
    def stats(self) -> LoadStats:
        """Objects read and skipped, and times, of this process and its workers so far."""
        return self._counters.snapshot()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which changes the order of the objects.

        Args:
            epoch: From 0. All ranks must set the same.
        """
        self._planner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Item_co]:
        """Read the share of this worker, or of the rank if there are no workers."""
        # At once, not at the first item: StatefulDataLoader requests the state before it.
        try:
            plan = self._planner.plan()
        except (RuntimeError, ValueError) as exc:
            if get_worker_info() is None:
                raise
            # Raised here, it would end a persistent worker, and the main process would not get it.
            return _raise_at_first_item(exc)
        self._planner.mark_started()
        # This text, and so the repr of Reader, determines the order of resumed epochs: never
        # change it.
        seed = f"{self._sharding.seed} {plan.epoch} {plan.reader} {plan.progress.num_started}"
        reader = EpochReader(self._source, plan.share, plan.progress, self._config, seed=seed)
        self._current = plan, reader
        if self._shows_progress and plan.reader.rank == 0:
            return self._items_with_progress(reader.items(), plan)
        return reader.items()

    def _items_with_progress(
        self, items: Generator[Item_co, None, None], plan: EpochPlan
    ) -> Iterator[Item_co]:
        with closing(items):
            yield from show_progress(
                items,
                self._counters,
                label=f"{self._source.uri} epoch {plan.epoch}",
                total_objects=plan.num_remaining(),
                num_workers=plan.reader.num_workers,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in the epoch of this worker, or of this rank without workers.

        It consists of numbers, strings, lists and dictionaries.

        Raises:
            RuntimeError: Workers read, and only they know how far: use the state of torchdata's
                `StatefulDataLoader`, or of the dataset within a worker.
        """
        if self._current is None:
            return self._planner.state(None, None)
        plan, reader = self._current
        return self._planner.state(plan, reader.progress)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state in the next iteration, here or in the workers of a DataLoader.

        Later iterations read whole epochs. If the numbers of ranks or workers have changed, pass
        the result of `merge_states`.

        Args:
            state: From `state_dict` or `merge_states`.

        Raises:
            ValueError: It is of other objects, or of another order.
        """
        self._planner.load(state)
        self._current = None


def _raise_at_first_item(error: Exception) -> Iterator[Any]:
    raise error
    yield

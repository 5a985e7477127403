"""IterableDataset: a stream of objects, shared among ranks and workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info

from aioflux.data._epoch import EpochPlanner
from aioflux.data._epoch_reader import EpochReader, ReadConfig
from aioflux.data._error_policy import ErrorPolicy
from aioflux.data._job_listing import Sharing
from aioflux.data._options import DATASET_TRANSFER, ShardingConfig
from aioflux.data._progress import show_progress
from aioflux.data._sample import Item_co, ItemOfRecord, Record
from aioflux.data._source import from_keys, from_manifests, open_source
from aioflux.data._store_reader import DEFAULT_CACHE_BYTES, FetchConfig
from aioflux.data._transform import check_pickles

if TYPE_CHECKING:
    import os
    import ssl

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._counters import LoadStats
    from aioflux.data._epoch import EpochPlan
    from aioflux.data._error_policy import OnError
    from aioflux.data._options import IterableOptions
    from aioflux.data._records.formats import Records
    from aioflux.data._resume import ShareProgress
    from aioflux.data._sharding import ShardBy, Tail
    from aioflux.data._source import Lister
    from aioflux.data._store_reader import Compose
    from aioflux.data._transform import TransformThreads
    from aioflux.options import RetryPolicy, Timeouts, TransferOptions


class IterableDataset(TorchIterableDataset[Item_co]):
    """The objects below a uri as a stream; each object is read by one worker of one rank.

    The objects are listed once, in the constructor, and prefetched across batches, within the
    limits of `TransferOptions`. Reads are pinned to the listed generations: an object that was
    deleted or replaced after the listing raises NotFoundError with its uri, also through
    DataLoader.

    Rank and world_size are read from the first available source: the arguments, torch.distributed
    when an iteration starts, or the environment variables RANK and WORLD_SIZE, which torchrun sets.
    Otherwise they are 0 and 1. All ranks read the same number of objects, unless `tail="uneven"`.

    With `shuffle=True` all objects are permuted, differently in each epoch. Call `set_epoch` before
    each epoch; persistent workers also use the new epoch.

    `state_dict` returns the progress after any item, and `load_state_dict` resumes from that
    progress; with worker processes, use torchdata's `StatefulDataLoader`. To resume with other
    numbers of ranks and workers, merge the states of all ranks by `merge_states`.

    Objects of size 0 whose key ends with "/" are left out: web consoles create them to show empty
    directories.

    Without a transform the items are `Sample`, which the default `collate_fn` of DataLoader
    rejects. Pass a transform that returns tensors, numbers, strings or tuples, or
    `collate_fn=list` for batches that are lists of samples. Spawn and forkserver workers need a
    transform that can be pickled, such as a function at the top of a module.
    """

    @overload
    def __init__(
        self,
        uri: str | Sequence[str] | Lister,
        *,
        transform: Callable[[Any], Item_co],
        records: Records[Any] | None = None,
        **options: Unpack[IterableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: IterableDataset[Record],
        uri: str | Sequence[str] | Lister,
        *,
        transform: None = None,
        records: Records[Record] | None = None,
        **options: Unpack[IterableOptions],
    ) -> None: ...
    def __init__(
        self,
        uri: str | Sequence[str] | Lister,
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
        share_listing: bool | str = True,
        transfer: TransferOptions | None = None,
        retry: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        credentials: Any = None,
        endpoint_url: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """List the objects below `uri`.

        Args:
            uri: As in `aioflux.open_store`; keys are relative to it. With several uris, objects
                are in the order of the uris, and limits apply to each uri separately.
            transform: Called with each `Sample` or record, in the process that reads it; returns
                the item.
            records: Decodes an object into records, each of which is an item: a function of a
                `Sample`, or `aioflux.data.jsonl()`, `tar()` or `parquet()`. These three stream
                objects larger than `TransferOptions.max_buffered_bytes`.
            rank: Rank of this process, from 0; requires `world_size`.
            world_size: Number of ranks that share the objects.
            shuffle: Whether all objects are permuted, differently in each epoch; by default they
                are in the order of their keys.
            seed: Seed of the permutations and of the shuffle buffer.
            tail: Treatment of the last objects if they do not divide evenly among the ranks. "pad"
                repeats the first objects, so that every object is read and all ranks read the same
                number. "drop" leaves out the last objects. "uneven" lets some ranks read one
                object more, for evaluation.
            shard_by: "bytes" also balances bytes among ranks and workers, which takes seconds at
                the start of an epoch of a million objects.
            ordered: Whether objects are yielded in order; False yields them as they arrive.
            shuffle_buffer: Number of records in the shuffle buffer; requires `records`.
            progress: Whether rank 0 shows a progress line on stderr.
            on_error: "skip" logs objects that cannot be read or transformed, counts them in
                `stats.num_skipped` and continues. A function is called with the error and the uri,
                and may also raise.
            compose: "on" composes small objects on the service and reads each composite by one
                request. Faster only at a high latency, for objects of about 10 kB.
            cache: Local directory that stores objects for later epochs and runs; cached objects are
                not requested again.
            cache_bytes: Largest size of the cache in bytes; 64 GiB by default.
            share_listing: Whether one rank of a process group lists for all ranks. A uri also means
                yes: large listings are handed over by a temporary object below it.
            transfer: As in `aioflux.open_store`, but with 256 requests in flight by default.
                Limits apply to each DataLoader worker separately.
            retry: As in `aioflux.open_store`.
            timeouts: As in `aioflux.open_store`.
            credentials: As in `aioflux.open_store`.
            endpoint_url: As in `aioflux.open_store`.
            ssl_context: As in `aioflux.open_store`.

        Raises:
            NotFoundError: There is no object below `uri`.
            TransientError: The rank that lists for all ranks did not finish in time.
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
                "out ordered=False, or cache= and compose="
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
                "transfer": transfer or DATASET_TRANSFER,
                "retry": retry,
                "timeouts": timeouts,
                "credentials": credentials,
                "endpoint_url": endpoint_url,
                "ssl_context": ssl_context,
            },
            fetch_config,
            Sharing(world_size != 1 and share_listing, is_same_on_all_ranks=rank is None),
        )
        self._planner = EpochPlanner(self._source, self._sharding, has_workers=True)
        self._current: tuple[EpochPlan, Callable[[], ShareProgress]] | None = None
        """Plan of the last iteration, and a function that returns its progress."""

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
        """Build a dataset of the given objects, in the given order, without a listing.

        Args:
            uri: Prefix that the keys are relative to.
            keys: Keys, whose newest generations are read; or metadata of a listing, which pins
                generations. All ranks must pass the same keys.
            transform: As for the class.
            records: As for the class.
            options: As for the class.
        """
        dataset = cast("IterableDataset[ItemOfRecord]", cls.__new__(cls))
        build: Any = IterableDataset.__init__  # no overload fits: transform may be None
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

        Sends one request for any number of objects. Every process and run has the same objects.

        Args:
            uri: Uri of one manifest, or of several.
            transform: As for the class.
            records: As for the class.
            options: As for the class.

        Raises:
            NotFoundError: The manifest does not exist, or contains no objects.
            ValueError: The object is not a manifest, or is damaged.
        """
        dataset = cast("IterableDataset[ItemOfRecord]", cls.__new__(cls))
        build: Any = IterableDataset.__init__  # no overload fits: transform may be None
        build(dataset, from_manifests(uri), transform=transform, records=records, **options)
        return dataset

    def __getstate__(self) -> dict[str, Any]:
        check_pickles(transform=self._config.transform, records=self._config.records)
        return {**self.__dict__, "_current": None}

    def __repr__(self) -> str:
        return f"<IterableDataset of {len(self._source)} objects below {self._source.uri}>"

    @property
    def has_transform(self) -> bool:
        """Return whether items are results of a transform, and not samples or records."""
        return self._config.transform is not None

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and the number of ranks, which torch.distributed may change later."""
        return self._planner.rank()

    @property
    def num_objects(self) -> int:
        """Number of objects of all ranks."""
        return len(self._source)

    @property
    def stats(self) -> LoadStats:
        """Counts and times of all reads so far, in this process and its workers."""
        return self._counters.snapshot()

    @property
    def epoch_stats(self) -> LoadStats:
        """Counts and times since the start of this epoch, or since `set_epoch`."""
        return self._counters.epoch_snapshot()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which changes the order of the objects.

        Args:
            epoch: Number of the epoch, from 0; the same on all ranks.
        """
        self._planner.set_epoch(epoch)
        self._counters.start_epoch()

    def __iter__(self) -> Iterator[Item_co]:
        """Read the share of this worker, or of the rank if there are no workers."""
        self._counters.start_epoch()
        # Plan now: StatefulDataLoader calls `state_dict` before it requests the first item.
        try:
            plan, reader = self._start_epoch()
        except (RuntimeError, ValueError) as exc:
            if get_worker_info() is None:
                raise
            # An error here would end a persistent worker without reaching the main process.
            return _raise_at_first_item(exc)
        self._current = plan, lambda: reader.progress
        return self._items(plan, reader)

    def _start_epoch(self) -> tuple[EpochPlan, EpochReader]:
        """Plan an iteration, and return its reader."""
        plan = self._planner.plan()
        self._planner.mark_started()
        # Never change this text or the repr of Reader: resumed epochs depend on the seed.
        seed = f"{self._sharding.seed} {plan.epoch} {plan.reader} {plan.progress.num_started}"
        reader = EpochReader(self._source, plan.share, plan.progress, self._config, seed=seed)
        return plan, reader

    def _items(
        self, plan: EpochPlan, reader: EpochReader, threads: TransformThreads | None = None
    ) -> Generator[Item_co, None, None]:
        items = reader.items(threads)
        if self._shows_progress and plan.reader.rank == 0:
            return self._items_with_progress(items, plan)
        return items

    def _read_batches(
        self, threads: TransformThreads | None, batch_size: int | None
    ) -> Iterator[tuple[list[Item_co], Callable[[], None]]]:
        """Return an iterator over batches, the last of which may be short, or empty at the end.

        Each has a function that sets the progress of the dataset to the end of the batch.
        """
        plan, reader = self._start_epoch()
        current = self._current = plan, lambda: plan.progress

        def mark_read(progress: Callable[[], ShareProgress]) -> None:
            nonlocal current
            if self._current is current:  # no state was loaded since
                current = self._current = plan, progress

        def batches() -> Iterator[tuple[list[Item_co], Callable[[], None]]]:
            with closing(self._items(plan, reader, threads)) as items:
                is_full = True
                while is_full:
                    batch = list(islice(items, batch_size or 1))
                    is_full = len(batch) == (batch_size or 1)
                    yield batch, partial(mark_read, reader.snapshot())

        return batches()

    def _items_with_progress(
        self, items: Generator[Item_co, None, None], plan: EpochPlan
    ) -> Generator[Item_co, None, None]:
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

        The state consists of numbers, strings, lists and dictionaries.

        Raises:
            RuntimeError: DataLoader workers have read, and this process does not have their
                progress: use `state_dict` of torchdata's `StatefulDataLoader`.
        """
        if self._current is None:
            return self._planner.state(None, None)
        plan, progress = self._current
        return self._planner.state(plan, progress())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state in the next iteration, here or in the workers of a DataLoader.

        Later iterations read whole epochs. If the numbers of ranks or workers have changed, pass
        the result of `merge_states`.

        Args:
            state: Result of `state_dict` or `merge_states`.

        Raises:
            ValueError: The state was saved for other objects or another order.
        """
        self._planner.load(state)
        self._current = None


def _raise_at_first_item(error: Exception) -> Iterator[Any]:
    raise error
    yield

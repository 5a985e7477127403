"""IterableDataset: objects as a stream, split by rank and worker."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info

from aioflux.data._epoch import Course
from aioflux.data._epoch_reader import How, Reading
from aioflux.data._on_error import Failures
from aioflux.data._options import IterableSettings, take_store_options
from aioflux.data._progress import shown
from aioflux.data._source import Objects
from aioflux.data._transform import check_pickles

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from typing import Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._counters import LoadStats
    from aioflux.data._epoch import Begun
    from aioflux.data._options import IterableOptions
    from aioflux.data._records.formats import Records
    from aioflux.data._sample import Sample

__all__ = ["IterableDataset"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


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

                `shard_by="count"`; "bytes" gives ranks and workers alike many bytes, too, which
                takes seconds at the begin of an epoch of a million objects.

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
        store_options = take_store_options(options, is_stream=True)
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
        store_options = take_store_options(options, is_stream=True)
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
        store_options = take_store_options(options, is_stream=True)
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
        self._course = Course(objects, settings, has_workers=True)
        self._how = How(
            transform,
            records,
            settings.ordered,
            settings.shuffle_buffer,
            Failures(settings.on_error, objects.meter),
            objects.meter,
            is_streaming=settings.cache is None,
        )
        self._now: tuple[Begun, Reading] | None = None

    def __getstate__(self) -> dict[str, Any]:
        check_pickles(transform=self._how.transform, records=self._how.records)
        return {**self.__dict__, "_now": None}

    def __repr__(self) -> str:
        return f"<IterableDataset of {len(self._objects)} objects below {self._objects.uri}>"

    @property
    def has_transform(self) -> bool:
        """Tell whether items are what a transform makes, rather than samples or records."""
        return self._how.transform is not None

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and the number of ranks, as they are known now."""
        return self._course.rank()

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
        self._course.set_epoch(epoch)

    def __iter__(self) -> Iterator[T_co]:
        """Read the share of this worker, or of the rank where there are no workers."""
        # Before anything is read: StatefulDataLoader asks for the state then.
        try:
            begun = self._course.begin()
        except (RuntimeError, ValueError) as exc:
            if get_worker_info() is None:
                raise
            # A worker that lives on would die of an error here, and tell nobody which.
            return _raising(exc)
        self._course.use()
        who = f"{self._settings.seed} {begun.epoch} {begun.reader} {begun.progress.num_taken}"
        reading = Reading(self._objects, begun.share, begun.progress, self._how, seed=who)
        self._now = begun, reading
        if self._settings.progress and begun.reader.rank == 0:
            return self._shown(reading.items(), begun)
        return reading.items()

    def _shown(self, items: Generator[T_co, None, None], begun: Begun) -> Iterator[T_co]:
        label = f"{self._objects.uri} epoch {begun.epoch}"
        total = begun.num_left()
        workers = begun.reader.num_workers
        with closing(items):
            yield from shown(
                items, self._how.meter, label=label, total_objects=total, num_workers=workers
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what of the epoch was read, by this worker or by this rank without workers.

        It consists of numbers, strings, lists and dictionaries.

        Raises:
            RuntimeError: Workers read, which only they know of: take the state of torchdata's
                `StatefulDataLoader`, or of the dataset within a worker.
        """
        if self._now is None:
            return self._course.state(None, None)
        begun, reading = self._now
        return self._course.state(begun, reading.progress)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with the next iteration of this dataset, and of each worker it gets.

        The one after that reads a whole epoch again. Where the state is of other numbers of ranks
        or workers, it must be `merge_states` of all of theirs.

        Args:
            state: From `state_dict` or `merge_states`.

        Raises:
            ValueError: It is of other objects, or of another order.
        """
        self._course.load(state)
        self._now = None


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield

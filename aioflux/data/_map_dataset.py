"""MapDataset: objects by index."""

from __future__ import annotations

from contextlib import closing, suppress
from operator import index as as_index
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch.utils.data import Dataset, get_worker_info

from aioflux.data._fetch import fetch
from aioflux.data._on_error import Failures
from aioflux.data._options import MapSettings, take_store_options
from aioflux.data._read_ahead import ReadAhead
from aioflux.data._source import Objects
from aioflux.data._transform import check_pickles, transformed
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from typing import SupportsIndex, Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._counters import LoadStats
    from aioflux.data._epoch import Course
    from aioflux.data._options import MapOptions
    from aioflux.data._sample import Sample

__all__ = ["MapDataset"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class MapDataset(Dataset[T_co]):
    """The objects below a uri as a dataset with a length and indices, sorted by key.

    Lists once, when it is built. Reads are pinned to the generations that were listed: an object
    that was deleted or replaced since is a NotFoundError that names it, also through DataLoader.
    DataLoader reads the objects of a batch at once. Its workers read ahead of the batch that they
    are asked for, within the limits of `TransferOptions`, where it is known what comes next: where
    batches are not shuffled, and where an `ObjectSampler` shuffles them, as `loader` takes one.
    Objects that are known by name only are not read ahead.

    Objects of size 0 whose key ends with "/" are left out: consoles put them in place of empty
    directories.

    Without a transform the items are `Sample`, which DataLoader's default collate does not know:
    give a transform that returns tensors, numbers, strings or tuples of these, or `DataLoader(...,
    collate_fn=list)` for lists of samples. With spawn or forkserver workers the transform must
    pickle, as a function at the top of a module does.
    """

    @overload
    def __init__(
        self: MapDataset[Sample],
        uri: str | Sequence[str],
        *,
        transform: None = None,
        **options: Unpack[MapOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Sample], T_co],
        **options: Unpack[MapOptions],
    ) -> None: ...
    def __init__(
        self,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Sample], Any] | None = None,
        **options: Any,
    ) -> None:
        """List the objects below `uri`.

        Args:
            uri: As `aioflux.open_store` takes it; keys are relative to it. Of several uris the
                objects follow each other; limits hold for each uri by itself.
            transform: Makes an item of a `Sample`, in the process that reads it.
            options: `on_error="raise"`; "skip" logs what cannot be read or transformed, counts it
                in `stats.num_skipped` and leaves it out of its batch; a function of the error and
                the uri may also raise. A batch of which nothing is left is an error all the same.

                `compose="off"`; "on" composes small objects on the service and reads many at once;
                "auto" measures both on the first objects, and keeps what is faster.

                `cache=None`; a local directory keeps objects between epochs and runs, `cache_bytes`
                (64 GiB) at most, and what is in it is not requested again.

                `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and `ssl_context` as
                `aioflux.open_store`, but for 128 requests under way by default, so that a batch of
                100 is read at once. Limits hold for each DataLoader worker by itself.

        Raises:
            NotFoundError: There is no object below `uri`.
        """
        store_options = take_store_options(options)
        settings = MapSettings.take(type(self), options)
        uris = [uri] if isinstance(uri, str) else list(uri)
        self._build(Objects.listed(uris, store_options, settings.access()), transform, settings)

    @overload
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: None = None,
        **options: Unpack[MapOptions],
    ) -> MapDataset[Sample]: ...
    @overload
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: Callable[[Sample], T],
        **options: Unpack[MapOptions],
    ) -> MapDataset[T]: ...
    @classmethod
    def from_keys(
        cls,
        uri: str,
        keys: Iterable[str] | Iterable[ObjectMeta],
        *,
        transform: Callable[[Sample], Any] | None = None,
        **options: Any,
    ) -> MapDataset[Any]:
        """Build a dataset of these objects, in this order, without a listing.

        Args:
            uri: What the keys are relative to.
            keys: Names, read in whatever generation they have then; or metadata of a listing, which
                pins them.
            transform: As for the class.
            options: As for the class.
        """
        store_options = take_store_options(options)
        settings = MapSettings.take(cls, options)
        dataset: MapDataset[Any] = cls.__new__(cls)
        objects = Objects.named(uri, keys, store_options, settings.access())
        dataset._build(objects, transform, settings)
        return dataset

    @overload
    @classmethod
    def from_manifest(
        cls,
        uri: str | Sequence[str],
        *,
        transform: None = None,
        **options: Unpack[MapOptions],
    ) -> MapDataset[Sample]: ...
    @overload
    @classmethod
    def from_manifest(
        cls,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Sample], T],
        **options: Unpack[MapOptions],
    ) -> MapDataset[T]: ...
    @classmethod
    def from_manifest(
        cls,
        uri: str | Sequence[str],
        *,
        transform: Callable[[Sample], Any] | None = None,
        **options: Any,
    ) -> MapDataset[Any]:
        """Build a dataset of a listing that `Store.save_manifest` or `aioflux ls` has saved.

        One request, however many objects there are, and the same objects in every process and run.

        Args:
            uri: Of the manifest, or of several.
            transform: As for the class.
            options: As for the class.

        Raises:
            NotFoundError: There is no such object, or it lists none.
            ValueError: It is no manifest, or a damaged one.
        """
        store_options = take_store_options(options)
        settings = MapSettings.take(cls, options)
        dataset: MapDataset[Any] = cls.__new__(cls)
        uris = [uri] if isinstance(uri, str) else list(uri)
        objects = Objects.of_manifests(uris, store_options, settings.access())
        dataset._build(objects, transform, settings)
        return dataset

    def _build(
        self,
        objects: Objects,
        transform: Callable[[Sample], Any] | None,
        settings: MapSettings,
    ) -> None:
        self._objects = objects
        self._transform = transform
        self._failures = Failures(settings.on_error, objects.meter)
        self._course: Course | None = None
        """Of the sampler that was built for it last."""
        # Taken out by whoever reads: a transform may ask for others meanwhile, and threads may.
        self._ahead = [ReadAhead()]

    def __getstate__(self) -> dict[str, Any]:
        check_pickles(transform=self._transform)
        return self.__dict__

    def __repr__(self) -> str:
        return f"<MapDataset of {len(self)} objects below {self._objects.uri}>"

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def has_transform(self) -> bool:
        """Tell whether items are what a transform makes, rather than samples."""
        return self._transform is not None

    @property
    def stats(self) -> LoadStats:
        """What this process and its workers have read, waited for and skipped so far."""
        return self._objects.meter.snapshot()

    def __getitem__(self, index: SupportsIndex) -> T_co:
        """Read the object at `index`; a negative one counts from the end.

        Raises:
            IndexError: There are not so many objects.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[T_co]:
        """Read the objects at `indices` at once, in this order; DataLoader calls it for each batch.

        Raises:
            StorageError: The first object that cannot be read, named; with `on_error`, where there
                is none that can.
        """
        positions = [self._position(index) for index in indices]
        failures = self._failures
        failures.last = None
        try:
            items = list(self._items(positions))
            if positions and not items and failures.last is not None:
                raise failures.last
        except StorageError as exc:
            if get_worker_info() is not None:
                exc.carry_fields()
            raise
        return items

    def __iter__(self) -> Iterator[T_co]:
        """Read all objects in order, ahead of the consumer.

        Without this, Python would ask for one index after the other until an IndexError, which a
        transform may raise for reasons of its own.

        Raises:
            StorageError: An object cannot be read, named; with `on_error`, it is left out.
        """
        return self._items(range(len(self)))

    def _items(self, positions: Sequence[int]) -> Iterator[T_co]:
        """Read the objects at these positions and make items of them."""
        failures, meter = self._failures, self._objects.meter
        try:
            # What is left is ended at once: an error keeps this frame, and so the generator, alive.
            with closing(self._samples(positions)) as read:
                for sample in meter.timed(read):
                    if sample is None:
                        continue
                    try:
                        item: T_co = transformed(sample, self._transform)
                    except Exception as exc:
                        failures.skip(exc, sample.uri)
                        continue
                    yield item
        finally:
            meter.follow_retries(self._objects.num_retries)

    def _samples(self, positions: Sequence[int]) -> Generator[Sample | None, None, None]:
        ahead = None
        # Elsewhere nobody would drop what is read ahead of a caller that does not come again; and
        # of names, which nothing pins, a later epoch could be handed what was read long before.
        if get_worker_info() is not None and self._objects.are_known:
            with suppress(IndexError):
                ahead = self._ahead.pop()
        if ahead is None:
            with closing(self._stream(positions)) as stream:
                for _, sample in stream:
                    yield sample
            return
        try:
            order = None if self._course is None else self._course.order
            yield from ahead.read(list(positions), len(self._objects), self._stream, order)
        finally:
            self._ahead.append(ahead)

    def _stream(self, positions: Sequence[int]) -> Generator[tuple[int, Sample | None], None, None]:
        return fetch(self._objects, positions, is_ordered=True, failures=self._failures)

    def _position(self, index: SupportsIndex) -> int:
        position, length = as_index(index), len(self._objects)
        if not -length <= position < length:
            raise IndexError(f"index {position} is out of range for {self!r}")
        return position % length

"""EpochReader: the items of one share of an epoch, with exact progress after every item.

    share -> objects, prefetched -> records -> shuffle buffer -> transform -> consumer

An item is marked as read just before it is yielded to the consumer. After a resume, samples that
were only prefetched, and records that were still in the shuffle buffer or in a thread that
transforms, are read again.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aioflux.data._error_policy import worker_errors
from aioflux.data._records.formats import records_of_sample, stream_records, takes_stream
from aioflux.data._resume import ALL_RECORDS, RemainingRecords, ShareProgress
from aioflux.data._shuffle import ShuffleBuffer
from aioflux.data._transform import (
    apply_transform,
    num_sample_bytes,
    outcomes,
    transform_sample,
)
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.data._counters import LoadCounters
    from aioflux.data._error_policy import ErrorPolicy
    from aioflux.data._records.formats import Records, StreamRecords
    from aioflux.data._resume import Share
    from aioflux.data._sample import Sample
    from aioflux.data._source import Source
    from aioflux.data._transform import TransformThreads
    from aioflux.sync import Store

_UPDATE_RETRIES_EVERY: Final = 256
"""Number of objects between two updates of the retry counter: an update takes longer than yielding
an object."""


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """Settings for turning objects into items."""

    transform: Callable[[Any], Any] | None
    records: Records[Any] | None
    is_ordered: bool
    """Whether objects are yielded in the order of the share; otherwise in the order of arrival."""
    shuffle_buffer: int
    """Number of records in the shuffle buffer; 0 for no buffer."""
    may_stream: bool
    """Whether large objects are streamed, if `records` takes a stream."""
    errors: ErrorPolicy
    counters: LoadCounters

    def __post_init__(self) -> None:
        if self.shuffle_buffer < 0:
            raise ValueError(f"shuffle_buffer must be 0 or more, not {self.shuffle_buffer!r}")
        if self.shuffle_buffer and self.records is None:
            raise ValueError(
                "shuffle_buffer mixes records and has no effect without records=; "
                "shuffle=True permutes all objects"
            )


@dataclass(frozen=True, slots=True)
class _Record:
    share_index: int
    """share_index of the object that contains the record."""
    record_index: int
    value: Any
    uri: str


class EpochReader:
    """Reader of the objects and records of a share that `progress` does not mark as read."""

    def __init__(
        self,
        source: Source,
        share: Share,
        progress: ShareProgress,
        config: ReadConfig,
        *,
        seed: str,
    ) -> None:
        self._source = source
        self._share = share
        self._config = config
        # Unread records of partly read objects. An entry is removed when its object is read again.
        self._partial = dict(progress.partial)
        self._share_indices = array("q", (index for index, _ in progress.remaining(share)))
        self._progress = ShareProgress(progress.num_started, set(progress.skipped))
        self._current: tuple[int, RemainingRecords] | None = None
        self._buffer: ShuffleBuffer[_Record] = ShuffleBuffer(seed=seed)
        self._transforming: deque[_Record] = deque()
        """Records that have left the shuffle buffer, and were not yielded."""

    @property
    def progress(self) -> ShareProgress:
        """The part of the share that was yielded to the consumer."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], ShareProgress]:
        """Return a function that returns the present progress, also later and in another thread."""
        return partial(
            _progress_of,
            self._progress.num_started,
            set(self._progress.skipped),
            dict(self._partial),
            self._current,
            (*self._buffer, *self._transforming),
        )

    def items(self, threads: TransformThreads | None = None) -> Generator[Any, None, None]:
        """Yield the unread items, transformed in threads or inline."""
        has_records = self._config.records is not None
        try:
            with worker_errors():
                yield from (
                    self._record_items(threads) if has_records else self._sample_items(threads)
                )
        finally:
            self._config.counters.update_retries(self._source.num_retries)

    def _sample_items(self, threads: TransformThreads | None) -> Iterator[Any]:
        transform = partial(transform_sample, self._config.transform)
        with (
            closing(self._samples(self._share_indices)) as samples,
            closing(outcomes(samples, transform, threads, num_bytes=num_sample_bytes)) as results,
        ):
            for (share_index, sample), result in results:
                try:
                    item = result()
                except Exception as exc:
                    self._config.errors.handle(exc, sample.uri)
                    self._mark_started(share_index)
                    continue
                self._mark_started(share_index)
                yield item

    def _record_items(self, threads: TransformThreads | None) -> Iterator[Any]:
        """Yield the items of records, in the order of the shuffle buffer."""
        with (
            closing(self._shuffled_records()) as records,
            closing(outcomes(records, self._transform_record, threads)) as results,
        ):
            for record, result in results:
                try:
                    item = result()
                except Exception as exc:
                    self._transforming.popleft()
                    self._config.errors.handle(exc, record.uri)
                    continue
                self._transforming.popleft()
                yield item

    def _shuffled_records(self) -> Generator[_Record, None, None]:
        with closing(self._records()) as records:
            for record in records:
                self._buffer.add(record)
                if len(self._buffer) > self._config.shuffle_buffer:
                    yield self._pop_record()
            while len(self._buffer):
                yield self._pop_record()

    def _pop_record(self) -> _Record:
        record = self._buffer.pop()
        self._transforming.append(record)
        return record

    def _transform_record(self, record: _Record) -> Any:
        return apply_transform(record.value, self._config.transform, uri=record.uri)

    def _records(self) -> Generator[_Record, None, None]:
        """Yield the unread records; `_current` is moved past a record before its yield."""
        with closing(self._objects()) as objects:
            for share_index, uri, values in objects:
                remaining = self._remaining(share_index)
                self._mark_started(share_index)
                self._current = (share_index, remaining)
                try:
                    for record_index, value in enumerate(values):
                        self._current = (share_index, remaining.after(record_index))
                        if remaining.has(record_index):
                            yield _Record(share_index, record_index, value, uri)
                except Exception as exc:
                    self._config.errors.handle(exc, uri)
                finally:
                    if isinstance(values, Generator):
                        values.close()
                self._current = None

    def _objects(self) -> Generator[tuple[int, str, Iterator[Any]], None, None]:
        """Yield the share_index, uri and records of each object, large objects as streams.

        Other objects are read whole, and prefetched also while a stream is read.
        """
        records = self._config.records
        assert records is not None
        streamed = self._streamed_objects() if takes_stream(records) else set()
        whole = array("q", (index for index in self._share_indices if index not in streamed))
        with closing(self._samples(whole)) as samples:
            for next_index in self._share_indices:
                if next_index in streamed and takes_stream(records):
                    store, meta = self._source.locate(self._listing_index(next_index))
                    yield next_index, meta.uri, self._streamed(store, meta, records)
                    continue
                share_index, sample = next(samples)
                if isinstance(sample, StorageError):
                    self._config.errors.handle(sample, sample.uri)
                    self._mark_started(share_index)
                else:
                    yield share_index, sample.uri, iter(records_of_sample(records, sample))

    def _streamed_objects(self) -> set[int]:
        """Return the share indices of the objects that are streamed and not read whole."""
        source = self._source
        if not (self._config.may_stream and source.has_metadata):
            return set()
        sizes = source.sizes(self._share.listing_indices[list(self._share_indices)].tolist())
        # A smaller object is read whole, because whole objects are prefetched.
        reads_parts = getattr(self._config.records, "reads_parts", False)
        transfer = source.transfer
        limit = transfer.range_size_bytes if reads_parts else transfer.max_buffered_bytes
        return {
            index for index, size in zip(self._share_indices, sizes, strict=True) if size > limit
        }

    def _streamed(
        self, store: Store, meta: ObjectMeta, records: StreamRecords[Any]
    ) -> Generator[Any, None, None]:
        prefetch_bytes = self._source.transfer.max_buffered_bytes
        yield from stream_records(store, meta, records, prefetch_bytes=prefetch_bytes)
        self._config.counters.count(1, meta.size)

    def _listing_index(self, share_index: int) -> int:
        return int(self._share.listing_indices[share_index])

    def _remaining(self, share_index: int) -> RemainingRecords:
        return self._partial.get(share_index) or self._share.partial.get(share_index, ALL_RECORDS)

    def _mark_started(self, share_index: int) -> None:
        if self._partial.pop(share_index, None) is None:
            self._progress.mark_started(share_index)

    def _samples(
        self, share_indices: array[int]
    ) -> Generator[tuple[int, Sample | StorageError], None, None]:
        """Yield the share_index and the sample of each object, or the error of its read."""
        config, counters = self._config, self._config.counters.start_clock()
        listing_indices = array("q", self._share.listing_indices[list(share_indices)].tolist())
        with closing(self._source.read(listing_indices, is_ordered=config.is_ordered)) as samples:
            for count, (position, sample) in enumerate(samples):
                if count % _UPDATE_RETRIES_EVERY == 0:
                    counters.update_retries(self._source.num_retries)
                yield share_indices[position], sample


def _progress_of(
    num_started: int,
    skipped: set[int],
    partial: dict[int, RemainingRecords],
    current: tuple[int, RemainingRecords] | None,
    waiting: Iterable[_Record],
) -> ShareProgress:
    """Return the progress of a reader whose `waiting` records were decoded and not yielded."""
    partial = dict(partial)
    if current is not None:
        share_index, remaining = current
        partial[share_index] = remaining
    buffered: dict[int, list[int]] = {}
    for record in waiting:
        buffered.setdefault(record.share_index, []).append(record.record_index)
    for share_index, record_indices in buffered.items():
        remaining = partial.get(share_index, RemainingRecords(None))
        extra = tuple(sorted({*remaining.extra, *record_indices}))
        partial[share_index] = RemainingRecords(remaining.first, extra)
    return ShareProgress(num_started, set(skipped), partial)

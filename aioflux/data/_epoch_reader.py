"""One reader's way through its share of an epoch, which knows at any sample where it is.

    share -> objects, read ahead -> records -> shuffle buffer -> transform -> consumer

What was handed to the consumer counts as read before it is handed over, and nothing else does:
samples that are only read ahead, or wait in the shuffle buffer, are read again by whoever resumes.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import get_worker_info

from aioflux.data._fetch import fetch
from aioflux.data._records.formats import records_of_sample, records_of_stream, takes_stream
from aioflux.data._resume import WHOLE, Left, Progress
from aioflux.data._shuffle import ShuffleBuffer
from aioflux.data._transform import transformed
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._counters import Meter
    from aioflux.data._on_error import Failures
    from aioflux.data._records.formats import Records
    from aioflux.data._resume import Share
    from aioflux.data._sample import Sample
    from aioflux.data._source import Objects
    from aioflux.sync import Store

__all__ = ["How", "Reading"]

_LOOK_AT_RETRIES: Final = 256
"""Objects between two looks at the statistics of the stores, which cost more than an object."""


@dataclass(frozen=True)
class How:
    """How samples are made of objects."""

    transform: Callable[[Any], Any] | None
    records: Records[Any] | None
    is_ordered: bool
    num_buffered: int
    """Records in the shuffle buffer."""
    failures: Failures
    meter: Meter
    is_streaming: bool
    """Objects larger than what may be read ahead are not taken into memory whole, where `records`
    takes a stream."""


@dataclass(frozen=True, slots=True)
class _Record:
    index: int
    number: int
    value: Any
    uri: str


class Reading:
    """Reads what is left of a share.

    Args:
        objects: All objects.
        share: Which of them.
        progress: What was read before.
        how: How samples are made of them.
        seed: Of the shuffle buffer.
    """

    def __init__(
        self, objects: Objects, share: Share, progress: Progress, how: How, *, seed: str
    ) -> None:
        self._objects = objects
        self._share = share
        self._how = how
        # What was left of objects that were begun, until they are begun again.
        self._again = dict(progress.begun)
        self._todo = array("q", (index for index, _ in progress.todo(share)))
        self._progress = Progress(progress.num_taken, set(progress.open))
        self._current: tuple[int, Left] | None = None
        self._buffer: ShuffleBuffer[_Record] = ShuffleBuffer(seed=seed)

    @property
    def progress(self) -> Progress:
        """What has been handed out."""
        begun = dict(self._again)
        if self._current is not None:
            index, left = self._current
            begun[index] = left
        waiting: dict[int, list[int]] = {}
        for record in self._buffer:
            waiting.setdefault(record.index, []).append(record.number)
        for index, numbers in waiting.items():
            left = begun.get(index, Left(None))
            begun[index] = Left(left.first, tuple(sorted({*left.also, *numbers})))
        return Progress(self._progress.num_taken, set(self._progress.open), begun)

    def has_left(self) -> bool:
        """Tell whether anything was to be read when this was built."""
        return bool(self._todo)

    def items(self) -> Generator[Any, None, None]:
        """Hand out what is left."""
        try:
            yield from self._whole() if self._how.records is None else self._mixed()
        except StorageError as exc:
            if get_worker_info() is not None:
                exc.carry_fields()
            raise
        finally:
            self._how.meter.follow_retries(self._objects.num_retries)

    def _whole(self) -> Iterator[Any]:
        with closing(self._samples(self._todo)) as samples:
            for index, sample in samples:
                if sample is None:
                    self._take(index)
                    continue
                try:
                    item = transformed(sample, self._how.transform)
                except Exception as exc:
                    self._how.failures.skip(exc, sample.uri)
                    self._take(index)
                    continue
                self._take(index)
                yield item

    def _mixed(self) -> Iterator[Any]:
        """Hand out records through the shuffle buffer."""
        with closing(self._records()) as records:
            for record in records:
                self._buffer.add(record)
                if len(self._buffer) > self._how.num_buffered:
                    yield from self._record(self._buffer.take())
            while len(self._buffer):
                yield from self._record(self._buffer.take())

    def _record(self, record: _Record) -> Iterator[Any]:
        try:
            item = transformed(record.value, self._how.transform, uri=record.uri)
        except Exception as exc:
            self._how.failures.skip(exc, record.uri)
            return
        yield item

    def _records(self) -> Generator[_Record, None, None]:
        """Yield the records that are left; those that were yielded are the caller's to count."""
        with closing(self._opened()) as opened:
            for index, uri, values in opened:
                left = self._left(index)
                self._take(index)
                self._current = (index, left)
                try:
                    for number, value in enumerate(values):
                        self._current = (index, _after(left, number + 1))
                        if left.has(number):
                            yield _Record(index, number, value, uri)
                except Exception as exc:
                    self._how.failures.skip(exc, uri)
                finally:
                    if isinstance(values, Generator):
                        values.close()
                self._current = None

    def _opened(self) -> Generator[tuple[int, str, Iterator[Any]], None, None]:
        """Yield objects with what makes their records; small ones are fetched ahead meanwhile."""
        records = self._how.records
        assert records is not None
        large = self._large()
        small = array("q", (index for index in self._todo if index not in large))
        with closing(self._samples(small)) as samples:
            for turn in self._todo:
                if turn in large:
                    store, meta = self._objects.locate(int(self._share.positions[turn]))
                    yield turn, meta.uri, self._streamed(store, meta, records)
                    continue
                index, sample = next(samples)
                if sample is None:
                    self._take(index)
                else:
                    yield index, sample.uri, iter(records_of_sample(records, sample))

    def _large(self) -> set[int]:
        """Return the objects that are read as streams, by index in the share."""
        records, objects = self._how.records, self._objects
        if not (records and takes_stream(records) and self._how.is_streaming and objects.are_known):
            return set()
        sizes = objects.sizes(self._share.positions[list(self._todo)].tolist())
        # Up to one range, an object costs one request, which is sent ahead.
        reads_parts = getattr(records, "reads_parts", False)
        most = objects.range_size_bytes if reads_parts else objects.read_ahead_bytes
        return {index for index, size in zip(self._todo, sizes, strict=True) if size > most}

    def _streamed(
        self, store: Store, meta: ObjectMeta, records: Records[Any]
    ) -> Generator[Any, None, None]:
        most = self._objects.read_ahead_bytes
        yield from records_of_stream(store, meta, records, read_ahead_bytes=most)
        self._how.meter.count(1, meta.size)

    def _left(self, index: int) -> Left:
        return self._again.get(index) or self._share.left.get(index, WHOLE)

    def _take(self, index: int) -> None:
        if self._again.pop(index, None) is None:
            self._progress.take(index)

    def _samples(self, todo: array[int]) -> Generator[tuple[int, Sample | None], None, None]:
        """Read whole objects; None stands for one that was skipped."""
        how = self._how
        positions = array("q", self._share.positions[list(todo)].tolist())
        samples = fetch(self._objects, positions, is_ordered=how.is_ordered, failures=how.failures)
        with closing(samples):
            for count, (number, sample) in enumerate(how.meter.timed(samples)):
                if count % _LOOK_AT_RETRIES == 0:
                    how.meter.follow_retries(self._objects.num_retries)
                yield todo[number], sample


def _after(left: Left, number: int) -> Left:
    """Return what is left of it from record `number` on."""
    first = None if left.first is None else max(left.first, number)
    return Left(first, tuple(each for each in left.also if each >= number))

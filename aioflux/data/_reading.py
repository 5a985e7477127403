"""One reader's way through its share of an epoch, which knows at any sample where it is.

    share -> objects, read ahead -> records -> shuffle buffer -> transform -> consumer

What was handed to the consumer counts as read before it is handed over, and nothing else does:
samples that are only read ahead, or wait in the shuffle buffer, are read again by whoever resumes.
"""

from __future__ import annotations

from array import array
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioflux.data._fetch import fetch
from aioflux.data._resume import WHOLE, Left, Progress
from aioflux.data._shuffle import ShuffleBuffer
from aioflux.data._transform import transformed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from aioflux.data._objects import Objects
    from aioflux.data._on_error import Failures
    from aioflux.data._resume import Share
    from aioflux.data._sample import Sample

__all__ = ["How", "Reading"]


@dataclass(frozen=True)
class How:
    """How samples are made of objects."""

    transform: Callable[[Any], Any] | None
    records: Callable[[Any], Iterator[Any]] | None
    is_ordered: bool
    num_buffered: int
    """Records in the shuffle buffer."""
    failures: Failures


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
        with closing(self._samples()) as samples:
            if self._how.records is None:
                yield from self._whole(samples)
            else:
                yield from self._mixed(samples)

    def _whole(self, samples: Iterator[tuple[int, Sample]]) -> Iterator[Any]:
        for index, sample in samples:
            try:
                item = transformed(sample, self._how.transform)
            except Exception as exc:
                self._how.failures.skip(exc, sample.uri)
                self._take(index)
                continue
            self._take(index)
            yield item

    def _mixed(self, samples: Iterator[tuple[int, Sample]]) -> Iterator[Any]:
        """Hand out records through the shuffle buffer."""
        for record in self._records(samples):
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

    def _records(self, samples: Iterator[tuple[int, Sample]]) -> Iterator[_Record]:
        """Yield the records that are left; those that were yielded are the caller's to count."""
        assert self._how.records is not None
        for index, sample in samples:
            left = self._left(index)
            self._take(index)
            self._current = (index, left)
            values = iter(self._how.records(sample))
            number = 0
            while True:
                try:
                    value = next(values)
                except StopIteration:
                    break
                except Exception as exc:
                    self._how.failures.skip(exc, sample.uri)
                    break
                self._current = (index, _after(left, number + 1))
                if left.has(number):
                    yield _Record(index, number, value, sample.uri)
                number += 1
            self._current = None

    def _left(self, index: int) -> Left:
        return self._again.get(index) or self._share.left.get(index, WHOLE)

    def _take(self, index: int) -> None:
        if self._again.pop(index, None) is None:
            self._progress.take(index)

    def _samples(self) -> Generator[tuple[int, Sample], None, None]:
        how, todo = self._how, self._todo
        positions = array("q", self._share.positions[list(todo)].tolist())
        samples = fetch(self._objects, positions, is_ordered=how.is_ordered, failures=how.failures)
        with closing(samples):
            for number, sample in samples:
                if sample is None:
                    self._take(todo[number])
                else:
                    yield todo[number], sample


def _after(left: Left, number: int) -> Left:
    """Return what is left of it from record `number` on."""
    first = None if left.first is None else max(left.first, number)
    return Left(first, tuple(each for each in left.also if each >= number))

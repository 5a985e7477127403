"""Columns of a listing: concatenated strings, and times as the service returned them.

A column is one buffer. Reading it changes no reference count, so that forked workers share the
parent's pages, and columns are joined by copying buffers.
"""

from __future__ import annotations

import zlib
from array import array
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Self, overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["NONE", "KeyColumn", "TimeColumn"]

NONE = -1
"""None in a column of numbers."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_STRIDE = 64
_BLOCK = 16 * _STRIDE
_TIME_SIZE = len("2026-01-01T00:00:00.000Z")
_TIME_SHAPE = b"0000-00-00T00:00:00.000Z"
_ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")


class KeyColumn:
    """Strings, concatenated in one buffer, with their sizes and the offset of each 64th."""

    __slots__ = ("_marks", "_sizes", "_text")

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._text = bytearray()
        self._sizes = array("I")
        self._marks = array("Q")
        self.extend(texts)

    def append(self, text: str) -> None:
        """Add a string."""
        # Names of local files may hold lone surrogates, which represent bytes that are no UTF-8.
        data = text.encode("utf-8", "surrogatepass")
        self._text += data
        self._sizes.append(len(data))

    def extend(self, texts: Iterable[str] | KeyColumn) -> None:
        """Add strings."""
        if isinstance(texts, KeyColumn):
            sizes, text = texts.buffers()
            self._text += text
            self._sizes.extend(sizes)
        else:
            given = texts if isinstance(texts, list) else list(texts)
            joined = "".join(given)
            if joined.isascii():
                self._text += joined.encode()
                self._sizes.extend(map(len, given))
            else:
                encoded = [text.encode("utf-8", "surrogatepass") for text in given]
                self._text += b"".join(encoded)
                self._sizes.extend(map(len, encoded))

    def _marked(self) -> array[int]:
        """Return the offset of each 64th string, computed on first use."""
        marks, sizes = self._marks, self._sizes
        if len(marks) * _STRIDE >= len(sizes):
            return marks
        marks = marks[:]  # another thread may do the same
        while (end := len(marks) * _STRIDE) < len(sizes):
            marks.append(marks[-1] + sum(sizes[end - _STRIDE : end]) if marks else 0)
        self._marks = marks
        return marks

    def _offset(self, index: int) -> int:
        """Return the offset of a string; beyond the last one, the end of the buffer."""
        if index >= len(self._sizes):
            return len(self._text)
        block = index // _STRIDE
        return self._marked()[block] + sum(self._sizes[block * _STRIDE : index])

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            indexes = range(*index.indices(len(self)))
            if indexes.step == 1:
                return list(self.part(indexes.start, indexes.stop))
            return [self[at] for at in indexes]
        at = range(len(self._sizes))[index]  # negative indexes, IndexError
        start = self._offset(at)
        return self._text[start : start + self._sizes[at]].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _BLOCK):
            sizes = self._sizes[first : first + _BLOCK]
            start = self._marked()[first // _STRIDE]
            block = self._text[start : start + sum(sizes)]
            ends = accumulate(sizes, initial=0)
            if block.isascii():
                text = block.decode("ascii")
                for begin, end in pairwise(ends):
                    yield text[begin:end]
            else:
                for begin, end in pairwise(ends):
                    yield block[begin:end].decode("utf-8", "surrogatepass")

    def part(self, start: int, end: int) -> KeyColumn:
        """Return the strings `[start, end)`."""
        end = max(start, end)
        text = self._text[self._offset(start) : self._offset(end)]
        return KeyColumn.of_buffers(self._sizes[start:end], text)

    def pick(self, indexes: Iterable[int]) -> KeyColumn:
        """Return the strings at these indexes."""
        return KeyColumn([self[index] for index in indexes])

    def may_contain(self, text: str) -> bool:
        """Return whether a text may be in one of the strings: it is in their concatenation."""
        return self._text.find(text.encode()) >= 0

    def checksum(self) -> int:
        """Return a CRC32 of the strings and their sizes: the same for the same strings."""
        return zlib.crc32(self._sizes, zlib.crc32(self._text))

    def buffers(self) -> tuple[array[int], bytearray]:
        """Return the sizes of the strings in bytes, and the strings."""
        return self._sizes, self._text

    @classmethod
    def of_buffers(cls, sizes: array[int], text: bytearray) -> Self:
        """Return the column of these buffers.

        Raises:
            ValueError: The sizes are not those of the text.
        """
        if sum(sizes) != len(text):
            raise ValueError(f"{sum(sizes)} bytes of keys do not fit {len(text)} bytes of text")
        column = cls()
        column._sizes, column._text = sizes, text
        return column


class TimeColumn:
    """Times in UTC, or None: as the texts of the service, or as numbers.

    Texts with milliseconds stay texts, 24 bytes each, and are parsed on access: parsing a million
    takes 0.3 s, and most times of a listing are never used. Otherwise all are numbers: microseconds
    since 1970.
    """

    __slots__ = ("_numbers", "_texts")

    def __init__(self) -> None:
        self._texts = bytearray()
        """Empty if `_numbers` is not."""
        self._numbers = array("q")

    def append(self, time: datetime | None) -> None:
        """Add a time."""
        self.numbers().append(NONE if time is None else _number(time))

    def add_texts(self, texts: list[str]) -> bool:
        """Add times with milliseconds; return False, and add none, if one has another form."""
        joined = "".join(texts).encode()
        if joined.translate(_ANY_DIGIT) != _TIME_SHAPE * len(texts):
            return False
        if self._numbers:
            self._numbers.extend(_read(joined))
        else:
            self._texts += joined
        return True

    def add_times(self, times: Iterable[datetime | None]) -> None:
        """Add times."""
        numbers = [NONE if time is None else _number(time) for time in times]
        self.numbers().fromlist(numbers)

    def extend(self, other: TimeColumn) -> None:
        """Add the times of another column."""
        if self._numbers or other._numbers:
            added = other._numbers or array("q", _read(other._texts))
            self.numbers().extend(added)
        else:
            self._texts += other._texts

    def numbers(self) -> array[int]:
        """Return microseconds since 1970, and keep them instead of texts.

        Raises:
            ValueError: A time is none, as the 30th of February.
        """
        if self._texts:
            self._numbers = array("q", _read(self._texts))
            self._texts = bytearray()
        return self._numbers

    def __len__(self) -> int:
        return len(self._numbers) or len(self._texts) // _TIME_SIZE

    def __getitem__(self, at: int) -> datetime | None:
        """Return the time at an index, which must not be negative."""
        texts = self._texts  # another thread may turn them into numbers
        if texts:
            return _time(texts[at * _TIME_SIZE : (at + 1) * _TIME_SIZE].decode())
        number = self._numbers[at]
        return None if number == NONE else _EPOCH + number * _MICROSECOND

    def __iter__(self) -> Iterator[datetime | None]:
        return map(self.__getitem__, range(len(self)))

    def part(self, start: int, end: int) -> TimeColumn:
        """Return the times `[start, end)`."""
        column = TimeColumn()
        if texts := self._texts:
            column._texts = texts[start * _TIME_SIZE : max(start, end) * _TIME_SIZE]
        else:
            column._numbers = self._numbers[start:end]
        return column

    def pick(self, indexes: Iterable[int]) -> TimeColumn:
        """Return the times at these indexes."""
        column = TimeColumn()
        if texts := self._texts:
            size = _TIME_SIZE
            column._texts = bytearray().join(texts[at * size : (at + 1) * size] for at in indexes)
        else:
            column._numbers = array("q", map(self._numbers.__getitem__, indexes))
        return column

    @classmethod
    def of_numbers(cls, numbers: array[int]) -> Self:
        """Return the column of these numbers."""
        column = cls()
        column._numbers = numbers
        return column


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as exc:
        raise ValueError(f"the service returned {text!r}, which is no time: {exc}") from exc


def _number(time: datetime) -> int:
    # Half the cost of dividing by a timedelta of one microsecond.
    age = time - _EPOCH
    return (age.days * 86_400 + age.seconds) * 1_000_000 + age.microseconds


def _read(texts: bytes | bytearray) -> Iterator[int]:
    whole = texts.decode()
    starts = range(0, len(whole), _TIME_SIZE)
    return (_number(_time(whole[at : at + _TIME_SIZE])) for at in starts)

"""Columns of a listing: strings and times, stored in buffers.

A column has a few buffers and not one Python object for each value. Reading a column changes no
reference counts, so that forked workers share the memory pages of the parent. Columns are
concatenated by copying buffers.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from typing import Self, overload

NONE = -1
"""Number that represents None in a column."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_STRIDE = 64
"""Number of strings between two stored offsets."""
_BLOCK = 16 * _STRIDE
"""Number of strings that an iteration decodes at once."""
_TIME_SHAPE = b"0000-00-00T00:00:00.000Z"
_TIME_SIZE = 9
"""Bytes of a stored text: its 17 digits and a 0, two in each byte."""
_LAST_DIGIT = bytes.maketrans(b"Z", b"0")
_ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")


class KeyColumn:
    """Strings, stored as one buffer of UTF-8, their sizes, and the offset of every 64th string."""

    __slots__ = ("_offsets", "_sizes", "_text")

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._text = bytearray()
        self._sizes = array("I")
        self._offsets = array("Q")
        self.extend(texts)

    def append(self, text: str) -> None:
        """Add a string."""
        # Names of local files may contain lone surrogates, for bytes that are not UTF-8.
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
            strings = texts if isinstance(texts, list) else list(texts)
            joined = "".join(strings)
            if joined.isascii():
                self._text += joined.encode()
                self._sizes.extend(map(len, strings))
            else:
                encoded = [text.encode("utf-8", "surrogatepass") for text in strings]
                self._text += b"".join(encoded)
                self._sizes.extend(map(len, encoded))

    def _stride_offsets(self) -> array[int]:
        """Return the offset of every 64th string; computed when it is first needed."""
        offsets, sizes = self._offsets, self._sizes
        if len(offsets) * _STRIDE >= len(sizes):
            return offsets
        offsets = offsets[:]  # a copy, because another thread may compute them too
        while (end := len(offsets) * _STRIDE) < len(sizes):
            offsets.append(offsets[-1] + sum(sizes[end - _STRIDE : end]) if offsets else 0)
        self._offsets = offsets
        return offsets

    def _offset(self, index: int) -> int:
        """Return the offset of a string; the end of the buffer after the last string."""
        if index >= len(self._sizes):
            return len(self._text)
        block = index // _STRIDE
        return self._stride_offsets()[block] + sum(self._sizes[block * _STRIDE : index])

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
            return [self[position] for position in indexes]
        sizes = self._sizes
        position = range(len(sizes))[index]  # converts a negative index, and raises IndexError
        block, offsets = position // _STRIDE, self._offsets
        if block >= len(offsets):
            offsets = self._stride_offsets()
        start = offsets[block] + sum(sizes[block * _STRIDE : position])
        return self._text[start : start + sizes[position]].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _BLOCK):
            sizes = self._sizes[first : first + _BLOCK]
            start = self._stride_offsets()[first // _STRIDE]
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
        """Return False only if no string contains `text`. Searches the concatenated strings."""
        return self._text.find(text.encode()) >= 0

    def checksum(self) -> int:
        """Return a CRC32 of the strings and their sizes."""
        return zlib.crc32(self._sizes, zlib.crc32(self._text))

    def buffers(self) -> tuple[array[int], bytearray]:
        """Return the sizes of the strings, in bytes, and the concatenated strings."""
        return self._sizes, self._text

    @classmethod
    def of_buffers(cls, sizes: array[int], text: bytearray) -> Self:
        """Return a column with the sizes and the text that `buffers` returned.

        Raises:
            ValueError: The sum of the sizes is not the size of the text.
        """
        if sum(sizes) != len(text):
            raise ValueError(
                f"sizes of {sum(sizes)} bytes in all do not fit {len(text)} bytes of text"
            )
        column = cls()
        column._sizes, column._text = sizes, text
        return column


class TimeColumn:
    """Times in UTC or None, stored as digits of the service's texts or as numbers.

    If all times are texts with milliseconds, of 24 bytes each, their digits are stored in 9 bytes
    and parsed on access: parsing a million takes 0.3 s, and most times of a listing are never used.
    Otherwise all times are stored as numbers: microseconds since 1970.
    """

    __slots__ = ("_numbers", "_texts")

    def __init__(self) -> None:
        self._texts = bytearray()
        """Concatenated digits; empty if the times are stored as numbers."""
        self._numbers = array("q")

    def append(self, time: datetime | None) -> None:
        """Add a time."""
        self.numbers().append(NONE if time is None else _microseconds(time))

    def add_texts(self, texts: list[str]) -> bool:
        """Add texts with milliseconds; if a text has another form, add none and return False."""
        joined = "".join(texts).encode()
        if joined.translate(_ANY_DIGIT) != _TIME_SHAPE * len(texts):
            return False
        digits = bytes.fromhex(joined.translate(_LAST_DIGIT, b"-T:.").decode())
        if self._numbers:
            self._numbers.extend(_parse_times(digits))
        else:
            self._texts += digits
        return True

    def add_times(self, times: Iterable[datetime | None]) -> None:
        """Add times."""
        numbers = [NONE if time is None else _microseconds(time) for time in times]
        self.numbers().fromlist(numbers)

    def extend(self, other: TimeColumn) -> None:
        """Add the times of another column."""
        if self._numbers or other._numbers:
            added = other._numbers or array("q", _parse_times(other._texts))
            self.numbers().extend(added)
        else:
            self._texts += other._texts

    def numbers(self) -> array[int]:
        """Return the times as microseconds since 1970, and store them as numbers from now on.

        Raises:
            ValueError: A text is not a valid time, such as the 30th of February.
        """
        if self._texts:
            self._numbers = array("q", _parse_times(self._texts))
            self._texts = bytearray()
        return self._numbers

    def __len__(self) -> int:
        return len(self._numbers) or len(self._texts) // _TIME_SIZE

    def __getitem__(self, index: int) -> datetime | None:
        """Return the time at an index, which must not be negative."""
        texts = self._texts  # read once, because another thread may convert them to numbers
        if texts:
            return _parse_time(texts[index * _TIME_SIZE : (index + 1) * _TIME_SIZE].hex())
        number = self._numbers[index]
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
            column._texts = bytearray().join(
                texts[index * size : (index + 1) * size] for index in indexes
            )
        else:
            column._numbers = array("q", map(self._numbers.__getitem__, indexes))
        return column

    @classmethod
    def of_numbers(cls, numbers: array[int]) -> Self:
        """Return a column of times from microseconds since 1970."""
        column = cls()
        column._numbers = numbers
        return column


def _parse_time(digits: str) -> datetime:
    try:
        return datetime.fromisoformat(f"{digits[:8]}T{digits[8:14]}.{digits[14:17]}Z")
    except ValueError as exc:
        day = f"{digits[:4]}-{digits[4:6]}-{digits[6:8]}"
        raise ValueError(f"the service returned {day}T...: not a valid time: {exc}") from exc


def _microseconds(time: datetime) -> int:
    # Twice as fast as a division by a timedelta of one microsecond.
    age = time - _EPOCH
    return (age.days * 86_400 + age.seconds) * 1_000_000 + age.microseconds


def _parse_times(texts: bytes | bytearray) -> Iterator[int]:
    text = texts.hex()
    starts = range(0, len(text), 2 * _TIME_SIZE)
    return (_microseconds(_parse_time(text[start : start + 2 * _TIME_SIZE])) for start in starts)

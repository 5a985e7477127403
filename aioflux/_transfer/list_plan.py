"""Plan of the requests of a listing. Pure: no clock, no service, no event loop.

    keys below a prefix = consecutive ranges [start, end), each read page by page
    page -> density and characters of its keys -> split the range that has most objects to come

A range ends where the next one begins, so that a key is in one of them whatever happens to the
objects meanwhile. The point of a split is a guess, and a bad guess costs one request: keys are read
as numbers whose digits are the characters seen at each position, and the middle of the rest is
used. After the first page only that page is known. So the first splits gallop: behind
"train/0004999" they are at "train/001", "train/01", "train/1", "train0" and "u".

If one level is listed, a common prefix ("train/") is a key like the others, and no range begins
behind a delimiter: all keys of a prefix are in one range, which returns it once.
"""

from __future__ import annotations

import string
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioflux._services.base import MAX_EMPTY_PAGES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Alphabets", "KeyRange", "ListingPlan", "Request", "gallop", "middle"]

_MAX_CREDIBLE = 50_000_000
"""Largest credible number of objects in a range: with more, its keys have a long common beginning,
and the middle between the ends would be far from them."""
_SAMPLES = 16
_DEPTH = 4
"""Significant characters, behind the first in which the keys of a page differ."""
_TOKENS_ONLY = 6
"""Pages of fewer keys are always requested by token: one repeated key would cost too much."""
_KINDS = (string.digits, "abcdef", string.ascii_lowercase, "ABCDEF", string.ascii_uppercase)
_LAST_CHARACTER = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


class Alphabets:
    """The characters that keys have at each position, and keys as numbers by them."""

    def __init__(self) -> None:
        self._seen: list[set[str]] = []
        self._sorted: dict[int, list[str]] = {}

    def add(self, key: str) -> None:
        """Add a key."""
        self._sorted.clear()
        seen = self._seen
        while len(seen) < len(key):
            seen.append(set())
        for place, character in enumerate(key):
            seen[place].add(character)

    def at(self, place: int) -> list[str]:
        """Return the characters that a key may have at a position, sorted.

        Those seen there and just behind, and all others of their kind: digits, hexadecimal digits
        or letters.
        """
        known = self._sorted.get(place)
        if known is None:
            seen: set[str] = set().union(*self._seen[place : place + 3])
            known = self._sorted[place] = sorted(seen | _same_kinds(seen))
        return known

    def number(self, key: str, start: int, end: int) -> int:
        """Read the places `[start, end)` of a key as a number; the end of a key is a zero."""
        value = 0
        for place in range(start, end):
            alphabet = self.at(place)
            digit = bisect_right(alphabet, key[place]) if place < len(key) else 0
            value = value * (len(alphabet) + 1) + digit
        return value

    def top(self, start: int, end: int) -> int:
        """Return the number behind all those of keys with these places."""
        value = 1
        for place in range(start, end):
            value *= len(self.at(place)) + 1
        return value

    def text(self, value: int, start: int, end: int) -> str:
        """Return characters that have this number at the places `[start, end)`."""
        digits: list[int] = []
        for place in reversed(range(start, end)):
            value, digit = divmod(value, len(self.at(place)) + 1)
            digits.append(digit)
        characters = ""
        for place, digit in zip(range(start, end), reversed(digits), strict=True):
            if digit == 0:
                break
            characters += self.at(place)[digit - 1]
        return characters


def _same_kinds(seen: set[str]) -> set[str]:
    """Return all characters of the narrowest kinds that cover those seen."""
    found: set[str] = set()
    for narrow, wide in ((_KINDS[1], _KINDS[2]), (_KINDS[3], _KINDS[4])):
        letters = seen & set(wide)
        if letters:
            found |= set(narrow if letters <= set(narrow) else wide)
    return found | set(_KINDS[0]) if seen & set(_KINDS[0]) else found


def _successor(text: str) -> str:
    """Return the first text behind all that begin with `text`, or an empty one."""
    while text:
        follows = ord(text[-1]) + 1
        if follows in _SURROGATES:
            follows = _SURROGATES.stop
        if follows <= _LAST_CHARACTER:
            return text[:-1] + chr(follows)
        text = text[:-1]
    return ""


def _common(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def _ratio(part: int, whole: int) -> float:
    """Divide; beyond what a float holds it is infinite."""
    if whole <= 0 or part.bit_length() - whole.bit_length() > 64:
        return float("inf")
    return part / whole


@dataclass(frozen=True, slots=True)
class Request:
    """One page to request."""

    range: KeyRange
    start: str
    """First key; empty for the first of all."""
    end: str
    """Key before which it ends; empty for none."""
    token: str
    """The service's token of the page."""


@dataclass(slots=True, eq=False)
class KeyRange:
    """Keys from `start` up to `end`, and the progress of their listing."""

    start: str
    end: str
    """Key before which it ends; empty for none."""
    expected: float = 0.0
    """Estimate of the objects that follow `last`."""
    last: str = ""
    token: str = ""
    asked: Request | None = None
    """The request that `token` belongs to."""
    num_empty: int = 0
    """Consecutive pages without a key."""
    is_in_flight: bool = False
    is_done: bool = False
    is_whole: bool = True
    """It was never split."""
    pages: deque[Any] = field(default_factory=deque)
    """Pages that wait for the consumer; the plan does not use them."""

    @property
    def reached(self) -> str:
        """The key behind which it can be split."""
        return self.last or self.start


def middle(alphabets: Alphabets, low: str, high: str, prefix: str, share: float) -> str:
    """Return a key between two others, about `share` of the way; empty if there is none.

    Args:
        alphabets: Characters of the keys.
        low: The key before.
        high: The key after; empty for none.
        prefix: Beginning of all keys.
        share: Between 0 and 1.
    """
    start = _common(low, high) if high else len(prefix)
    for end in range(start + 2, start + 3 * _DEPTH, _DEPTH):
        first = alphabets.number(low, start, end)
        behind = alphabets.number(high, start, end) if high else alphabets.top(start, end)
        value = first + int((behind - first) * share)
        text = low[:start] + alphabets.text(value, start, end)
        if text > low and (not high or text < high) and text.startswith(prefix):
            return text
    return ""


def gallop(page_first: str, last: str, end: str, prefix: str) -> list[str]:
    """Return keys behind `last`, each much farther than the one before: sorted, before `end`.

    Args:
        page_first: First key of the page that ends with `last`.
        last: Last key seen.
        end: The key that all are before; empty for none.
        prefix: Beginning of all keys.
    """
    differ = _common(page_first, last)
    # Ends of names between slashes in the common beginning of the page's keys; and its end.
    shared = [place for place in range(len(prefix), differ) if "/" in last[place - 1 : place + 1]]
    nearest = max(len(prefix), last.rfind("/", 0, differ) + 1, differ - 2 * _DEPTH)
    places = (len(prefix), *range(nearest, differ + 1))
    near = [place for place in places if place < len(last)]
    points: list[str] = []
    for place in sorted({*shared, *near}, reverse=True):
        point = _successor(last[: place + 1])
        is_inside = point > last and point.startswith(prefix) and (not end or point < end)
        if is_inside and (not points or point > points[-1]):
            points.append(point)
    return points


class ListingPlan:
    """Ranges of keys, in order, and the next pages to request of them.

    Requests are at most `1.2 * num_objects / page_size + 2 * max_in_flight`: a range is split only
    while that would hold even if no key were behind the split.

    Args:
        prefix: Beginning of all keys.
        max_in_flight: Most requests in flight.
        page_size: Objects in a page that is not the last.
        delimiter: The delimiter, if one level is listed.
    """

    def __init__(
        self, prefix: str, *, max_in_flight: int, page_size: int, delimiter: str = ""
    ) -> None:
        self.ranges = [KeyRange("", "", expected=float("inf"))]
        self._prefix = prefix
        self._delimiter = delimiter
        self._max_in_flight = max_in_flight
        self._asked_size = self._page_size = page_size
        self._longest = 0
        self._num_ranges = 1
        self._num_continued = 0
        self._num_objects = 0
        self._num_in_flight = 0
        self._alphabets = Alphabets()

    def be_sequential(self) -> None:
        """Request one page at a time from now on."""
        self._max_in_flight = 1

    @property
    def is_done(self) -> bool:
        """Return whether all pages were received."""
        return all(each.is_done for each in self.ranges)

    def next_requests(self, *, may_prefetch: bool = True) -> list[Request]:
        """Return the pages to request now.

        Args:
            may_prefetch: Pages of later ranges may be requested, and wait for the consumer.
        """
        num_idle = self._max_in_flight - self._num_in_flight
        if not may_prefetch:
            head = next((each for each in self.ranges if not each.is_done), None)
            return [self._ask(head)] if head and num_idle > 0 and not head.is_in_flight else []
        waiting = sum(not (each.is_done or each.is_in_flight) for each in self.ranges)
        while waiting < num_idle and (added := self._split(num_idle - waiting)):
            waiting += added
        ready = [each for each in self.ranges if not (each.is_done or each.is_in_flight)]
        return [self._ask(each) for each in ready[: max(num_idle, 0)]]

    def _ask(self, each: KeyRange) -> Request:
        each.is_in_flight = True
        self._num_in_flight += 1
        asked = each.asked
        by_token = each.token and (
            asked is not None
            and (asked.end == each.end or not each.last or self._page_size < _TOKENS_ONLY)
        )
        if by_token and asked is not None:
            return Request(each, asked.start, asked.end, each.token)
        return Request(each, each.last or each.start, each.end, "")

    def received(
        self, request: Request, num_keys: int, key_at: Callable[[int], str], next_token: str
    ) -> tuple[int, int]:
        """Add a page, and return the slice `[first, end)` of its keys that is in this range.

        Args:
            request: Its request.
            num_keys: Keys in it, in order.
            key_at: Returns one of them.
            next_token: Token of the next page; empty at the end.

        Raises:
            ValueError: It does not continue the page before.
        """
        each = request.range
        self._check(request, num_keys, key_at, next_token)
        each.is_in_flight = False
        self._num_in_flight -= 1
        keys = range(num_keys)
        first = int(num_keys > 0 and key_at(0) == each.last)
        end = bisect_left(keys, each.end, key=key_at) if each.end else num_keys
        end = max(first, end)
        self._num_objects += end - first
        each.token, each.asked = next_token, request
        each.num_empty = 0 if num_keys else each.num_empty + 1
        each.is_done = not next_token or end < num_keys
        if not each.is_done:
            self._num_continued += 1
            self._longest = max(self._longest, num_keys)
            self._page_size = min(self._asked_size, self._longest or self._asked_size)
        if first < end:
            each.last = key_at(end - 1)
            for at in range(first, end, max(1, (end - first) // _SAMPLES)):
                self._alphabets.add(key_at(at))
            self._alphabets.add(each.last)
            if not each.is_done:
                self._expect(each, key_at(first), end - first)
        return first, end

    def _check(
        self, request: Request, num_keys: int, key_at: Callable[[int], str], next_token: str
    ) -> None:
        last = request.range.last
        if not num_keys:
            if next_token and next_token == request.token:
                raise ValueError(
                    f"after {last!r} an empty page came that says it is its own next page"
                )
            if next_token and request.range.num_empty >= MAX_EMPTY_PAGES - 1:
                raise ValueError(f"after {last!r} {MAX_EMPTY_PAGES} empty pages came in a row")
            return
        first = key_at(0)
        if last and (first < last or (first == last and request.token)):
            raise ValueError(
                f"a page begins with {first!r}, though the one before ended with {last!r}"
            )
        if first < request.range.start:
            raise ValueError(
                f"a page begins with {first!r}, though keys from {request.range.start!r} on were "
                "asked for"
            )

    def _expect(self, each: KeyRange, first: str, num_objects: int) -> None:
        """Estimate how many objects follow, by the distance of the last page; split far from it."""
        start = _common(each.last, each.end) if each.end else len(self._prefix)
        depth = max(start, _common(first, each.last)) + _DEPTH
        number = self._alphabets.number
        last = number(each.last, start, depth)
        went = last - number(first, start, depth)
        behind = number(each.end, start, depth) if each.end else self._alphabets.top(start, depth)
        each.expected = num_objects * _ratio(behind - last, went)
        if each.expected > _MAX_CREDIBLE or (each.is_whole and not each.end):
            self._gallop(each, first, num_objects)

    def _gallop(self, each: KeyRange, first: str, num_objects: int) -> None:
        """Split what follows a page at ever larger distances."""
        each.is_whole = False
        if self._max_in_flight < 2:
            return
        points: list[str] = []
        for point in gallop(first, each.last, each.end, self._prefix):
            if len(points) < self._num_splits and self._reach(each, first, point) * num_objects >= (
                self._page_size
            ):
                points.append(point)
        if not points:
            return
        end = each.end
        at = self.ranges.index(each) + 1
        self.ranges[at:at] = [
            KeyRange(start, stop, is_whole=False)
            for start, stop in zip(points, [*points[1:], end], strict=True)
        ]
        self._num_ranges += len(points)
        each.end = points[0]
        each.expected = self._reach(each, first, each.end) * num_objects

    def _reach(self, each: KeyRange, first: str, point: str) -> float:
        """Return the distance of a key, in lengths of the last page."""
        start = _common(first, point)
        depth = max(start, _common(first, each.last)) + _DEPTH
        number = self._alphabets.number
        last = number(each.last, start, depth)
        return _ratio(number(point, start, depth) - last, last - number(first, start, depth))

    @property
    def _num_splits(self) -> int:
        """Ranges that may still be added."""
        allowed = 2 * self._max_in_flight + 1.2 * self._num_objects / self._page_size
        return int(allowed) - self._num_continued - self._num_ranges

    def _split(self, num_wanted: int) -> int:
        """Split the range with most objects to come, and return how many ranges that adds."""
        if num_wanted <= 0 or self._num_splits <= 0:
            return 0
        open_ranges = [each for each in self.ranges if not each.is_done]
        for each in sorted(open_ranges, key=_num_expected, reverse=True):
            under_way = self._page_size if each.is_in_flight else 0
            left = each.expected - under_way
            if left < 3 * self._page_size or each.expected == float("inf"):
                continue
            share = (under_way + left / 2) / each.expected
            point = self._in_level(
                middle(self._alphabets, each.reached, each.end, self._prefix, share)
            )
            if point <= each.reached:
                each.expected = 0.0  # no point for a split is known
                continue
            self.ranges.insert(
                self.ranges.index(each) + 1,
                KeyRange(point, each.end, expected=left / 2, is_whole=False),
            )
            self._num_ranges += 1
            each.end, each.expected, each.is_whole = point, each.expected - left / 2, False
            return 1
        return 0

    def _in_level(self, point: str) -> str:
        """Return a key up to its delimiter, if it has one."""
        at = point.find(self._delimiter, len(self._prefix)) if self._delimiter else -1
        return point if at < 0 else point[:at]

    def forget(self, num_ranges: int) -> None:
        """Drop the first ranges, which are done and consumed."""
        del self.ranges[:num_ranges]


def _num_expected(each: KeyRange) -> float:
    return each.expected

"""Plan of the requests of a listing. Pure: no clock, no service, no event loop.

    keys below a prefix = consecutive ranges [start, end), each read page by page
    page -> density and characters of its keys -> split the range with most remaining objects

A range ends at the start of the next range, so each key is in exactly one range, even if objects
are written or deleted during the listing. The key at which a range is split is a guess; a bad guess
costs one request. For the guess, keys are converted to numbers, whose digits are the characters
that were seen at each position, and the range is split in the middle of its remaining numbers.
The keys of the first page say little about all keys. So the first splits gallop: after the key
"train/0004999" the splits are at "train/001", "train/01", "train/1", "train0" and "u".

If one level is listed, a common prefix ("train/") is treated as a key, and no range begins after a
delimiter: then all keys with a common prefix are in one range, which returns the prefix once.
"""

from __future__ import annotations

import string
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import Any

from aioflux._services.base import MAX_EMPTY_PAGES

_MAX_CREDIBLE = 50_000_000
"""Largest credible estimate of the objects in a range. A larger estimate means that the known keys
have a long common beginning, so that the middle of the range would be far from all keys."""
_SAMPLES = 16
"""Keys of each page from which the characters are collected."""
_DEPTH = 4
"""Number of characters that are used after the first position in which keys of a page differ."""
_TOKENS_ONLY = 6
"""Pages of fewer keys are always requested by token. A request by start key returns the last key of
the previous page again, which would be a large part of so small a page."""
_LETTERS = (("abcdef", string.ascii_lowercase), ("ABCDEF", string.ascii_uppercase))
_LAST_CHARACTER = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


class Alphabets:
    """The characters that keys have at each position. They convert keys to numbers and back."""

    def __init__(self) -> None:
        self._seen: list[set[str]] = []
        self._sorted: dict[int, list[str]] = {}

    def add(self, key: str) -> None:
        """Add a key."""
        self._sorted.clear()
        seen = self._seen
        seen.extend(set() for _ in range(len(key) - len(seen)))
        for place, character in enumerate(key):
            seen[place].add(character)

    def at(self, place: int) -> list[str]:
        """Return the characters that a key may have at a position, sorted.

        They are the characters seen at this position and the next two, and all characters of the
        same kinds: digits, hexadecimal digits or letters.
        """
        characters = self._sorted.get(place)
        if characters is None:
            seen: set[str] = set().union(*self._seen[place : place + 3])
            characters = self._sorted[place] = sorted(seen | _same_kinds(seen))
        return characters

    def number(self, key: str, start: int, end: int) -> int:
        """Return the characters `[start, end)` of a key as a number; a missing character is 0."""
        value = 0
        for place in range(start, end):
            alphabet = self.at(place)
            digit = bisect_right(alphabet, key[place]) if place < len(key) else 0
            value = value * (len(alphabet) + 1) + digit
        return value

    def top(self, start: int, end: int) -> int:
        """Return one more than the largest number of any key at these positions."""
        return prod(len(self.at(place)) + 1 for place in range(start, end))

    def text(self, value: int, start: int, end: int) -> str:
        """Return the characters of a number at the positions `[start, end)`; see `number`."""
        characters = ""
        for place in reversed(range(start, end)):
            value, digit = divmod(value, len(self.at(place)) + 1)
            characters = self.at(place)[digit - 1] + characters if digit else ""
        return characters


def _same_kinds(seen: set[str]) -> set[str]:
    """Return all characters of the kinds of `seen`; only a-f if no other letter was seen."""
    characters = set(string.digits) if seen & set(string.digits) else set()
    for narrow, wide in _LETTERS:
        if letters := seen & set(wide):
            characters |= set(narrow if letters <= set(narrow) else wide)
    return characters


def _successor(text: str) -> str:
    """Return the first string after all strings that begin with `text`; empty if there is none."""
    while text:
        successor = ord(text[-1]) + 1
        if successor in _SURROGATES:
            successor = _SURROGATES.stop
        if successor <= _LAST_CHARACTER:
            return text[:-1] + chr(successor)
        text = text[:-1]
    return ""


def _common(first: str, second: str) -> int:
    """Return the length of the common beginning of two strings."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _ratio(part: int, whole: int) -> float:
    """Return the quotient as a float; infinity if it is too large or `whole` is 0."""
    if whole <= 0 or part.bit_length() - whole.bit_length() > 64:
        return float("inf")
    return part / whole


@dataclass(frozen=True, slots=True)
class Request:
    """Request of one page."""

    range: KeyRange
    start: str
    """First key; empty to start at the first key of the listing."""
    end: str
    """One past the last key; empty for the end of the listing."""
    token: str
    """The service's token of the page; empty for a request by `start`."""


@dataclass(slots=True, eq=False)
class KeyRange:
    """Keys from `start` up to `end`, and the progress of their listing."""

    start: str
    end: str
    """One past the last key; empty for the end of the listing."""
    expected: float = 0.0
    """Estimated number of objects after `last`."""
    last: str = ""
    """Last key that was received; empty before the first page."""
    token: str = ""
    """Token of the next page, from the last response."""
    last_request: Request | None = None
    """Request whose response returned `token`."""
    num_empty: int = 0
    """Consecutive pages without a key."""
    is_in_flight: bool = False
    is_done: bool = False
    pages: deque[Any] = field(default_factory=deque)
    """Pages that wait for the consumer, kept for the executor of the plan."""

    @property
    def listed_up_to(self) -> str:
        """Key after which the range can be split."""
        return self.last or self.start


def middle(alphabets: Alphabets, low: str, high: str, prefix: str, share: float) -> str:
    """Return a key between two keys, or an empty string if none is found.

    Args:
        alphabets: Characters of the keys.
        low: Key below the result.
        high: Key above the result; empty for the end of the listing.
        prefix: Beginning of all keys.
        share: Wanted distance from `low`, as a share of the distance to `high`: 0 to 1.
    """
    start = _common(low, high) if high else len(prefix)
    for end in range(start + 2, start + 3 * _DEPTH, _DEPTH):
        low_number = alphabets.number(low, start, end)
        high_number = alphabets.number(high, start, end) if high else alphabets.top(start, end)
        value = low_number + int((high_number - low_number) * share)
        text = low[:start] + alphabets.text(value, start, end)
        if text > low and (not high or text < high) and text.startswith(prefix):
            return text
    return ""


def gallop(page_first: str, last: str, end: str, prefix: str) -> list[str]:
    """Return sorted keys between `last` and `end`, at fast growing distances from `last`.

    Args:
        page_first: First key of the last page.
        last: Last key of the last page.
        end: Key above all returned keys; empty for the end of the listing.
        prefix: Beginning of all keys.
    """
    differ = _common(page_first, last)
    # `shared`: the position of each slash in the common beginning of the page's keys, and the
    # position after it. `near`: the end of the prefix, the last positions of this beginning, and
    # the position after it.
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
    """The ranges of a listing, in the order of keys, and their next requests.

    A listing sends at most `1.2 * num_objects / page_size + 2 * max_in_flight` requests: a range is
    only split if this bound is kept even when there is no key after the split.

    Args:
        prefix: Beginning of all keys.
        max_in_flight: Largest number of requests in flight; may be changed later.
        page_size: Number of objects in each page except the last.
        delimiter: The delimiter if one level is listed, otherwise empty.
        window: Number of next pages that are requested in parallel. A few more may wait for the
            consumer.
    """

    def __init__(
        self,
        prefix: str,
        *,
        max_in_flight: int,
        page_size: int,
        delimiter: str = "",
        window: float = float("inf"),
    ) -> None:
        self.ranges = [KeyRange("", "", expected=float("inf"))]
        self._is_whole = True
        self._prefix = prefix
        self._delimiter = delimiter
        self.max_in_flight = max_in_flight
        self._window = window
        self._requested_size = self._page_size = page_size
        self._largest_page = 0
        self._num_ranges = 1
        self._num_continued = 0
        self._num_objects = 0
        self._num_in_flight = 0
        self._alphabets = Alphabets()

    def next_requests(self) -> list[Request]:
        """Return the requests to send now, in the order of keys.

        If the pages of all ranges were requested in turn, all that may wait would be far from the
        consumer, which would then wait for one page after the other of the first range. So the
        ranges of the next `window` pages are split and requested. Other ranges are requested while
        few pages wait; only the first range if the window has more pages than estimated.
        """
        num_idle = self.max_in_flight - self._num_in_flight
        near = self._near_ranges()
        while sum(not each.is_in_flight for each in near) < num_idle and self._split(near):
            near = self._near_ranges()
        num_waiting = sum(len(key_range.pages) for key_range in self.ranges)
        requested = near if num_waiting < 1.5 * self._window else near[:1]
        if num_waiting < self._window / 2:
            requested = self.ranges
        ready = [each for each in requested if not (each.is_done or each.is_in_flight)]
        return [self._next_request(key_range) for key_range in ready[: max(num_idle, 0)]]

    def _near_ranges(self) -> list[KeyRange]:
        """Return the unfinished ranges of about the next `window` pages; at least one."""
        found: list[KeyRange] = []
        num_pages = 0.0
        for key_range in self.ranges:
            if found and num_pages >= self._window:
                break
            num_pages += len(key_range.pages)
            if not key_range.is_done:
                found.append(key_range)
                num_pages += max(1.0, key_range.expected / self._page_size)
        return found

    def _next_request(self, key_range: KeyRange) -> Request:
        """Return the request of the next page: by token, or by key if the range was split since."""
        key_range.is_in_flight = True
        self._num_in_flight += 1
        last = key_range.last_request
        is_same = last is not None and (last.end == key_range.end or not key_range.last)
        if last and key_range.token and (is_same or self._page_size < _TOKENS_ONLY):
            return Request(key_range, last.start, last.end, key_range.token)
        return Request(key_range, key_range.listed_up_to, key_range.end, "")

    def add_page(
        self, request: Request, num_keys: int, key_at: Callable[[int], str], next_token: str
    ) -> tuple[int, int]:
        """Add a received page, and return the slice `[first, end)` of its keys that are new.

        Keys after the end of the range are not in the slice: the range was split meanwhile.

        Args:
            request: The request of the page.
            num_keys: Number of keys in the page.
            key_at: Returns a key of the page by its index.
            next_token: Token of the next page; empty on the last page.

        Raises:
            ValueError: The page does not continue the page before.
        """
        key_range = request.range
        self._check(request, num_keys, key_at, next_token)
        key_range.is_in_flight = False
        self._num_in_flight -= 1
        keys = range(num_keys)
        first = int(num_keys > 0 and key_at(0) == key_range.last)
        end = bisect_left(keys, key_range.end, key=key_at) if key_range.end else num_keys
        end = max(first, end)
        self._num_objects += end - first
        key_range.token, key_range.last_request = next_token, request
        key_range.num_empty = 0 if num_keys else key_range.num_empty + 1
        key_range.is_done = not next_token or end < num_keys
        if not key_range.is_done:
            self._num_continued += 1
            self._largest_page = max(self._largest_page, num_keys)
            self._page_size = min(self._requested_size, self._largest_page or self._requested_size)
        if first < end:
            key_range.last = key_at(end - 1)
            for index in range(first, end, max(1, (end - first) // _SAMPLES)):
                self._alphabets.add(key_at(index))
            self._alphabets.add(key_range.last)
            if not key_range.is_done:
                self._expect(key_range, key_at(first), end - first)
        return first, end

    def _check(
        self, request: Request, num_keys: int, key_at: Callable[[int], str], next_token: str
    ) -> None:
        last = request.range.last
        if not num_keys:
            if next_token and next_token == request.token:
                raise ValueError(
                    f"the page after {last!r} is empty, and has its own token as the next token"
                )
            if next_token and request.range.num_empty >= MAX_EMPTY_PAGES - 1:
                raise ValueError(f"the {MAX_EMPTY_PAGES} pages after {last!r} are empty")
            return
        first = key_at(0)
        if last and (first < last or (first == last and request.token)):
            raise ValueError(
                f"a page begins with {first!r}, though the page before ended with {last!r}"
            )
        if first < request.range.start:
            raise ValueError(
                f"a page begins with {first!r}, but was requested from {request.range.start!r} on"
            )

    def _expect(self, key_range: KeyRange, first: str, num_objects: int) -> None:
        """Estimate the remaining objects of a range by the density of its last page.

        If the estimate is not credible, or the page is the first of the listing, split by `gallop`.
        """
        start = _common(key_range.last, key_range.end) if key_range.end else len(self._prefix)
        depth = max(start, _common(first, key_range.last)) + _DEPTH
        number = self._alphabets.number
        last = number(key_range.last, start, depth)
        page_span = last - number(first, start, depth)
        end = (
            number(key_range.end, start, depth)
            if key_range.end
            else self._alphabets.top(start, depth)
        )
        key_range.expected = num_objects * _ratio(end - last, page_span)
        if key_range.expected > _MAX_CREDIBLE or self._is_whole:
            self._gallop(key_range, first, num_objects)

    def _gallop(self, key_range: KeyRange, first: str, num_objects: int) -> None:
        """Split a range after its last page, at fast growing distances."""
        self._is_whole = False
        if self.max_in_flight < 2:
            return
        points: list[str] = []
        for point in gallop(first, key_range.last, key_range.end, self._prefix):
            num_before = self._distance(key_range, first, point) * num_objects
            if len(points) < self._num_splits and num_before >= self._page_size:
                points.append(point)
        if not points:
            return
        end = key_range.end
        index = self.ranges.index(key_range) + 1
        self.ranges[index:index] = [
            KeyRange(start, stop) for start, stop in zip(points, [*points[1:], end], strict=True)
        ]
        self._num_ranges += len(points)
        key_range.end = points[0]
        key_range.expected = self._distance(key_range, first, key_range.end) * num_objects

    def _distance(self, key_range: KeyRange, first: str, point: str) -> float:
        """Return the distance from the last page to a key.

        The unit is the distance from the first key of that page to the last.
        """
        start = _common(first, point)
        depth = max(start, _common(first, key_range.last)) + _DEPTH
        number = self._alphabets.number
        last = number(key_range.last, start, depth)
        return _ratio(number(point, start, depth) - last, last - number(first, start, depth))

    @property
    def _num_splits(self) -> int:
        """Number of ranges that may be added within the bound of requests."""
        allowed = 2 * self.max_in_flight + 1.2 * self._num_objects / self._page_size
        return int(allowed) - self._num_continued - self._num_ranges

    def _split(self, near: list[KeyRange]) -> bool:
        """Split the range of `near` with most remaining objects, and insert the new range."""
        if self._num_splits <= 0:
            return False
        for key_range in sorted(near, key=attrgetter("expected"), reverse=True):
            num_in_flight = self._page_size if key_range.is_in_flight else 0
            remaining = key_range.expected - num_in_flight
            if remaining < 3 * self._page_size or key_range.expected == float("inf"):
                continue
            share = (num_in_flight + remaining / 2) / key_range.expected
            point = self._up_to_delimiter(
                middle(self._alphabets, key_range.listed_up_to, key_range.end, self._prefix, share)
            )
            if point <= key_range.listed_up_to:
                key_range.expected = 0.0  # no key was found at which the range could be split
                continue
            self.ranges.insert(
                self.ranges.index(key_range) + 1,
                KeyRange(point, key_range.end, expected=remaining / 2),
            )
            self._num_ranges += 1
            key_range.end = point
            key_range.expected -= remaining / 2
            return True
        return False

    def _up_to_delimiter(self, point: str) -> str:
        """Return the part of a key before its first delimiter after the prefix."""
        index = point.find(self._delimiter, len(self._prefix)) if self._delimiter else -1
        return point if index < 0 else point[:index]

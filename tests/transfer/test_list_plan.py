"""Ranges of keys: sorted, complete, without duplicates, and within the bound of requests."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux._transfer.list_plan import Alphabets, ListingPlan, Request, gallop, middle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANDOM = random.Random(7)


class Source:
    """Keys in memory, which answers requests and counts them."""

    def __init__(self, keys: Sequence[str], page_size: int) -> None:
        self.keys = sorted(keys)
        self.page_size = page_size
        self.num_requests = 0

    def page(self, request: Request) -> tuple[list[str], str]:
        self.num_requests += 1
        first = bisect_left(self.keys, max(request.start, request.token))
        end = bisect_left(self.keys, request.end) if request.end else len(self.keys)
        stop = min(first + self.page_size, end)
        return self.keys[first:stop], self.keys[stop] if stop < end else ""


def listed(
    source: Source | Level,
    *,
    prefix: str = "",
    delimiter: str = "",
    max_in_flight: int = 8,
    choose: Callable[[int], int] = lambda num: num - 1,
    meanwhile: Callable[[], None] = lambda: None,
    window: float = math.inf,
) -> tuple[list[str], int]:
    """List a source; `choose` says which of the requests under way is answered next.

    Returns:
        The keys, and the pages that a consumer would have waited for: rounds.
    """
    plan = ListingPlan(
        prefix,
        max_in_flight=max_in_flight,
        page_size=source.page_size,
        delimiter=delimiter,
        window=window,
    )
    under_way: list[Request] = []
    num_answered = num_most = 0
    while True:
        under_way += plan.next_requests()
        num_most = max(num_most, len(under_way))
        assert num_most <= max_in_flight
        if not under_way:
            break
        request = under_way.pop(choose(len(under_way)) % len(under_way))
        keys, token = source.page(request)
        meanwhile()
        start, end = plan.add_page(request, len(keys), keys.__getitem__, token)
        request.range.pages.append(keys[start:end])
        num_answered += 1
    assert all(key_range.is_done for key_range in plan.ranges)
    return [key for each in plan.ranges for page in each.pages for key in page], num_most


def bound(source: Source | Level, max_in_flight: int) -> float:
    return 1.2 * len(source.keys) / source.page_size + 2 * max_in_flight


HEX = [f"{RANDOM.getrandbits(64):016x}" for _ in range(30_000)]
WORDS = ["".join(RANDOM.choices("äöü日本語漢字😀abc", k=8)) for _ in range(20_000)]

ADVERSARIAL = {
    "none": [],
    "one": ["a"],
    "common prefix": [f"train/images/{at:07}.jpg" for at in range(50_000)],
    "dense digits": [f"{at:05}" for at in range(100_000)],
    "no padding": [f"img_{at}.jpg" for at in range(50_000)],
    "hexadecimal": sorted(set(HEX)),
    "unicode": sorted(set(WORDS)),
    "one giant prefix": ["a", *(f"b/{at:06}" for at in range(50_000)), "c"],
    "late": [*(f"a/{at:04}" for at in range(5_000)), *(f"z/x/{at:09}" for at in range(50_000))],
    "lowest byte": [*("a" * at for at in range(1, 800)), *("b" + "\0" * at for at in range(800))],
    "a key and what follows": ["img", "img-", *(f"img-{at:05}" for at in range(20_000))],
    "nested": [f"{a}/{b}/{c}" for a in "pqr" for b in range(100) for c in range(100)],
    "surrogates' neighbours": [f"\ud7ff\ue000{at:05}\U0010ffff" for at in range(20_000)],
    "highest": ["\U0010ffff" * at for at in range(1, 1_000)],
}


@pytest.mark.parametrize("max_in_flight", [1, 8, 32])
@pytest.mark.parametrize("page_size", [100, 1000])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_every_key_is_listed_once_and_in_order(
    name: str, page_size: int, max_in_flight: int
) -> None:
    source = Source(ADVERSARIAL[name], page_size)
    keys, _ = listed(source, max_in_flight=max_in_flight, choose=lambda _: 0)
    assert keys == source.keys
    assert source.num_requests <= bound(source, max_in_flight)


@pytest.mark.parametrize("name", ["common prefix", "dense digits", "hexadecimal", "late", "nested"])
def test_a_large_listing_is_requested_at_once(name: str) -> None:
    """Of 16 that may ask, at least 12 do at some moment."""
    _, num_most = listed(Source(ADVERSARIAL[name], 100), max_in_flight=16, choose=lambda _: 0)
    assert num_most >= 12


@given(
    st.sets(st.text(st.sampled_from("ab\0/é\U0001f600\U0010ffff0"), max_size=7), max_size=80),
    st.integers(1, 9),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_any_keys_in_any_order_of_answers(
    keys: set[str], page_size: int, max_in_flight: int, rng: random.Random
) -> None:
    source = Source(list(keys - {""}), page_size)
    found, _ = listed(source, max_in_flight=max_in_flight, choose=rng.randrange)
    assert found == source.keys
    assert source.num_requests <= bound(source, max_in_flight)


class Level:
    """One level of keys in memory: of those with a delimiter behind it, how they begin."""

    def __init__(self, keys: set[str], prefix: str, delimiter: str, page_size: int) -> None:
        self.all = sorted(key for key in keys if key.startswith(prefix))
        self.prefix, self.delimiter = prefix, delimiter
        self.page_size = page_size
        self.num_requests = 0
        self.entry_of = {}
        for key in self.all:
            at = key.find(delimiter, len(prefix))
            self.entry_of[key] = key if at < 0 else key[: at + len(delimiter)]
        self.keys = sorted(set(self.entry_of.values()))

    def page(self, request: Request) -> tuple[list[str], str]:
        """Of what stands for many keys, those count that are in the range."""
        self.num_requests += 1
        # Of what stands for many keys, a range must have all or none.
        at = request.start.find(self.delimiter, len(self.prefix))
        assert at in {-1, len(request.start) - len(self.delimiter)}
        taken: list[str] = []
        for place in range(bisect_left(self.all, max(request.start, request.token)), len(self.all)):
            key = self.all[place]
            if request.end and key >= request.end:
                break
            # Of one beginning all keys follow each other.
            if not taken or self.entry_of[key] != taken[-1]:
                if len(taken) == self.page_size:
                    return taken, key
                taken.append(self.entry_of[key])
        return taken, ""


@given(
    st.sets(st.text(st.sampled_from("ab/.0\U0010ffff"), max_size=7), max_size=80),
    st.sampled_from(["", "a", "a/"]),
    st.sampled_from(["/", "ab", "b/"]),
    st.integers(1, 9),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_any_level_in_any_order_of_answers(
    keys: set[str],
    prefix: str,
    delimiter: str,
    page_size: int,
    max_in_flight: int,
    rng: random.Random,
) -> None:
    """Each key and each beginning is told once, without a look at what was told before."""
    source = Level(keys - {""}, prefix, delimiter, page_size)
    found, _ = listed(
        source,
        prefix=prefix,
        delimiter=delimiter,
        max_in_flight=max_in_flight,
        choose=rng.randrange,
    )
    assert found == source.keys
    assert source.num_requests <= bound(source, max_in_flight)


@pytest.mark.parametrize("page_size", [1, 2, 6, 10])
@pytest.mark.parametrize("letters", ["01/", "01/a", "/~"])
def test_a_level_whose_keys_end_everywhere(letters: str, page_size: int) -> None:
    texts = ["".join(each) for num in range(1, 7) for each in product(letters, repeat=num)]
    source = Level({f"k/{text}" for text in texts}, "k/", "/", page_size)
    found, _ = listed(source, prefix="k/", delimiter="/", max_in_flight=16)
    assert found == source.keys


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("below", [1, 20])
def test_a_large_level_is_requested_at_once(width: int, below: int) -> None:
    """No range begins behind a delimiter: of what it stands for, another range would tell again."""
    keys = {f"a/{at:0{width}}/{each}" for at in range(5_000) for each in range(below)}
    source = Level(keys, "a/", "/", 100)
    plan = ListingPlan("a/", max_in_flight=16, page_size=100, delimiter="/")
    found: list[str] = []
    num_most = 0
    while requests := plan.next_requests():
        num_most = max(num_most, len(requests))
        for request in requests:
            names, token = source.page(request)
            start, end = plan.add_page(request, len(names), names.__getitem__, token)
            found += names[start:end]
    assert sorted(found) == source.keys
    assert num_most >= 12
    assert source.num_requests <= bound(source, 16)


@given(st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_a_listing_with_a_small_window_is_complete(window: int, rng: random.Random) -> None:
    """While more pages wait, only the first range is requested, and the listing still ends."""
    source = Source([f"{at:04}" for at in range(2_000)], 20)
    found, _ = listed(source, choose=rng.randrange, window=window)
    assert found == source.keys


@pytest.mark.parametrize("name", ["dense digits", "one giant prefix", "hexadecimal", "late"])
def test_next_pages_are_received_in_parallel_and_few_wait(name: str) -> None:
    """A consumer that takes pages in order waits for at most a fourth of them."""
    source = Source(ADVERSARIAL[name], 100)
    plan = ListingPlan("", max_in_flight=16, page_size=100, window=32)
    found: list[str] = []
    num_rounds = most_waiting = 0
    while requests := plan.next_requests():
        num_rounds += 1
        for request in requests:
            names, token = source.page(request)
            start, end = plan.add_page(request, len(names), names.__getitem__, token)
            request.range.pages.append(names[start:end])
        while plan.ranges and (plan.ranges[0].pages or plan.ranges[0].is_done):
            if plan.ranges[0].pages:
                found += plan.ranges[0].pages.popleft()
            else:
                del plan.ranges[0]
        most_waiting = max(most_waiting, sum(len(each.pages) for each in plan.ranges))
    assert found == source.keys
    assert num_rounds <= len(source.keys) / 100 / 4
    assert most_waiting <= 1.5 * 32 + 16


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_what_is_there_all_along_is_listed_once_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    stays = {f"k/{at:04}" for at in range(0, 3_000, 3)}
    comes = [f"k/{at:04}" for at in range(3_000) if at % 3]
    source = Source([*stays, *comes[:500]], 100)

    def change() -> None:
        source.keys = sorted(stays.union(rng.sample(comes, 500)))

    found, _ = listed(source, choose=rng.randrange, meanwhile=change)
    assert found == sorted(set(found))
    assert stays <= set(found)


@pytest.mark.parametrize("num", [0, 1, 10, 999])
def test_what_fits_into_a_page_costs_one_request(num: int) -> None:
    source = Source([f"{at}" for at in range(num)], 1000)
    listed(source, max_in_flight=32)
    assert source.num_requests == 1


def test_a_listing_below_a_prefix_asks_for_nothing_beyond_it() -> None:
    source = Source([f"a/{at:05}" for at in range(20_000)], 100)
    plan = ListingPlan("a/", max_in_flight=8, page_size=100)
    while requests := plan.next_requests():
        for request in requests:
            assert not request.start or request.start.startswith("a/")
            keys, token = source.page(request)
            plan.add_page(request, len(keys), keys.__getitem__, token)


texts = st.text(st.sampled_from("01a/é\0\U0010ffff"), max_size=6)


@given(texts, texts, st.floats(0, 1), st.lists(texts, max_size=5))
def test_a_middle_is_between(low: str, high: str, share: float, seen: list[str]) -> None:
    low, high = sorted((low, high))
    alphabets = Alphabets()
    for key in (low, *seen):
        alphabets.add(key)
    point = middle(alphabets, low, high, "", share)
    assert not point or (low < point and (not high or point < high))


def test_the_middle_of_digits_is_the_middle() -> None:
    alphabets = Alphabets()
    for key in ("k/0000.x", "k/0999.x"):
        alphabets.add(key)
    assert middle(alphabets, "k/0000.x", "k/8", "k/", 0.5).startswith("k/4")


@given(texts, texts, texts)
def test_a_gallop_is_sorted_and_inside(first: str, last: str, end: str) -> None:
    first, last = sorted((first, last))
    points = gallop(first, last, end, "")
    assert points == sorted(set(points))
    assert all(last < point and (not end or point < end) for point in points)


def test_a_gallop_goes_far_quickly() -> None:
    points = gallop("train/0000000.jpg", "train/0004999.jpg", "", "")
    assert points == ["train/0005", "train/001", "train/01", "train/1", "train0", "u"]


def test_keys_before_the_range_that_was_requested_are_rejected() -> None:
    plan = ListingPlan("", max_in_flight=4, page_size=1000, delimiter="")
    [request] = plan.next_requests()[:1]
    request.range.start = "m"
    with pytest.raises(ValueError, match="but was requested from 'm' on"):
        plan.add_page(request, 1, ["a"].__getitem__, "")

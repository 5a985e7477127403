"""Listings of many ranges at once; those that go on where a page ended, and those that do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import StorageError
from aioflux._services.base import MAX_EMPTY_PAGES, ListRequest, Page
from aioflux._values.glob import compile_glob, literal_prefix
from tests.transfer.scripted_service import LOSE, REFUSE, refused_for_good

if TYPE_CHECKING:
    import aioflux
    from tests.transfer.scripted_service import ScriptedService


class Pages:
    """A service that answers with these pages, then with the last again and again."""

    def __init__(self, scripted: ScriptedService, *pages: tuple[str, str]) -> None:
        self.tokens: list[str] = []
        meta = scripted.put("x", b"")
        rest = iter(pages)
        numbers = count()

        async def list_page(request: ListRequest) -> Page:
            self.tokens.append(request.page_token)
            keys, token = next(rest, pages[-1])
            if token == "new":
                token = f"t{next(numbers)}"
            return Page([replace(meta, key=key) for key in keys], [], token)

        scripted.service.list_page = list_page


async def listed(scripted: ScriptedService) -> str:
    # One after the other: these pages are of no keys that could be cut.
    store = scripted.new_store(max_in_flight=1)
    pages = [page async for page in store.list_pages("p/")]
    return "".join(meta.key for page in pages for meta in page)


async def test_pages_that_follow_each_other_are_all_given(scripted: ScriptedService) -> None:
    pages = Pages(scripted, ("ab", "1"), ("", "2"), ("", "3"), ("c", "3"), ("d", ""))
    assert await listed(scripted) == "abcd"
    assert pages.tokens == ["", "1", "2", "3", "3"]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([("ab", "new")], "begins with 'a', though the page before ended with 'b'"),
        ([("ab", "new"), ("bc", "")], "begins with 'b', though the page before ended with 'b'"),
        ([("ab", "same")], "begins with 'a'"),
        ([("cd", "1"), ("", "2"), ("ab", "")], "begins with 'a', though .* ended with 'd'"),
        ([("ab", "1"), ("", "1")], "page after 'b' is empty"),
        ([("", "1")], "page after '' is empty"),
    ],
)
async def test_a_page_that_does_not_go_on_is_an_error(
    scripted: ScriptedService, pages: list[tuple[str, str]], message: str
) -> None:
    Pages(scripted, *pages)
    with pytest.raises(StorageError, match=rf"could not list memory://.*/p/: .*{message}"):
        await listed(scripted)
    assert scripted.is_clean()


async def test_empty_pages_whose_tokens_never_come_twice_end(scripted: ScriptedService) -> None:
    pages = Pages(scripted, ("ab", "1"), ("", "new"))
    with pytest.raises(
        StorageError, match=r"could not list memory://.*/p/: .*10000 pages after .* are empty"
    ):
        await listed(scripted)
    assert len(pages.tokens) == 1 + MAX_EMPTY_PAGES
    assert scripted.is_clean()


async def test_a_run_of_empty_pages_ends_with_a_page_that_is_not(scripted: ScriptedService) -> None:
    run = [("", f"{number}") for number in range(MAX_EMPTY_PAGES - 1)]
    Pages(scripted, *run, ("a", "x"), *run, ("b", ""))
    assert await listed(scripted) == "ab"


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def filled(scripted: ScriptedService, num: int = 10_000) -> list[str]:
    keys = [f"p/{at:06}" for at in range(num)]
    for key in keys:
        scripted.put(key, b"")
    return keys


class Gauge:
    """Counts the requests of a service that are under way; `gate` holds them back."""

    def __init__(self, scripted: ScriptedService) -> None:
        self.num_now = self.num_most = self.num_all = 0
        self.prefixes: set[str] = set()
        self.gate, self.held = asyncio.Event(), asyncio.Event()
        self.gate.set()
        inner = scripted.service.list_page

        async def list_page(request: ListRequest) -> Page:
            self.prefixes.add(request.prefix)
            self.num_now += 1
            self.num_all += 1
            self.num_most = max(self.num_most, self.num_now)
            try:
                if not self.gate.is_set():
                    self.held.set()
                await asyncio.sleep(0)
                await self.gate.wait()
                return await inner(request)
            finally:
                self.num_now -= 1

        scripted.service.list_page = list_page


async def test_a_listing_is_sorted_and_complete_and_requested_at_once(
    scripted: ScriptedService,
) -> None:
    keys = filled(scripted)
    gauge = Gauge(scripted)
    store = scripted.new_store(max_in_flight=8)
    listing = await store.list_all("p/")
    assert list(listing.keys) == keys
    assert gauge.num_most > 4
    assert gauge.num_all <= 1.2 * 10 + 2 * 8
    assert scripted.is_clean()


async def test_ten_objects_cost_one_request(scripted: ScriptedService) -> None:
    filled(scripted, 10)
    gauge = Gauge(scripted)
    assert len(await scripted.new_store(max_in_flight=64).list_all("")) == 10
    assert gauge.num_all == 1


async def test_pages_are_prefetched_once_the_second_is_needed(scripted: ScriptedService) -> None:
    filled(scripted)
    gauge = Gauge(scripted)
    pages = scripted.store.list_pages("p/")
    assert len(await anext(pages)) == 1000
    await settle()
    assert gauge.num_all == 1
    await anext(pages)
    await settle()
    assert gauge.num_all > 2
    await pages.aclose()


async def test_pages_of_a_chosen_size_are_not_prefetched(scripted: ScriptedService) -> None:
    filled(scripted, 10)
    gauge = Gauge(scripted)
    pages = scripted.store.list_pages("p/", page_size=3)
    for number in range(1, 4):
        assert len(await anext(pages)) == 3
        await settle()
        assert gauge.num_all == number
    await pages.aclose()


async def test_failures_of_some_ranges_are_mended(scripted: ScriptedService) -> None:
    keys = filled(scripted)
    scripted.service.fail("list_page", None, REFUSE, LOSE, None, REFUSE, LOSE)
    assert list((await scripted.store.list_all("")).keys) == keys
    assert scripted.is_clean()


async def test_a_range_that_fails_fails_the_listing_and_ends_the_others(
    scripted: ScriptedService,
) -> None:
    filled(scripted)
    scripted.service.fail("list_page", None, None, refused_for_good())
    gauge = Gauge(scripted)
    with pytest.raises(StorageError, match="no"):
        await scripted.store.list_all("")
    assert gauge.num_now == 0
    assert scripted.is_clean()


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_nothing_is_under_way_after_a_listing_was_left(
    scripted: ScriptedService, how: str
) -> None:
    filled(scripted)
    gauge = Gauge(scripted)
    pages = scripted.store.list_pages("p/")
    await anext(pages)
    gauge.gate.clear()
    waiting = asyncio.ensure_future(anext(pages))
    await gauge.held.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    if how == "closed":
        await pages.aclose()
    assert gauge.num_now == 0
    assert scripted.is_clean()


async def test_what_is_there_all_along_is_listed_once_while_others_come_and_go(
    scripted: ScriptedService,
) -> None:
    keys = filled(scripted)
    stays = set(keys[::2])
    found: list[str] = []
    turns = count()
    async for page in scripted.store.list_pages(""):
        found += page.keys
        for at in range(next(turns) % 4, len(keys), 8):
            if keys[at] in stays:
                continue
            if keys[at] in scripted.bucket.objects:
                scripted.bucket.remove(keys[at])
            else:
                scripted.put(keys[at], b"new")
    assert found == sorted(set(found))
    assert stays <= set(found)


async def test_a_service_that_begins_elsewhere_is_an_error(scripted: ScriptedService) -> None:
    """One that does not know of a first key would give each key as often as there are ranges."""
    filled(scripted)
    inner = scripted.service.list_page

    async def list_page(request: ListRequest) -> Page:
        return await inner(replace(request, start_offset=""))

    scripted.service.list_page = list_page
    with pytest.raises(StorageError, match="returned a wrong page"):
        await scripted.store.list_all("")
    assert scripted.is_clean()


@pytest.fixture
async def nested_store(scripted: ScriptedService) -> aioflux.Store:
    for key in ("a", "b/1", "b/2", "b/c/3", "d/4", "e", ".aioflux-uploads/5", "x[y]/z.jpg"):
        scripted.put(key, b"")
    return scripted.store


async def test_one_level_has_keys_and_prefixes(nested_store: aioflux.Store) -> None:
    listing = await nested_store.list_all("", delimiter="/")
    assert (list(listing.keys), listing.prefixes) == (["a", "e"], ["b/", "d/", "x[y]/"])
    listing = await nested_store.list_all("b/", delimiter="/")
    assert (list(listing.keys), listing.prefixes) == (["b/1", "b/2"], ["b/c/"])
    listing = await nested_store.list_all(".aioflux-uploads/", delimiter="/")
    assert list(listing.keys) == [".aioflux-uploads/5"]


def level_of(scripted: ScriptedService, delimiter: str, prefix: str) -> tuple[list[str], list[str]]:
    """Return what one level has, by looking at every key."""
    keys: list[str] = []
    prefixes: set[str] = set()
    for key in scripted.bucket.objects:
        if key.startswith(prefix):
            at = key.find(delimiter, len(prefix))
            if at < 0:
                keys.append(key)
            else:
                prefixes.add(key[: at + len(delimiter)])
    return sorted(keys), sorted(prefixes)


@pytest.mark.parametrize("name", ["both", "prefixes", "one giant prefix", "neighbours", "objects"])
async def test_one_level_is_listed_by_ranges(scripted: ScriptedService, name: str) -> None:
    """What stands for many keys is told once, whichever ranges they are in."""
    keys = {
        "both": [f"p/{at:05}{'/x' * (at % 3 == 0)}" for at in range(9_000)],
        "prefixes": [f"p/{at:05}/{each}" for at in range(9_000) for each in "ab"],
        "one giant prefix": [*(f"p/a/{at:05}" for at in range(9_000)), "p/a0", "p/a.", "p/z"],
        "neighbours": [f"p/{at:04}{end}" for at in range(3_000) for end in ("-", "/1", "0")],
        "objects": [f"p/{at:05}" for at in range(9_000)],
    }[name]
    for key in keys:
        scripted.put(key, b"")
    gauge = Gauge(scripted)
    listing = await scripted.new_store(max_in_flight=8).list_all("p/", delimiter="/")
    expected = level_of(scripted, "/", "p/")
    assert (list(listing.keys), listing.prefixes) == expected
    num_entries = len(expected[0]) + len(expected[1])
    assert gauge.num_all <= 1.2 * num_entries / 1000 + 2 * 8
    assert (gauge.num_most > 3) == (num_entries > 1000)
    assert scripted.is_clean()


async def test_of_a_page_of_one_level_a_range_takes_what_is_its_own(
    scripted: ScriptedService,
) -> None:
    """A range may be cut while its page is under way, and the page then goes on beyond it."""
    for at in range(9_000):
        scripted.put(f"p/{at:05}{'/x' * (at % 3 == 0)}", b"")
    inner = scripted.service.list_page

    async def list_page(request: ListRequest) -> Page:
        end_offset = request.end_offset
        page = await inner(replace(request, end_offset=""))
        last = max([*(meta.key for meta in page.objects), *page.prefixes], default="")
        return replace(page, next_token="") if end_offset and last >= end_offset else page

    scripted.service.list_page = list_page
    listing = await scripted.new_store(max_in_flight=8).list_all("p/", delimiter="/")
    assert (list(listing.keys), listing.prefixes) == level_of(scripted, "/", "p/")


async def test_one_level_is_whole_while_others_come_and_go(scripted: ScriptedService) -> None:
    keys = [f"p/{at:05}{'/x' * (at % 2)}" for at in range(9_000)]
    for key in keys:
        scripted.put(key, b"")
    stays = {key for at, key in enumerate(keys) if at % 4 < 2}
    found: list[str] = []
    turns = count()
    async for page in scripted.store.list_pages("p/", delimiter="/"):
        found += sorted([*page.keys, *page.prefixes])
        for at in range(next(turns) % 8, len(keys), 8):
            if keys[at] in stays:
                scripted.put(f"{keys[at]}/more", b"")  # for a key without it, one more beginning
            elif keys[at] in scripted.bucket.objects:
                scripted.bucket.remove(keys[at])
    assert found == sorted(set(found))
    assert {key.removesuffix("x") for key in stays} <= set(found)


async def test_a_beginning_that_comes_again_with_the_next_page_is_reported_once(
    scripted: ScriptedService,
) -> None:
    meta = scripted.put("x", b"")
    pages = iter(
        [
            Page([replace(meta, key="p/a")], ["p/b/"], "1"),
            Page([replace(meta, key="p/c")], ["p/b/", "p/d/"], ""),
        ]
    )

    async def list_page(request: ListRequest) -> Page:
        return next(pages)

    scripted.service.list_page = list_page
    listing = await scripted.new_store(max_in_flight=1).list_all("p/", delimiter="/")
    assert (list(listing.keys), listing.prefixes) == (["p/a", "p/c"], ["p/b/", "p/d/"])


async def test_a_pattern_is_listed_by_ranges_of_what_it_begins_with(
    scripted: ScriptedService,
) -> None:
    keys = filled(scripted, 20_000)
    for at in range(3_000):
        scripted.put(f"a/{at}.7", b"")
    gauge = Gauge(scripted)
    listing = await scripted.new_store(max_in_flight=8).list_all("", match_glob="p/*7")
    assert list(listing.keys) == [key for key in keys if key.endswith("7")]
    assert gauge.num_most > 4
    assert gauge.num_all <= 1.2 * 20 + 2 * 8
    assert gauge.prefixes == {"p/"}
    assert len(await scripted.store.list_all("p/01", match_glob="p/*7")) == 1_000
    assert gauge.prefixes == {"p/", "p/01"}


@given(st.text(st.sampled_from("ab/*?[]{},\\"), max_size=8), st.text("ab/*?[]{},\\", max_size=8))
def test_what_fits_a_pattern_begins_with_what_it_begins_with(pattern: str, key: str) -> None:
    try:
        fits = compile_glob(pattern).fullmatch(key)
    except ValueError:
        return
    literal = literal_prefix(pattern)
    assert not fits or key.startswith(literal)
    # What stands for itself is all there is before the first character that does not.
    assert compile_glob(literal + "**").fullmatch(literal + key)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**", "a b/1 b/2 b/c/3 d/4 e x[y]/z.jpg"),
        ("*", "a e"),
        ("b/*", "b/1 b/2"),
        ("b/**", "b/1 b/2 b/c/3"),
        ("{b,d}/?", "b/1 b/2 d/4"),
        ("[!a-b]", "e"),
        (r"x\[y\]/*.jpg", "x[y]/z.jpg"),
    ],
)
async def test_a_pattern_leaves_keys_out(
    nested_store: aioflux.Store, pattern: str, expected: str
) -> None:
    listing = await nested_store.list_all("", match_glob=pattern)
    assert list(listing.keys) == expected.split()


@pytest.mark.parametrize("pattern", ["[", "{a", "a}", "[z-a]", "\\"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a pattern"):
        compile_glob(pattern)

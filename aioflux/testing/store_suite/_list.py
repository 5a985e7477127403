"""Tests of `list`, `list_pages`, `list_all` and `save_manifest`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux._values.listing import Listing
from aioflux.testing.store_suite._base import SuiteBase

if TYPE_CHECKING:
    from aioflux.store import Store

KEYS = [
    "a",
    "a-b",
    "a.b",
    "a/b",
    "a/b-c",
    "a/b.c",
    "a/c/d",
    "a0",
    "b",
    "e\u0301",
    "z/z",
    "\u00e9",
    "\uff5e",
    "\U0001f600/x",
]
"""Keys in the order of their UTF-8 bytes.

`-` and `.` sort before `/`. The first character of the last key is above U+FFFF: in UTF-8 it sorts
after U+FF5E, in UTF-16 before.
"""


@pytest.mark.asyncio
class ListContract(SuiteBase):
    """Tests of listings."""

    def _write_keys(self) -> list[str]:
        # On a service that stores objects as files, `a` and `a/b` cannot both exist.
        keys = KEYS if self.can.takes_any_key else [key for key in KEYS if key != "a"]
        assert keys == sorted(keys, key=str.encode)
        for key in reversed(keys):
            self.write_back_door(key, key.encode())
        return keys

    async def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert await store.list_all() == []
        assert [page async for page in store.list_pages("a")] == []

    async def test_listings_are_sorted_by_utf8_bytes(self, store: Store) -> None:
        """`list`, `list_all` and `list_pages` return the same objects in the same order."""
        keys = self._write_keys()
        assert [meta.key async for meta in store.list()] == keys
        assert [meta.key for meta in await store.list_all()] == keys
        pages = [page async for page in store.list_pages()]
        assert [meta.key for page in pages for meta in page] == keys
        assert all(pages)

    @pytest.mark.parametrize(
        "prefix", ["a", "a/", "a/b", "a/b.", "e", "z/z", "\U0001f600", "nothing", "a/c/d/e"]
    )
    async def test_a_prefix_is_any_beginning_of_a_key(self, store: Store, prefix: str) -> None:
        """A prefix need not end with a slash, and may be a whole key."""
        keys = self._write_keys()
        listed = [meta.key for meta in await store.list_all(prefix)]
        assert listed == [key for key in keys if key.startswith(prefix)]

    async def test_metadata_of_a_listing_is_that_of_head(self, store: Store) -> None:
        """A listing and `head` return equal metadata, and `get` accepts the listed metadata."""
        for key in self._write_keys():
            [meta] = [listed for listed in await store.list_all(key) if listed.key == key]
            head = await store.head(key)
            assert (meta.uri, meta.size) == (head.uri, len(key.encode()))
            assert (meta.generation, meta.crc32c) == (head.generation, head.crc32c)
            assert await store.get(meta) == key.encode()

    async def test_a_listing_spans_pages(self, store: Store) -> None:
        """No key is missing or repeated at the boundary of two pages."""
        count = self.can.page_size + 1
        keys = [f"p/{index:05}" for index in range(count)]
        for key in keys:
            self.write_back_door(key, b"")
        pages = [[meta.key for meta in page] async for page in store.list_pages("p/")]
        assert max(map(len, pages)) <= self.can.page_size
        assert [key for page in pages for key in page] == keys

    @pytest.mark.parametrize("page_size", [1, 3, 1_000_000])
    async def test_pages_of_a_chosen_size_hold_no_more(self, store: Store, page_size: int) -> None:
        """Keys and common prefixes of a page count towards `page_size`; no entry is missing."""
        keys = self._write_keys()
        pages = [page async for page in store.list_pages(page_size=page_size)]
        assert [meta.key for page in pages for meta in page] == keys
        assert all(1 <= len(page) <= page_size for page in pages)
        whole = await store.list_all("a/", delimiter="/")
        pages = [page async for page in store.list_pages("a/", delimiter="/", page_size=page_size)]
        assert [meta.key for page in pages for meta in page] == [meta.key for meta in whole]
        assert [prefix for page in pages for prefix in page.prefixes] == whole.prefixes
        with pytest.raises(ValueError, match="page_size must be 1 or more, not 0"):
            _ = [page async for page in store.list_pages(page_size=0)]

    @pytest.mark.parametrize("limit", [0, 1, 5, 1000])
    async def test_a_limit_is_the_most_keys(self, store: Store, limit: int) -> None:
        """With a delimiter, it is the most keys and common prefixes, in their common order."""
        keys = self._write_keys()
        assert [meta.key async for meta in store.list(limit=limit)] == keys[:limit]
        assert [meta.key for meta in await store.list_all("a", limit=limit)] == [
            key for key in keys if key.startswith("a")
        ][:limit]
        globbed = await store.list_all(match_glob="**b*", limit=limit)
        assert [meta.key for meta in globbed] == [key for key in keys if "b" in key][:limit]
        level = await store.list_all(delimiter="/")
        first = await store.list_all(delimiter="/", limit=limit)
        names = sorted([*level.keys, *level.prefixes])
        assert sorted([*first.keys, *first.prefixes]) == names[:limit]
        with pytest.raises(ValueError, match="limit"):
            await store.list_all(limit=-1)

    async def test_a_listing_may_end_early(self, store: Store) -> None:
        """A caller may stop iterating a listing and use the store afterwards."""
        self._write_keys()
        async for meta in store.list():
            assert meta.key
            break
        assert await store.list_all("nothing") == []

    async def test_one_level_has_keys_and_prefixes(self, store: Store) -> None:
        """Keys with the delimiter after the prefix are replaced by their common prefix."""
        keys = self._write_keys()
        listing = await store.list_all(delimiter="/")
        assert [meta.key for meta in listing] == [key for key in keys if "/" not in key]
        assert listing.prefixes == ["a/", "z/", "\U0001f600/"]
        listing = await store.list_all("a/", delimiter="/")
        assert [meta.key for meta in listing] == ["a/b", "a/b-c", "a/b.c"]
        assert listing.prefixes == ["a/c/"]
        assert [meta.key async for meta in store.list("a/c/", delimiter="/")] == ["a/c/d"]

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("a/*", ["a/b", "a/b-c", "a/b.c"]),
            ("a/**", ["a/b", "a/b-c", "a/b.c", "a/c/d"]),
            ("{a0,b,e}", ["a0", "b"]),
            ("z/?", ["z/z"]),
            ("nothing*", []),
        ],
    )
    async def test_a_pattern_filters_keys(
        self, store: Store, pattern: str, expected: list[str]
    ) -> None:
        """`match_glob` matches the whole key, without the store's prefix."""
        self._write_keys()
        listing = await store.list_all(match_glob=pattern)
        assert [meta.key for meta in listing] == expected

    async def test_a_pattern_and_a_delimiter_exclude_each_other(self, store: Store) -> None:
        """A listing with a delimiter and `match_glob` raises a ValueError."""
        with pytest.raises(ValueError, match="exclude each other"):
            await store.list_all(delimiter="/", match_glob="*")

    async def test_a_manifest_is_a_listing(self, store: Store) -> None:
        """A saved manifest has all metadata of a listing, but never an entry for itself."""
        self._write_keys()
        listed = await store.list_all("a/")
        for _ in range(2):
            meta = await store.save_manifest("a/manifest", "a/")
            data = await store.get("a/manifest")
            assert (meta.key, meta.size) == ("a/manifest", len(data))
            assert Listing.from_bytes(data) == listed

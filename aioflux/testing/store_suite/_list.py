"""Contract of list, list_pages and list_all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux._values.listing import Listing
from aioflux.testing.store_suite._base import SuiteBase

if TYPE_CHECKING:
    from aioflux.store import Store

__all__ = ["ListContract"]

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
"""Sorted by UTF-8: `-` and `.` before `/`, and astral characters last (not so in UTF-16)."""


@pytest.mark.asyncio
class ListContract(SuiteBase):
    """Listings."""

    def _write_keys(self) -> list[str]:
        # A service on directories cannot hold both `a` and keys below it.
        keys = KEYS if self.can.takes_any_key else [key for key in KEYS if key != "a"]
        assert keys == sorted(keys, key=str.encode)
        for key in reversed(keys):
            self.write_back_door(key, key.encode())
        return keys

    async def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        """No objects, no pages, no error."""
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
        """It need not end with a slash, and may be a whole key."""
        keys = self._write_keys()
        listed = [meta.key for meta in await store.list_all(prefix)]
        assert listed == [key for key in keys if key.startswith(prefix)]

    async def test_metadata_of_a_listing_is_that_of_head(self, store: Store) -> None:
        """Key, uri, size, generation and checksum; reads accept it."""
        for key in self._write_keys():
            [meta] = [each for each in await store.list_all(key) if each.key == key]
            head = await store.head(key)
            assert (meta.uri, meta.size) == (head.uri, len(key.encode()))
            assert (meta.generation, meta.crc32c) == (head.generation, head.crc32c)
            assert await store.get(meta) == key.encode()

    async def test_a_listing_spans_pages(self, store: Store) -> None:
        """No key is lost or repeated between two pages."""
        count = self.can.page_size + 1
        keys = [f"p/{at:05}" for at in range(count)]
        for key in keys:
            self.write_back_door(key, b"")
        pages = [[meta.key for meta in page] async for page in store.list_pages("p/")]
        assert max(map(len, pages)) <= self.can.page_size
        assert [key for page in pages for key in page] == keys

    @pytest.mark.parametrize("page_size", [1, 3, 1_000_000])
    async def test_pages_of_a_chosen_size_hold_no_more(self, store: Store, page_size: int) -> None:
        """Of keys and prefixes together; none is lost."""
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

    async def test_a_listing_may_end_early(self, store: Store) -> None:
        """The store can still be used."""
        self._write_keys()
        async for meta in store.list():
            assert meta.key
            break
        assert await store.list_all("nothing") == []

    async def test_one_level_has_keys_and_prefixes(self, store: Store) -> None:
        """With a delimiter, keys that have it behind the prefix are listed as common prefixes."""
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
        """It matches whole keys, below the store's prefix."""
        self._write_keys()
        listing = await store.list_all(match_glob=pattern)
        assert [meta.key for meta in listing] == expected

    async def test_a_pattern_and_a_delimiter_exclude_each_other(self, store: Store) -> None:
        """Services interpret both together differently."""
        with pytest.raises(ValueError, match="exclude each other"):
            await store.list_all(delimiter="/", match_glob="*")

    async def test_a_manifest_is_a_listing(self, store: Store) -> None:
        """It has all fields, and is not listed itself, even the second time."""
        self._write_keys()
        listed = await store.list_all("a/")
        for _ in range(2):
            meta = await store.save_manifest("a/manifest", "a/")
            data = await store.get("a/manifest")
            assert (meta.key, meta.size) == ("a/manifest", len(data))
            assert Listing.from_bytes(data) == listed

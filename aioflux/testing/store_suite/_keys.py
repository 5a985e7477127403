"""Tests that a store keeps keys unchanged, with every character that Cloud Storage accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux.errors import StorageError
from aioflux.testing.store_suite._base import SuiteBase

if TYPE_CHECKING:
    from aioflux.store import Store

KEYS = [
    "a/b/c.tar.gz",
    ".hidden",
    "..two",
    "a b  c",
    " leading and trailing ",
    "50%",
    "a%20b%2Fc%zz",
    "q?x=1&y=2#frag;p=3",
    "plus+minus-tilde~star*bang!",
    "quotes'\"<tag>&amp;",
    "back\\slash:colon|pipe",
    "[brackets]{braces}^`",
    "tab\tand\x7fdelete",
    "\u00e9 composed",
    "e\u0301 decomposed",
    "日本語/ключ/مفتاح",
    "\U0001f600\U0010fffd",
    "uploads",
    "o/o/compose",
]
"""Keys that are also valid paths of files."""

ODD_KEYS = [
    "/leading",
    "trailing/",
    "a//b",
    "a/./b",
    "a/../b",
    "../up",
    "./here",
    "...",
    "//",
]
"""Keys that are not valid paths of files, or that a file system would change."""


def _has_dots(key: str) -> bool:
    return any(segment.endswith(".") for segment in key.split("/"))


LIMIT_BYTES = 1024
"""Maximum length of a key in UTF-8 bytes (cloud.google.com/storage/docs/objects#naming)."""


@pytest.mark.asyncio
class KeyContract(SuiteBase):
    """Tests of unusual keys with every operation."""

    async def _round_trip(self, store: Store, key: str) -> None:
        data = key.encode()
        meta = await store.put(key, data)
        assert meta.key == key
        assert self.read_back_door(key) == data
        assert await store.get(key) == data
        assert (await store.head(key)).uri == meta.uri
        assert meta.uri.startswith(store.uri)
        assert [listed.key for listed in await store.list_all(key)] == [key]
        await store.copy(key, "target")
        await store.copy("target", key)
        if self.can.composes:
            await store.compose("target", [key])
            await store.compose(key, [key, "target"])
        async with store.open_writer(key) as writer:
            await writer.write(data + b"!")
        assert self.read_back_door(key) == data + b"!"
        await store.delete(key)
        await store.delete("target")
        assert await store.list_all() == []

    @pytest.mark.parametrize("key", KEYS)
    async def test_a_key_is_kept_unchanged(self, store: Store, key: str) -> None:
        """`put`, `get`, `head`, `list`, `compose`, `copy` and `delete` name the same object."""
        if "\\" in key:
            self.require("takes_backslashes")
        await self._round_trip(store, key)

    @pytest.mark.parametrize("key", ODD_KEYS)
    async def test_slashes_and_dots_have_no_meaning(self, store: Store, key: str) -> None:
        self.require("takes_any_key")
        if _has_dots(key):
            self.require("takes_dots")
        await self._round_trip(store, key)

    @pytest.mark.parametrize("letter", ["k", "\u00e9", "\U0001f600"])
    async def test_a_key_may_have_1024_bytes(self, store: Store, letter: str) -> None:
        """The limit counts UTF-8 bytes and includes the prefix of the store."""
        self.require("takes_any_key")
        prefix = store.uri.partition("://")[2].partition("/")[2]
        num_bytes = LIMIT_BYTES - len(prefix.encode())
        key = letter * (num_bytes // len(letter.encode()))
        await self._round_trip(store, key + "k" * (num_bytes - len(key.encode())))

    @pytest.mark.parametrize("key", ODD_KEYS)
    async def test_a_rejected_key_changes_nothing(self, store: Store, key: str) -> None:
        is_accepted = self.can.takes_any_key and (self.can.takes_dots or not _has_dots(key))
        if is_accepted or (key == "..." and self.can.takes_dots):
            pytest.skip("the service accepts this key")
        self.write_back_door("b", b"1")
        with pytest.raises((ValueError, StorageError)) as failure:
            await store.put(key, b"2")
        assert repr(key) in str(failure.value)
        with pytest.raises((ValueError, StorageError)):
            await store.get(key)
        assert [meta.key for meta in await store.list_all()] == ["b"]

    async def test_two_forms_of_a_letter_are_two_keys(self, store: Store) -> None:
        """A store does not apply Unicode normalization to keys."""
        await store.put("\u00e9", b"composed")
        await store.put("e\u0301", b"decomposed")
        assert [meta.key for meta in await store.list_all()] == ["e\u0301", "\u00e9"]
        assert await store.get("\u00e9") == b"composed"

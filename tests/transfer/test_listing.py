"""Listings that go on where a page ended, and those that do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import StorageError
from aioflux.service._base import Page
from aioflux.transfer._listing import list_pages

if TYPE_CHECKING:
    from tests.transfer.rig import Rig


class Pages:
    """A service that answers with these pages, then with the last again and again."""

    def __init__(self, rig: Rig, *pages: tuple[str, str]) -> None:
        self.tokens: list[str] = []
        meta = rig.put("x", b"")
        rest = iter(pages)
        numbers = count()

        async def list_page(prefix: str, *, page_token: str, **_: Any) -> Page:
            self.tokens.append(page_token)
            keys, token = next(rest, pages[-1])
            if token == "new":
                token = f"t{next(numbers)}"
            return Page([replace(meta, key=key) for key in keys], [], token)

        rig.service.list_page = list_page


async def listed(rig: Rig) -> str:
    # One after the other: these pages are of no keys that could be cut.
    session = rig.new_session(max_in_flight=1)
    pages = [page async for page in list_pages(session, "p/")]
    return "".join(meta.key for page in pages for meta in page)


async def test_pages_that_follow_each_other_are_all_given(rig: Rig) -> None:
    pages = Pages(rig, ("ab", "1"), ("", "2"), ("", "3"), ("c", "3"), ("d", ""))
    assert await listed(rig) == "abcd"
    assert pages.tokens == ["", "1", "2", "3", "3"]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([("ab", "new")], "begins with 'a', though the one before ended with 'b'"),
        ([("ab", "new"), ("bc", "")], "begins with 'b', though the one before ended with 'b'"),
        ([("ab", "same")], "begins with 'a'"),
        ([("cd", "1"), ("", "2"), ("ab", "")], "begins with 'a', though .* ended with 'd'"),
        ([("ab", "1"), ("", "1")], "after 'b' an empty page came"),
        ([("", "1")], "after '' an empty page came"),
    ],
)
async def test_a_page_that_does_not_go_on_is_an_error(
    rig: Rig, pages: list[tuple[str, str]], message: str
) -> None:
    Pages(rig, *pages)
    with pytest.raises(StorageError, match=rf"could not list memory://.*/p/: .*{message}"):
        await listed(rig)
    assert rig.is_clean()

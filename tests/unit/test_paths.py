"""The paths of a read and of a listing in docs/architecture.md are those that the code takes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = os.path.dirname(aioflux.__file__) + os.sep
TRANSFER = aioflux.TransferOptions(range_size_bytes=100_000)


def named(heading: str) -> list[str]:
    """Return the functions that the numbered lines of a section name, in order."""
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    steps = "\n".join(re.findall(r"^\d+\. .*(?:\n   .*)*", section, re.MULTILINE))
    names = re.findall(r"`((?:_?[A-Z]\w+\.)?[a-z_]+)`", steps)
    return list(dict.fromkeys(names))


def called(run: Callable[[aioflux.Store, aioflux.ObjectMeta], Awaitable[Any]]) -> list[str]:
    """Return the functions of aioflux that a call enters, in the order of their first calls."""
    found: dict[str, None] = {}

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[frame.f_code.co_qualname] = None

    async def main() -> None:
        with GCSServer(buckets=("bucket",)) as server:
            server.put("bucket", "small", b"x" * 1000)
            server.put("bucket", "large", b"x" * 300_000)
            async with aioflux.open_store(
                "gs://bucket", endpoint_url=server.url, transfer=TRANSFER
            ) as store:
                [large] = await store.list_all("large")
                await store.get("small")
                sys.setprofile(profile)
                try:
                    await run(store, large)
                finally:
                    sys.setprofile(None)

    asyncio.run(main())
    return list(found)


async def read_missing(store: aioflux.Store, _: aioflux.ObjectMeta) -> None:
    with pytest.raises(aioflux.NotFoundError):
        await store.get("missing")


def in_order(names: list[str], calls: list[str]) -> bool:
    places = [calls.index(name) for name in names if name in calls]
    return places == sorted(places)


def test_the_path_of_a_read_is_that_of_the_page() -> None:
    names = named("The path of a read")
    small = called(lambda store, _: store.get("small"))
    known = called(lambda store, large: store.get(large))
    unknown = called(lambda store, _: store.get_range("large", 0, 250_000))
    by_name = called(lambda store, _: store.get("large"))
    assert set(names) <= {*small, *known, *unknown, *by_name, *called(read_missing)}
    assert in_order(names, known)
    assert in_order([name for name in names if name != "check_small"], small)
    assert len(set(names) & set(known)) > 8


def test_the_path_of_a_listing_is_that_of_the_page() -> None:
    names = named("The path of a listing")
    calls = called(lambda store, _: store.list_all())
    assert set(names) <= set(calls)
    assert in_order(names, calls)
    assert len(names) > 8

"""The paths in docs/architecture.md are those that the code takes.

Not that of an epoch, which crosses processes.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aioflux
from aioflux import _bridge
from aioflux.checkpoint import Checkpointer
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = os.path.dirname(aioflux.__file__) + os.sep
TRANSFER = aioflux.TransferOptions(range_size_bytes=100_000, part_size_bytes=5 * 1024 * 1024)


def named(heading: str) -> list[str]:
    """Return the functions that the numbered lines of a section name, in order."""
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    steps = "\n".join(re.findall(r"^\d+\. .*(?:\n   .*)*", section, re.MULTILINE))
    names = re.findall(r"`((?:_?[A-Z]\w+\.)?[a-z_]+)`", steps)
    return list(dict.fromkeys(names))


class Calls:
    """The functions of aioflux that were entered, in the order of their first calls."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    def add(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.found[frame.f_code.co_qualname] = None


def called(run: Callable[[aioflux.Store, aioflux.ObjectMeta], Awaitable[Any]]) -> list[str]:
    """Return the functions of aioflux that a call enters, in the order of their first calls."""
    calls = Calls()

    async def main() -> None:
        with GCSServer(buckets=("bucket",)) as server:
            server.put("bucket", "small", b"x" * 1000)
            server.put("bucket", "large", b"x" * 300_000)
            async with aioflux.open_store(
                "gs://bucket", endpoint_url=server.url, transfer=TRANSFER
            ) as store:
                [large] = await store.list_all("large")
                await store.get("small")
                sys.setprofile(calls.add)
                try:
                    await run(store, large)
                finally:
                    sys.setprofile(None)

    asyncio.run(main())
    return list(calls.found)


def called_blocking(run: Callable[[], object]) -> list[str]:
    """Return the functions that a blocking call enters, in this thread and on the bridge's loop."""

    async def set_profile(add: Any) -> None:
        sys.setprofile(add)

    calls = Calls()
    _bridge.run(set_profile(calls.add))
    sys.setprofile(calls.add)
    try:
        run()
    finally:
        sys.setprofile(None)
        _bridge.run(set_profile(None))
    return list(calls.found)


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


async def write_large(store: aioflux.Store, _: aioflux.ObjectMeta) -> None:
    async with store.open_writer("large", mode="overwrite") as writer:
        for _ in range(3):
            await writer.write(bytes(4_000_000))
    async with store.open_writer("new", mode="create") as writer:
        await writer.write(bytes(6_000_000))


async def abort(store: aioflux.Store, _: aioflux.ObjectMeta) -> None:
    writer_of = store.open_writer("large")
    writer = await writer_of.__aenter__()
    await writer.write(bytes(12_000_000))
    await writer_of.__aexit__(KeyError, KeyError(), None)


def test_the_path_of_a_write_is_that_of_the_page() -> None:
    names = named("The path of a write")
    small, large = called(lambda store, _: store.put("small", b"x")), called(write_large)
    assert set(names) <= {*small, *large, *called(abort)}
    assert in_order(names, small)
    assert in_order([name for name in names if name != "AmbiguousWrite.run"], large)
    assert len(set(names) & set(large)) > 8


def test_the_paths_of_a_save_and_a_load_are_those_of_the_page() -> None:
    state = {"weight": torch.arange(3000.0), "step": 3}
    into = {"weight": torch.zeros(3000), "step": 0}
    with (
        GCSServer(buckets=("bucket",)) as server,
        Checkpointer("gs://bucket/run", endpoint_url=server.url) as checkpointer,
    ):
        prepared = called_blocking(lambda: checkpointer.prepare(state))
        saved = called_blocking(lambda: checkpointer.save(1, state))
        loaded = called_blocking(checkpointer.load)
        filled = called_blocking(lambda: checkpointer.load(into=into))
        with server.faults.inject("xml.objects.insert", status=403):
            failed = called_blocking(partial(fail_to_save, checkpointer, state))
    names = named("The path of a save")
    assert set(names) <= {*prepared, *saved, *failed}
    assert in_order([name for name in names if name not in prepared], saved)
    assert len(set(names) & set(saved)) > 8
    names = named("The path of a load")
    assert set(names) <= {*loaded, *filled}
    assert in_order(names, loaded)
    assert in_order(names, [name for name in filled if name != "nest"])
    assert len(set(names) & set(loaded)) > 8


def fail_to_save(checkpointer: Checkpointer, state: dict[str, Any]) -> None:
    with pytest.raises(aioflux.PermissionDeniedError):
        checkpointer.save(2, state)

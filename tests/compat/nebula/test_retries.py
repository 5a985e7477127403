"""What could not be saved is tried again, as long as somebody may come for it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux.compat import nebula as nm
from aioflux.compat.nebula import _node_daemon
from aioflux.compat.nebula._memory_tier import GROWING, Version
from aioflux.compat.nebula._node_daemon import Keeper, _Place
from aioflux.compat.nebula._persist import NebulaSave
from aioflux.errors import TransientError
from tests.compat.nebula.test_nebula import commit

if TYPE_CHECKING:
    from collections.abc import Callable


def put(keeper: Keeper, tag: str) -> Version:
    piece = keeper.shelf.ask(1, 10).piece
    assert piece is not None
    version = keeper.shelf.put(1, piece.number, (tag, "x", 10), GROWING, 0.1)
    keeper.shelf.close(version, tag)
    return version


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_save_that_failed_is_tried_again_by_itself(
    inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outages, tried = 3, []
    run = NebulaSave.run

    async def fail_first(self: NebulaSave) -> object:
        tried.append(1)
        if len(tried) <= outages:
            raise TransientError("the storage is away")
        return await run(self)

    monkeypatch.setattr(_node_daemon, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(NebulaSave, "run", fail_first)
    nm.init(inside, 1000)
    commit("a", 1)
    until(lambda: "storage" in nm.list_checkpoints()["a"]["places"])
    assert len(tried) == outages + 1


@pytest.mark.parametrize(
    ("seconds_gone", "num_trainers", "num_nodes", "is_stopping", "is_tried"),
    [
        (0, 1, 1, False, True),
        (10_000, 1, 1, False, True),  # training, for as long as it takes
        (900, 0, 1, False, True),
        (1100, 0, 1, False, False),  # nobody came: it ends with what was lost told
        (0, 1, 1, True, False),
        (0, 1, 2, False, False),  # the other node would have to try as well
    ],
)
async def test_how_long_it_is_tried_again(
    seconds_gone: float, num_trainers: int, num_nodes: int, is_stopping: bool, is_tried: bool
) -> None:
    keeper = Keeper()
    keeper.linger_seconds, keeper.is_stopping = 1000, is_stopping
    keeper._left = time.monotonic() - seconds_gone
    keeper._trainers = dict.fromkeys(range(num_trainers))  # type: ignore[assignment]
    keeper.shelf.budget_bytes = 1000
    version = put(keeper, "a")
    version.num_nodes = num_nodes
    place = _Place("storage", None, 0.0)  # type: ignore[arg-type]
    assert keeper._again(place) is None  # it was not tried yet
    keeper.shelf.saved(version, "storage", "why")
    assert keeper._again(place) is None  # the pause is not over
    place.retry_at = time.monotonic()
    assert keeper._again(place) is (version if is_tried else None)


async def test_the_newest_is_tried_again_also_when_an_older_one_was_saved_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    async def save(self: Keeper, place: _Place, store: object, version: Version) -> None:
        tried.append(version.tag)
        if tried == ["new"]:
            old.is_due = True  # as a flush of it makes it
            raise TransientError("the storage is away")

    monkeypatch.setattr(Keeper, "_save", save)
    monkeypatch.setattr(_node_daemon, "_RETRY_SECONDS", 0.0)
    keeper = Keeper()
    keeper.shelf.budget_bytes = 1000
    old, new = put(keeper, "old"), put(keeper, "new")
    async with aioflux.open_store("memory://older-ones") as store:
        saver = asyncio.create_task(keeper._save_to(_Place("storage", store, 0.0)))
        async with asyncio.timeout(60):
            while not new.places:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0)
        saver.cancel()
        await asyncio.wait([saver])
    assert tried == ["new", "old", "new"]

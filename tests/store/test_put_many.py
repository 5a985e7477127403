"""`put_many`: its memory, and that it stores nothing if it is never iterated."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import uuid
import warnings
import weakref
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import aioflux
import aioflux.sync
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

NEVER = "put_many.*memory://.* was never iterated, so nothing was stored"
PAIRS = [("a", b"1"), ("b", b"2")]


@pytest.fixture
def uri() -> str:
    return f"memory://put-many-{uuid.uuid4().hex}/"


@pytest.fixture
def silence(quick_collection: None) -> Iterator[None]:
    """No warning at all, in a finalizer or elsewhere."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(each.message) for each in caught] == []


async def test_put_many_without_iteration_warns(uri: str) -> None:
    async with aioflux.open_store(uri) as store:
        with pytest.warns(RuntimeWarning, match=NEVER) as caught:
            store.put_many(PAIRS)
        assert [each.filename for each in caught] == [__file__]
        assert not await store.list_all()


def test_the_blocking_put_many_without_iteration_warns(uri: str) -> None:
    with aioflux.sync.open_store(uri) as store:
        with pytest.warns(RuntimeWarning, match=NEVER) as caught:
            store.put_many(PAIRS)
        assert [each.filename for each in caught] == [__file__]
        with pytest.warns(RuntimeWarning, match=NEVER):
            store.put_many(iter(PAIRS), mode="create")
        assert not store.list_all()


@pytest.mark.usefixtures("silence")
async def test_one_that_was_begun_says_nothing(uri: str) -> None:
    async with aioflux.open_store(uri) as store:
        assert len([meta async for meta in store.put_many(PAIRS)]) == 2
        async with aclosing(store.put_many(PAIRS)) as stored:
            await anext(stored)
        assert [meta async for meta in store.put_many([])] == []
        with pytest.raises(aioflux.AlreadyExistsError):
            await anext(store.put_many(PAIRS, mode="create"))
    with pytest.raises(ValueError, match="closed"):
        await anext(store.put_many(PAIRS))


@pytest.mark.usefixtures("silence")
def test_a_blocking_one_that_was_begun_says_nothing(uri: str) -> None:
    with aioflux.sync.open_store(uri) as store:
        assert len(list(store.put_many(PAIRS))) == 2
        next(store.put_many(PAIRS))
        with pytest.raises(aioflux.AlreadyExistsError):
            list(store.put_many(PAIRS, mode="create"))


@pytest.mark.usefixtures("silence")
async def test_reads_without_iteration_do_not_warn(uri: str) -> None:
    async with aioflux.open_store(uri) as store:
        store.get_many(["a"])
        store.list()


def output_of(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", script], capture_output=True, text=True, check=True
    )
    return done.stderr


OPENED = "import aioflux.sync; store = aioflux.sync.open_store('memory://end/');"


def test_the_end_of_the_process_says_nothing() -> None:
    assert output_of(f"{OPENED} stored = store.put_many([('a', b'1')])") == ""
    assert "was never iterated" in output_of(f"{OPENED} store.put_many([('a', b'1')])")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_says_nothing_of_what_its_parent_iterates() -> None:
    script = (
        "import os;"
        f"{OPENED} stored = store.put_many([('a', b'1')]);"
        "child = os.fork();"
        "stored = None if child == 0 else list(stored);"
        "child and os.waitpid(child, 0)"
    )
    assert output_of(script) == ""


class Bodies:
    """Pairs whose bodies are counted while they exist."""

    def __init__(self, count: int, size: int) -> None:
        self.num_alive = self.max_alive = 0
        self._count, self._size = count, size

    def __iter__(self) -> Iterator[tuple[str, bytearray]]:
        for number in range(self._count):
            body = Body(self._size)
            self.num_alive += 1
            self.max_alive = max(self.max_alive, self.num_alive)
            weakref.finalize(body, self._drop)
            yield f"{number}", body
            del body

    async def awaiting(self) -> AsyncIterator[tuple[str, bytearray]]:
        for pair in self:
            yield pair
            del pair

    def _drop(self) -> None:
        self.num_alive -= 1


class Body(bytearray):
    """Memory that can be referenced weakly."""


@pytest.mark.parametrize("kind", ["plain", "awaiting", "blocking"])
@pytest.mark.parametrize(("max_bytes", "most"), [(1000, 11), (50, 2)])
async def test_the_bodies_of_a_generator_are_bounded_by_their_bytes(
    kind: str, max_bytes: int, most: int
) -> None:
    bodies = Bodies(300, 100)
    transfer = aioflux.TransferOptions(max_in_flight_bytes=max_bytes)
    with GCSServer(buckets=("b",)) as server:
        server.faults.add("objects.insert", delay_seconds=0.002)
        if kind == "blocking":
            with aioflux.sync.open_store(
                "gs://b", endpoint_url=server.url, transfer=transfer
            ) as blocking:
                metas = await asyncio.to_thread(lambda: list(blocking.put_many(iter(bodies))))
        else:
            async with aioflux.open_store(
                "gs://b", endpoint_url=server.url, transfer=transfer
            ) as store:
                pairs = iter(bodies) if kind == "plain" else bodies.awaiting()
                metas = [meta async for meta in store.put_many(pairs)]
    assert len(metas) == 300
    assert most // 2 <= bodies.max_alive <= most


async def test_small_bodies_are_sent_while_a_large_one_is_stored(uri: str) -> None:
    """A body that fills the budget delays the next ones, and all of them are stored."""
    transfer = aioflux.TransferOptions(max_in_flight_bytes=100)
    sizes = [1, 500, 1, 1, 100, 0, 0, 99, 1, 1, 700, 1] * 30
    async with aioflux.open_store(uri, transfer=transfer) as store:
        pairs = ((f"{index}", bytes(size)) for index, size in enumerate(sizes))
        metas = {meta.key: meta.size async for meta in store.put_many(pairs)}
    assert metas == {f"{index}": size for index, size in enumerate(sizes)}

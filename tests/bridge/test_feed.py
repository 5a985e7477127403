"""A blocking caller's iterable on the background loop: how far budget, and at what cost."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

import aioflux.sync
from aioflux import TransferOptions, _bridge
from aioflux._concurrency.fan_out import FanOut, bounded_batches

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator


class Counted:
    """Numbers, and how many of them were taken, in which threads."""

    def __init__(self, end: int) -> None:
        self.num_taken = 0
        self.threads: set[int] = set()
        self._end = end

    def __iter__(self) -> Iterator[int]:
        for number in range(self._end):
            self.num_taken += 1
            self.threads.add(threading.get_ident())
            yield number


async def taking(feed: _bridge.Feed[int], count: int) -> list[int]:
    return [await anext(feed) for _ in range(count)]


def test_no_more_items_are_taken_than_may_wait_for_their_use() -> None:
    source = Counted(1000)
    feed = _bridge.Feed(source, max_ahead=10)
    used = 0
    for count in (1, 3, 20, 7):
        assert _bridge.run(taking(feed, count), feed=feed) == list(range(used, used + count))
        used += count
        assert source.num_taken <= used + 10
    assert source.threads == {threading.get_ident()}


def test_more_are_requested_while_half_of_them_are_left() -> None:
    source = Counted(1000)
    feed = _bridge.Feed(source, max_ahead=10)

    async def use() -> None:
        num_used = 1
        await anext(feed)
        async with asyncio.timeout(60):
            while source.num_taken <= 100:
                # Half of ten that may wait are left, and more come.
                while source.num_taken - num_used <= 5 or not feed.has_ready():
                    feed.has_ready()
                    await asyncio.sleep(0.001)
                feed.next_ready()
                num_used += 1

    _bridge.run(use(), feed=feed)


def test_what_came_before_a_failure_is_given_out_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise ZeroDivisionError

    feed = _bridge.Feed(items(), max_ahead=10)
    assert _bridge.run(taking(feed, 5), feed=feed) == list(range(5))
    with pytest.raises(ZeroDivisionError):
        _bridge.run(taking(feed, 1), feed=feed)


def test_a_generator_may_wait_until_its_previous_item_is_processed() -> None:
    processed = [threading.Event() for _ in range(100)]

    def items() -> Iterator[int]:
        for number in range(100):
            assert number == 0 or processed[number - 1].wait(10)
            yield number

    async def process(item: int) -> int:
        processed[item].set()
        return item

    feed = _bridge.Feed(items(), max_ahead=64)
    batches = bounded_batches(process, feed, max_in_flight=64)
    found = [item for batch in _bridge.iterate(batches, feed=feed) for item in batch]
    assert found == list(range(100))


class Through:
    """A runner that finishes whatever can be had without waiting."""

    num_begun = 0

    def __init__(self, fan_out: FanOut[int, int]) -> None:
        self._fan_out = fan_out

    def start(self, index: int, item: int) -> asyncio.Future[tuple[int, int] | None]:
        type(self).num_begun += 1
        numbered: tuple[int, int] | None = (index, item)
        while numbered is not None:
            self._fan_out.finish(numbered[0], numbered[1], None)
            numbered = self._fan_out.next_ready_item()
        ended = asyncio.get_running_loop().create_future()
        ended.set_result(None)
        return ended

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("ordered", [False, True])
def test_a_runner_takes_what_is_ready_in_its_order(ordered: bool) -> None:
    """So that a generator's items cost what those of a list do."""
    feed = _bridge.Feed(Counted(400), max_ahead=64)
    Through.num_begun = 0

    async def never(item: int) -> int:
        raise AssertionError(item)

    async def batches() -> AsyncGenerator[list[int], None]:
        async for batch in bounded_batches(
            never, feed, max_in_flight=32, ordered=ordered, new_runner=Through
        ):
            yield batch

    found = [item for batch in _bridge.iterate(batches(), feed=feed) for item in batch]
    assert found == list(range(400))
    assert Through.num_begun < 200


def test_generators_of_keys_feed_reads_in_order() -> None:
    options = TransferOptions(max_in_flight=4)
    with aioflux.sync.open_store("memory://feed", transfer=options) as store:
        for number in range(50):
            store.put(f"{number:02}", bytes([number]))
        source = Counted(50)
        found = list(store.get_many(f"{number:02}" for number in source))
    assert found == [(f"{number:02}", bytes([number])) for number in range(50)]
    assert source.threads == {threading.get_ident()}

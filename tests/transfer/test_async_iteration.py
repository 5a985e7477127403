"""Generators within generators that nobody closes, collected in whatever order."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from aioflux._concurrency.async_iteration import aclosing_inner


@pytest.mark.usefixtures("quick_collection")
async def test_an_inner_generator_that_is_collected_first_is_closed_by_the_outer_one() -> None:
    closed: list[str] = []
    all_closed = asyncio.Event()
    unraisable: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append

    async def inner():
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.append("inner")

    async def outer():
        try:
            async with aclosing_inner(inner()) as items:
                async for item in items:
                    yield item
        finally:
            closed.append("outer")
            if len(closed) == 20:
                all_closed.set()

    async def abandon() -> None:
        for _ in range(10):
            generator = outer()
            await anext(generator)
            cycle: list[object] = [generator]
            cycle.append(cycle)

    try:
        await abandon()
        gc.collect()
        async with asyncio.timeout(100):
            await all_closed.wait()
    finally:
        sys.unraisablehook = hook
    assert closed.count("inner") == closed.count("outer") == 10
    assert not unraisable

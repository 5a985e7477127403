"""Work that is begun and not waited for: to its end, also where the process ends first."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from aioflux import _bridge


def test_it_goes_on_while_the_caller_does() -> None:
    async def work() -> int:
        return await asyncio.wait_for(gate.wait(), 60) and 7

    async def make() -> asyncio.Event:
        return asyncio.Event()

    gate = _bridge.run(make())
    outcome = _bridge.begin(work())
    assert not outcome.done()

    async def open_gate() -> None:
        gate.set()

    _bridge.run(open_gate())
    assert outcome.result(60) == 7


def test_an_error_is_its_outcome() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _bridge.begin(work()).result(60)


def test_cancel_lets_it_clean_up() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.append(True)

    outcome = _bridge.begin(work())
    _bridge.run(asyncio.sleep(0))
    outcome.cancel()
    until = time.monotonic() + 60
    while not cleaned:
        assert time.monotonic() < until
        _bridge.run(asyncio.sleep(0.01))


def test_not_from_the_loops_own_thread() -> None:
    async def nested() -> None:
        _bridge.begin(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="own event loop"):
        _bridge.run(nested())


def test_the_end_of_the_process_waits_for_it() -> None:
    script = """
import asyncio
from aioflux import _bridge

async def work():
    await asyncio.sleep(0.5)
    print("done")

_bridge.begin(work())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True
    )
    assert ended.stdout == "done\n"

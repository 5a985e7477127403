"""Stores with one event loop and with several, `TransferOptions(num_loops=)`.

Requests with bodies of 1 MiB and more run on other loops only if several are in flight at once. A
test of `num_loops` moves such bodies, and checks with `body_threads` that they were spread.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from aioflux.store import Store

__all__ = ["OTHER_LOOPS", "assert_spread", "body_threads", "num_loops"]

OTHER_LOOPS = {"aioflux-loop-2", "aioflux-loop-3"}
"""Names of the threads of the other loops, if there are three loops."""


@pytest.fixture(
    params=[pytest.param(1, id="1-loop"), pytest.param(3, id="3-loops", marks=pytest.mark.more)]
)
def num_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of loops of the stores that a test opens; runs the test once with each number.

    The scripts of a test, in other processes, read it from AIOFLUX_TEST_NUM_LOOPS.
    """
    number: int = request.param
    monkeypatch.setenv("AIOFLUX_TEST_NUM_LOOPS", str(number))
    return number


@pytest.fixture
def body_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads in which the stores of this process send requests with bodies."""
    names: list[str] = []
    open_service = Store._open_service

    def recorded(method: Any) -> Any:
        async def call(*arguments: Any, **settings: Any) -> Any:
            names.append(threading.current_thread().name)
            return await method(*arguments, **settings)

        return call

    def open_recorded(config: Any) -> Any:
        service: Any = open_service(config)
        service.get, service.put_part = recorded(service.get), recorded(service.put_part)
        return service

    monkeypatch.setattr(Store, "_open_service", staticmethod(open_recorded))
    return names


def assert_spread(body_threads: list[str], num_loops: int) -> None:
    """Check that requests with bodies ran on other loops, if there are any."""
    assert OTHER_LOOPS.intersection(body_threads) == (OTHER_LOOPS if num_loops == 3 else set())

"""Endpoints that are away: how long they are tried, and what a store says meanwhile."""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import RetryPolicy, TransientError
from aioflux._transfer.admission import RetryBudget
from aioflux._transfer.retry import with_retry
from aioflux.testing import GCSServer
from perf.servers._ports import free_ports
from tests.transfer.test_retry import Time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

AWAY = "could not read gs://b/a: no connection to http://127.0.0.1:9: refused"


def away(until: float, time: Time, **fields: Any) -> Callable[[int], Awaitable[str]]:
    """An attempt that finds no server before a time."""

    async def attempt(_: int) -> str:
        if time.now < until:
            raise TransientError(AWAY, uri="gs://b/a", **{"unconnected": "unreachable"} | fields)
        return "done"

    return attempt


async def run(time: Time, attempt: Any, policy: RetryPolicy, budget: Any = None, **how: Any) -> str:
    return await with_retry(
        attempt, policy, clock=time.clock, sleep=time.sleep, budget=budget, **how
    )


# --- how long an endpoint is tried ------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
async def test_a_server_that_starts_after_ten_seconds_causes_no_error(seed: int) -> None:
    """Whatever the jitter; eight attempts may be over after two seconds."""
    time, rng = Time(), random.Random(seed)
    assert await run(time, away(1010.0, time), RetryPolicy(), jitter=rng.random) == "done"


async def test_the_connect_deadline_ends_the_attempts() -> None:
    time = Time()
    policy = RetryPolicy(connect_deadline_seconds=3.0)
    says = r"refused \(gave up after \d+ attempts in 3\.0 s; RetryPolicy.connect_deadline_seconds"
    with pytest.raises(TransientError, match=says) as raised:
        await run(time, away(1e9, time), policy, jitter=lambda: 0.9)
    assert time.now == 1003.0, "the last attempt is made at the deadline"
    assert raised.value.unconnected == "unreachable"
    assert pickle.loads(pickle.dumps(raised.value)).unconnected == "unreachable"


async def test_by_default_the_connect_deadline_is_the_deadline() -> None:
    time = Time()
    with pytest.raises(TransientError, match=r"RetryPolicy\.connect_deadline_seconds"):
        await run(time, away(1e9, time), RetryPolicy(deadline_seconds=100.0), jitter=lambda: 0.5)
    assert time.now == 1100.0


async def test_after_a_connection_the_connect_deadline_does_not_apply() -> None:
    """The server is away for ten seconds in the middle of a request."""
    time = Time()
    numbers: list[int] = []

    async def attempt(number: int) -> str:
        numbers.append(number)
        if number == 1:
            raise TransientError("busy", status=503)
        return await away(1010.0, time)(number)

    policy = RetryPolicy(connect_deadline_seconds=1.0, max_attempts=3)
    assert await run(time, attempt, policy, jitter=lambda: 0.5) == "done"
    assert len(numbers) > 3, "attempts without a connection do not count"


async def test_one_attempt_is_one_attempt() -> None:
    time = Time()
    with pytest.raises(TransientError, match="gave up after 1 attempts"):
        await run(time, away(1e9, time), RetryPolicy(max_attempts=1))
    assert time.slept == []


async def test_a_name_that_does_not_exist_ends_after_three_attempts() -> None:
    time = Time()
    with pytest.raises(TransientError, match="not found 3 times in a row; check its spelling") as e:
        await run(time, away(1e9, time, unconnected="unknown host"), RetryPolicy())
    assert e.value.unconnected == "unknown host"


# --- what is said ------------------------------------------------------------------------------


async def test_a_store_warns_once_after_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """With address, cause and how long it goes on; other requests of the store say nothing."""
    time, budget = Time(), RetryBudget(burst=100, per_second=10)
    policy = RetryPolicy(deadline_seconds=60.0)
    warned_at: list[float] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda _: warned_at.append(time.now)  # type: ignore[method-assign]
    logger = logging.getLogger("aioflux.retry")
    logger.addHandler(handler)
    try:
        for _ in range(3):
            attempt = away(time.now + 10.0, time)
            await run(time, attempt, policy, budget, jitter=lambda: 0.5)
    finally:
        logger.removeHandler(handler)
    assert warned_at == [1001.0]
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage() == f"{AWAY}; trying again for up to 59 s"


async def test_a_short_absence_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    time, budget = Time(), RetryBudget(burst=100, per_second=10)
    await run(time, away(1000.3, time), RetryPolicy(), budget, jitter=lambda: 0.5)
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]


async def test_the_next_absence_is_another_warning(caplog: pytest.LogCaptureFixture) -> None:
    time, budget = Time(), RetryBudget(burst=100, per_second=10)
    for _ in range(2):
        await run(time, away(time.now + 5.0, time), RetryPolicy(), budget, jitter=lambda: 0.5)
        budget.on_success(was_retry=True)  # of a session, when the retry has succeeded
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 2


# --- on sockets ----------------------------------------------------------------------------------


@pytest.fixture
def url() -> str:
    """Of a port on which nothing listens."""
    [port] = free_ports(1)
    return f"http://127.0.0.1:{port}"


OPERATIONS: dict[str, Callable[[aioflux.Store], Awaitable[Any]]] = {
    "get": lambda store: store.get("a"),
    "head": lambda store: store.head("a"),
    "list": lambda store: store.list_all(),
    "put": lambda store: store.put("a", b"1"),
    "copy": lambda store: store.copy("a", "b"),
    "compose": lambda store: store.compose("b", ["a"]),
}


@pytest.mark.parametrize(
    ("uri", "operation"),
    [
        (uri, operation)
        for uri in ("gs://bucket", "az://devstoreaccount1/bucket", "s3://bucket")
        for operation in OPERATIONS
        if operation != "compose" or uri.startswith("gs")
    ],
)
async def test_an_endpoint_that_is_away_has_the_same_words_for_every_request(
    uri: str, operation: str, url: str
) -> None:
    retry = RetryPolicy(max_attempts=1)
    async with aioflux.open_store(
        uri, endpoint_url=url, retry=retry, credentials="anonymous"
    ) as store:
        with pytest.raises(TransientError) as raised:
            await OPERATIONS[operation](store)
    error = raised.value
    assert f": no connection to {url}: [Errno 111] " in str(error)
    assert "ssl:default" not in str(error)
    assert (error.unconnected, error.maybe_done) == ("unreachable", False)


@pytest.mark.parametrize(
    ("code", "unconnected"),
    [(socket.EAI_NONAME, "unknown host"), (socket.EAI_AGAIN, "unreachable")],
)
async def test_an_unknown_host_is_distinguished_from_a_resolver_that_is_away(
    monkeypatch: pytest.MonkeyPatch, code: int, unconnected: str
) -> None:
    """The resolver of the event loop says which."""
    retry = RetryPolicy(connect_deadline_seconds=0.2, initial_seconds=0.001, max_seconds=0.01)
    num_lookups = 0

    async def getaddrinfo(*_: Any, **__: Any) -> Any:
        nonlocal num_lookups
        num_lookups += 1
        raise socket.gaierror(code, "says the resolver")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with aioflux.open_store(
        "gs://bucket", endpoint_url="http://no-such-host.invalid:1", retry=retry
    ) as store:
        with pytest.raises(TransientError, match="says the resolver") as raised:
            await store.get("a")
    assert raised.value.unconnected == unconnected
    assert (num_lookups == 3) == (unconnected == "unknown host")


def test_a_connection_takes_no_longer_than_the_connect_deadline() -> None:
    retry = RetryPolicy(connect_deadline_seconds=3.0)
    for connect_seconds, expected in ((10.0, 3.0), (1.0, 1.0)):
        timeouts = aioflux.Timeouts(connect_seconds=connect_seconds)
        store = aioflux.open_store("gs://bucket", retry=retry, timeouts=timeouts)
        assert pickle.loads(pickle.dumps(store))._config.timeouts.connect_seconds == expected


@pytest.fixture
def late_server(url: str) -> Iterator[GCSServer]:
    server = GCSServer(port=int(url.rpartition(":")[2]), buckets=("bucket",))
    server.put("bucket", "a", b"late")
    yield server
    server.stop()


def test_a_server_that_starts_late_is_found(
    late_server: GCSServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts when the store has warned, which it does in the meantime."""
    handler = logging.Handler(logging.WARNING)
    warned = threading.Event()
    handler.emit = lambda _: warned.set()  # type: ignore[method-assign]
    logging.getLogger("aioflux.retry").addHandler(handler)

    def start() -> None:
        assert warned.wait(60)
        late_server.start()

    thread = threading.Thread(target=start)
    thread.start()
    try:
        with aioflux.sync.open_store("gs://bucket", endpoint_url=late_server.url) as store:
            assert store.get("a") == b"late"
            assert store.stats.num_retries == store.stats.num_failures > 0
    finally:
        thread.join()
        logging.getLogger("aioflux.retry").removeHandler(handler)
    assert f"no connection to {late_server.url}" in caplog.text

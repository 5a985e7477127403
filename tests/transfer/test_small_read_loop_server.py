"""Small objects one after another over real connections: faults on the wire, places, leaks."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
import tracemalloc
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from google.auth.credentials import AnonymousCredentials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aioflux
from aioflux import NotFoundError, RetryPolicy, Timeouts, TransferOptions, TransientError
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.more


QUICK = RetryPolicy(initial_seconds=0.001, max_seconds=0.002, budget_retries=1000)
SMALL = TransferOptions(max_in_flight=4, max_in_flight_bytes=8 * 1024 * 1024)
TIMES = Timeouts(connect_seconds=1e6, progress_seconds=1e6, idle_seconds=1e6)

DEFAULTS = {
    "transfer": SMALL,
    "retry": QUICK,
    "timeouts": TIMES,
    "credentials": AnonymousCredentials(),
}
READ = "objects.media"


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def server(request: pytest.FixtureRequest) -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",), tls=request.param) as running:
        yield running


@pytest.fixture
def plain_server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        yield running


@asynccontextmanager
async def opened(server: GCSServer, **options: Any) -> AsyncIterator[aioflux.Store]:
    """A store whose connections are open and which knows about how large the objects are."""
    is_tls = server.url.startswith("https")
    store = aioflux.open_store(
        "gs://bucket",
        endpoint_url=server.url,
        **(DEFAULTS | options),
        ssl_context=server.client_ssl_context() if is_tls else None,
    )
    async with store:
        server.put("bucket", "warm", b"w" * 1000)
        async for _ in store.get_many(["warm"] * 20):
            pass
        yield store


def session_of(store: aioflux.Store) -> Any:
    return store._sessions.current()


def filled(server: GCSServer, count: int) -> dict[str, bytes]:
    stored = {f"k{at:04}": b"%d." % at * (at % 700) + b"." for at in range(count)}
    for key, data in stored.items():
        server.put("bucket", key, data)
    return stored


async def all_of(pairs: AsyncIterator[Any]) -> list[Any]:
    return [pair async for pair in pairs]


async def read(store: aioflux.Store, keys: Any, *, ordered: bool = True) -> list[Any]:
    async with asyncio.timeout(200):
        return [pair async for pair in store.get_many(keys, ordered=ordered)]


def check_at_rest(store: aioflux.Store) -> None:
    """Every place, byte and connection was given back."""
    session = session_of(store)
    limits, pool = session.admission, session.service._sender.pool
    assert (limits.slots.num_held, limits.bytes.held_bytes) == (0, 0)
    assert store.stats.num_in_flight == 0
    assert session.admission.deadlines.is_idle
    assert pool.num_open == pool.num_idle <= 4


async def test_everything_comes_with_one_request_each(server: GCSServer) -> None:
    stored = filled(server, 200)
    async with opened(server) as store:
        before = store.stats
        assert await read(store, iter(stored)) == list(stored.items())
        metas = await store.list_all("k")
        assert await read(store, metas) == list(stored.items())
        assert dict(await read(store, list(stored), ordered=False)) == stored
        assert store.stats.num_requests - before.num_requests == 600 + 1
        assert store.stats.num_failures == 0
        assert session_of(store).service._sender.pool.num_opened <= 4
        check_at_rest(store)


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503},
        {"status": 429, "retry_after": 0},
        {"status": 500},
        {"reset": True},
        {"lost": True},
        {"truncate_at": 0},
        {"truncate_at": 10},
        {"flip_at": 3},
    ],
    ids=lambda fault: "-".join(map(str, fault)),
)
async def test_what_goes_wrong_on_the_wire_is_mended_in_its_place(
    server: GCSServer, fault: Any
) -> None:
    stored = filled(server, 60)
    async with opened(server) as store:
        times = 2 if "flip_at" in fault else 5  # the third time, wrong bytes are an error
        server.faults.add(READ, key="k00?5", times=times, **fault)
        assert await read(store, list(stored)) == list(stored.items())
        # A read of wrong bytes succeeds, and another follows it. Where a kept-alive connection was
        # lost without a byte, that is taken for its end: the request is sent again at once.
        num_failures = {"flip_at": range(1), "lost": range(6), "reset": range(6)}
        assert store.stats.num_failures in num_failures.get(next(iter(fault)), range(5, 6))
        assert store.stats.num_throttled == (5 if fault.get("status") in {429, 503} else 0)
        check_at_rest(store)


async def test_bytes_that_stay_wrong_are_read_three_times(plain_server: GCSServer) -> None:
    stored = filled(plain_server, 10)
    async with opened(plain_server) as store:
        plain_server.faults.add(READ, key="k0005", flip_at=3)
        before = plain_server.stats.operation("xml.objects.get").requests
        with pytest.raises(aioflux.ChecksumError, match=r"k0005.*3 times"):
            await read(store, ["k0005"])
        assert plain_server.stats.operation("xml.objects.get").requests - before == 3
        assert await read(store, ["k0004"]) == [("k0004", stored["k0004"])]
        check_at_rest(store)


async def test_the_delay_of_a_retry_after_is_kept(plain_server: GCSServer) -> None:
    filled(plain_server, 8)
    loop = asyncio.get_running_loop()
    async with opened(plain_server) as store:
        plain_server.faults.add(READ, key="k0003", times=1, status=503, retry_after=1)
        began = loop.time()
        assert [key for key, _ in await read(store, [f"k000{at}" for at in range(8)])][3] == "k0003"
        assert loop.time() - began >= 1
        stats = store.stats
        assert (stats.num_retries, stats.num_failures, stats.num_throttled) == (1, 1, 1)


async def test_an_object_that_is_not_there_is_requested_once(server: GCSServer) -> None:
    stored = filled(server, 6)
    async with opened(server) as store:
        before = store.stats.num_requests
        reads = store.get_many(["k0001", "k9999"])
        assert await anext(reads) == ("k0001", stored["k0001"])
        with pytest.raises(NotFoundError, match="k9999"):
            await anext(reads)
        assert store.stats.num_requests - before == 2
        check_at_rest(store)


def close_connections(server: GCSServer) -> None:
    """Have the server close what is open, before the loop of this thread has turned."""

    def close() -> None:
        for connection in tuple(server.app.connections):
            connection.abort()

    assert server._loop is not None
    assert server.stats.connections_open
    server._loop.call_soon_threadsafe(close)
    until = time.monotonic() + 100
    while server.stats.connections_open:
        assert time.monotonic() < until
        time.sleep(0.001)


async def test_connections_that_were_closed_meanwhile_cost_no_one_an_attempt(
    server: GCSServer,
) -> None:
    stored = filled(server, 40)
    async with opened(server) as store:
        before = store.stats.num_requests
        close_connections(server)
        assert await read(store, list(stored)) == list(stored.items())
        assert store.stats.num_requests - before == 40
        assert store.stats.num_failures == 0
        check_at_rest(store)


async def test_an_empty_object_and_one_larger_than_its_first_range(server: GCSServer) -> None:
    large = os.urandom(3_000_000)
    server.put("bucket", "empty", b"")
    server.put("bucket", "large", large)
    async with opened(server) as store:
        before = store.stats
        items = ["warm", "empty", "large", "warm"]
        assert await read(store, items) == [
            ("warm", b"w" * 1000), ("empty", b""), ("large", large), ("warm", b"w" * 1000),
        ]  # fmt: skip
        received = store.stats.bytes_received - before.bytes_received
        is_tls = server.url.startswith("https")
        assert received == 2000 + len(large)
        assert is_tls or store.stats.num_requests > before.num_requests
        check_at_rest(store)


async def test_cancellation_leaves_the_store_usable(server: GCSServer) -> None:
    stored = filled(server, 100)
    async with opened(server) as store:
        server.faults.add(READ, key="k00[0-4]*", times=4, delay_seconds=3600)
        task = asyncio.create_task(read(store, list(stored)))
        while server.stats.operation("xml.objects.get").requests < 24:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.faults.clear()
        assert session_of(store).admission.slots.num_held == 0
        assert await read(store, list(stored)) == list(stored.items())
        check_at_rest(store)


async def test_a_deadline_ends_a_read_without_a_response(server: GCSServer) -> None:
    stored = filled(server, 10)
    retry = RetryPolicy(deadline_seconds=3)
    async with opened(server, retry=retry) as store:
        server.faults.add(READ, key="k0003", delay_seconds=3600)
        with pytest.raises(TransientError, match=r"k0003 came before the deadline") as raised:
            await all_of(store.get_many(list(stored)))
        assert raised.value.uri == "gs://bucket/k0003"
        server.faults.clear()
        assert await read(store, list(stored)) == list(stored.items())
        check_at_rest(store)


async def test_a_token_that_is_refused_is_renewed(plain_server: GCSServer) -> None:
    import datetime

    from google.auth import credentials

    class Renewed(credentials.Credentials):
        """Each refresh gives another token."""

        def __init__(self) -> None:
            super().__init__()
            self.num_refreshed = 0
            self.refresh(None)

        def refresh(self, request: object) -> None:
            self.num_refreshed += 1
            self.token = f"token-{self.num_refreshed}"
            self.expiry = datetime.datetime(2100, 1, 1)  # noqa: DTZ001  google-auth's are naive

    stored = filled(plain_server, 40)
    mine = Renewed()
    async with opened(plain_server, credentials=mine) as store:
        plain_server.faults.add(READ, key="k0010", times=1, status=401)
        assert await read(store, list(stored)) == list(stored.items())
        assert mine.num_refreshed == 2
        plain_server.faults.add(READ, key="k0010", times=2, status=401)
        assert await read(store, list(stored)) == list(stored.items())
        assert mine.num_refreshed == 4  # the token that came next was refused as well
        check_at_rest(store)


async def test_two_iterations_share_the_connections(server: GCSServer) -> None:
    stored = filled(server, 100)
    keys = list(stored)
    async with opened(server) as store:
        first, second = await asyncio.gather(read(store, keys[:50]), read(store, keys[50:]))
        assert first + second == list(stored.items())
        assert session_of(store).service._sender.pool.num_opened <= 4
        check_at_rest(store)


async def test_a_store_that_is_closed_under_an_iteration_fails_it(server: GCSServer) -> None:
    stored = filled(server, 50)
    async with opened(server) as store:
        server.faults.add(READ, key="k*", delay_seconds=3600)
        task = asyncio.create_task(read(store, list(stored)))
        while not store.stats.num_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await store.aclose()
        with pytest.raises(aioflux.StorageError):
            await task
        server.faults.clear()


def test_a_child_that_was_forked_in_the_middle_cannot_go_on(plain_server: GCSServer) -> None:
    stored = filled(plain_server, 60)

    async def run() -> None:
        async with opened(plain_server) as store:
            got = []
            child = -1
            async for pair in store.get_many(list(stored)):
                got.append(pair)
                if len(got) == 20:
                    child = os.fork()
                    if not child:
                        break
            if child:
                assert got == list(stored.items())
                _, status = os.waitpid(child, 0)  # noqa: ASYNC222
                assert os.waitstatus_to_exitcode(status) == 7
                assert await read(store, list(stored)) == list(stored.items())
                check_at_rest(store)
            else:
                os._exit(7)

    asyncio.run(run())


# --- random faults -------------------------------------------------------------------------

kinds = st.sampled_from(
    [
        {"status": 503},
        {"status": 429, "retry_after": 0},
        {"status": 502},
        {"reset": True},
        {"lost": True},
        {"lost": True, "reset": True},
        {"truncate_at": 0},
        {"truncate_at": 40, "reset": True},
        {"delay_seconds": 0.002},
    ]
)
faults = st.lists(
    st.tuples(kinds, st.sampled_from([0.02, 0.1, 0.3]), st.integers(0, 2**32)), max_size=4
)


@given(
    chosen=faults,
    count=st.integers(0, 60),
    width=st.integers(1, 8),
    ordered=st.booleans(),
    by_meta=st.booleans(),
    is_async=st.booleans(),
    is_uvloop=st.booleans(),
    budget=st.sampled_from([20_000, 400_000, 8_000_000]),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_faults_lose_double_and_reorder_nothing(
    plain_server: GCSServer,
    chosen: list[tuple[dict[str, Any], float, int]],
    count: int,
    width: int,
    budget: int,
    *,
    ordered: bool,
    by_meta: bool,
    is_async: bool,
    is_uvloop: bool,
) -> None:
    server = plain_server

    async def run() -> None:
        stored = filled(server, count)
        options = TransferOptions(max_in_flight=width, max_in_flight_bytes=budget)
        async with opened(server, transfer=options) as store:
            metas = {meta.key: meta for meta in await store.list_all("k")}
            items: Any = [metas[key] for key in stored] if by_meta else list(stored)

            async def coming() -> AsyncIterator[Any]:
                for item in items:
                    yield item

            for fault, share, seed in chosen:
                server.faults.add(READ, probability=share, seed=seed, **fault)
            got = await read(store, coming() if is_async else items, ordered=ordered)
            server.faults.clear()
            assert (got if ordered else sorted(got)) == list(stored.items())
            session = session_of(store)
            assert session.admission.slots.num_held == session.admission.bytes.held_bytes == 0
            stats = store.stats
            assert stats.num_in_flight == 0
            assert stats.num_retries <= stats.num_failures

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if is_uvloop else None) as runner:
        runner.run(run())
    server.faults.clear()


# --- leaks ---------------------------------------------------------------------------------


def sockets() -> set[str]:
    """Sockets that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in found if link.startswith("socket:")}


async def reach_rest(server: GCSServer, store: aioflux.Store) -> None:
    """Wait until the server, too, has let go of the connections that were lost."""
    pool = session_of(store).service._sender.pool
    async with asyncio.timeout(100):
        while server.stats.connections_open != pool.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    gc.collect()


@pytest.mark.parametrize("has_faults", [False, True], ids=["clean", "faulty"])
async def test_a_thousand_reads_leave_nothing_behind(
    server: GCSServer, *, has_faults: bool
) -> None:
    filled(server, 20)
    keys = [f"k{at % 20:04}" for at in range(1000)]
    async with opened(server) as store:
        tasks = asyncio.all_tasks()
        tracemalloc.start()
        try:
            # Buffers of connections are counted from here on: all are new.
            server.faults.add(READ, reset=True, probability=0.2, seed=3)
            assert len(await read(store, keys[:300])) == 300
            server.faults.clear()
            if has_faults:
                server.faults.add(READ, status=503, probability=0.01, seed=1)
                server.faults.add(READ, reset=True, probability=0.01, seed=2)
            await reach_rest(server, store)
            num_objects, open_before = len(gc.get_objects()), len(sockets())
            pool = session_of(store).service._sender.pool
            num_open = pool.num_open
            before = tracemalloc.get_traced_memory()[0]
            num = 0
            async with asyncio.timeout(200):
                async for _, data in store.get_many(keys, ordered=False):
                    num += bool(data)
            del data
            await reach_rest(server, store)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert num == 1000
        assert asyncio.all_tasks() == tasks
        check_at_rest(store)
        # Both ends of a connection are in this process.
        assert len(sockets()) <= open_before + 2 * 4
        assert len(gc.get_objects()) - num_objects < 500
        # Of those that were lost since, one end may be there still: buffers of 320 KiB under TLS.
        num_buffers = max(0, pool.num_open - num_open) * 2 + 4 * has_faults
        assert grown < 200_000 + num_buffers * 320 * 1024
    assert not [task for task in asyncio.all_tasks() if task not in tasks]


def test_a_store_that_is_closed_leaves_no_socket() -> None:
    before = sockets()

    async def run() -> None:
        async with GCSServer(buckets=("bucket",)) as server:
            filled(server, 50)
            async with opened(server) as store:
                await read(store, [f"k{at:04}" for at in range(50)])
                own, other = socket.socketpair()  # counted, or nothing here says anything
                assert len(sockets() - before) > 4
                own.close()
                other.close()

    asyncio.run(run())
    gc.collect()
    assert sockets() <= before

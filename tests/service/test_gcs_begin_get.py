"""Reads without a task: what they send, and that they end as `get` does, on both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import NotFoundError, StorageError, TransferOptions, TransientError
from aioflux._http.errors import ConnectionLostError
from aioflux._services.base import ReadRequest
from aioflux.testing import GCSServer
from tests.faults.gateway import Gateway
from tests.service.gcs_rig import Answering, opened
from tests.service.operations import SmallRead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux._services.base import Body, Service


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        running.put("bucket", "p/a", b"hello")
        running.put("bucket", "p/empty", b"")
        running.put("bucket", "p/large", b"x" * 5000)
        yield running


def begin(service: Service, key: str, *, generation: str = "", end: int = 1000) -> SmallRead:
    return SmallRead(service, ReadRequest(key, generation, 0, end))


def told(body: Body) -> object:
    return bytes(body.data), body.size, body.generation, body.crc32c, body.meta()


async def warm(service: Service) -> None:
    """Have one connection that is idle."""
    await service.get(ReadRequest("a"))


async def test_it_needs_a_connection_that_is_there(server: GCSServer) -> None:
    async with opened(server.url) as service:
        assert begin(service, "a").exchange is None
        await warm(service)
        first = begin(service, "a")
        assert first.exchange is not None
        assert begin(service, "a").exchange is None
        assert (await first.result).data == b"hello"


@pytest.mark.parametrize(("key", "end"), [("a", 1000), ("a", 5), ("a", 2), ("large", 5000)])
@pytest.mark.parametrize("is_pinned", [True, False])
async def test_it_reads_what_get_reads(
    server: GCSServer, key: str, end: int, *, is_pinned: bool
) -> None:
    async with opened(server.url) as service:
        expected = await service.get(ReadRequest(key, start=0, end=end))
        generation = expected.generation if is_pinned else ""
        body = await begin(service, key, generation=generation, end=end).result
        assert body is not None
        assert type(body.data) is bytes
        assert told(body) == told(expected)


async def test_of_an_empty_object_it_reports_the_size_where_the_response_does(
    server: GCSServer,
) -> None:
    async with opened(server.url) as service:
        await warm(service)
        body = await begin(service, "empty").result
        assert body is None or (body.size, body.data) == (0, b"")


@pytest.mark.parametrize(
    ("fault", "error", "status"),
    [
        ({"status": 404}, NotFoundError, 404),
        ({"status": 503, "retry_after": 3}, TransientError, 503),
        ({"status": 401}, StorageError, 401),
        ({"truncate_at": 2}, TransientError, None),
    ],
)
async def test_it_raises_what_get_raises(
    server: GCSServer, fault: Any, error: type[StorageError], status: int | None
) -> None:
    async with opened(server.url) as service:
        await warm(service)
        server.faults.add("objects.media", **fault)
        with pytest.raises(error) as raised:
            await begin(service, "a").result
        server.faults.clear()
        await warm(service)
        server.faults.add("objects.media", **fault)
        with pytest.raises(error) as expected:
            await service.get(ReadRequest("a", start=0, end=1000))
        assert str(raised.value) == str(expected.value)
        assert raised.value.uri == "gs://bucket/p/a"
        assert raised.value.status == expected.value.status == status
        if isinstance(raised.value, TransientError):
            assert isinstance(expected.value, TransientError)
            for name in ("retry_after_seconds", "num_bytes_received", "generation"):
                assert getattr(raised.value, name) == getattr(expected.value, name)


async def test_a_connection_that_was_closed_meanwhile_is_no_failure(server: GCSServer) -> None:
    async with opened(server.url) as service:
        await warm(service)
        read = begin(service, "a")
        server.faults.add("objects.media", lost=True, times=1)
        assert await read.result is None
        assert isinstance(read.error, ConnectionLostError)
        await warm(service)


async def test_a_dropped_read_gets_no_outcome(server: GCSServer) -> None:
    async with opened(server.url) as service:
        await warm(service)
        read = begin(service, "a")
        assert read.exchange is not None
        service.abort_get(read.exchange)
        await warm(service)
        assert not read.result.done()


@pytest.mark.parametrize("key", ["a\nb", "\ud800", "\r"])
async def test_a_key_that_no_object_can_have_sends_nothing(server: GCSServer, key: str) -> None:
    async with opened(server.url) as service:
        await warm(service)
        with pytest.raises(ValueError, match=r"key|name|text|encode"):
            begin(service, key)
        await warm(service)
        assert server.stats.operation("xml.objects.get").requests == 2


@pytest.mark.parametrize("generation", ["1 HTTP/1.1\r\nX: y", "\u0661"])
async def test_a_generation_that_cannot_be_sent_sends_nothing(
    server: GCSServer, generation: str
) -> None:
    async with opened(server.url) as service:
        await warm(service)
        with pytest.raises(ValueError, match="target"):
            begin(service, "a", generation=generation)
        await warm(service)
        assert server.stats.operation("xml.objects.get").requests == 2


async def test_it_sends_what_get_sends(server: GCSServer) -> None:
    seen: list[Any] = []

    def keep(request: Any) -> None:
        seen.append((request.method, dict(request.headers), dict(request.query)))

    server.app.hooks = (*server.app.hooks, Answering(keep))
    async with opened(server.url) as service:
        for generation in ("", (await service.get(ReadRequest("a"))).generation):
            seen.clear()
            await service.get(ReadRequest("a", generation=generation, start=0, end=100))
            await begin(service, "a", generation=generation, end=100).result
            assert seen[0] == seen[1]


# --- tokens --------------------------------------------------------------------------------


async def test_a_new_token_is_sent_as_soon_as_there_is_one(server: GCSServer) -> None:
    import datetime

    from google.auth import credentials

    class Mine(credentials.Credentials):
        def refresh(self, request: object) -> None:
            self.token = f"{self.token}+"
            self.expiry = datetime.datetime(2100, 1, 1)  # noqa: DTZ001  google-auth's are naive

    mine = Mine()
    mine.token, mine.expiry = "one", datetime.datetime(2100, 1, 1)  # noqa: DTZ001
    hook = Answering()
    server.app.hooks = (*server.app.hooks, hook)
    async with opened(server.url, credentials=mine) as service:
        await warm(service)
        await begin(service, "a").result
        service._sender._token.invalidate("one")
        assert begin(service, "a").exchange is None  # there is none at once
        await warm(service)
        await begin(service, "a").result
    assert hook.tokens == ["Bearer one", "Bearer one", "Bearer one+", "Bearer one+"]


async def test_a_token_of_a_coroutine_function_is_requested_by_a_coroutine(
    server: GCSServer,
) -> None:
    async def provide() -> str:
        return next(tokens)

    hook = Answering()
    server.app.hooks = (*server.app.hooks, hook)
    tokens = iter(["one", "two"])
    async with opened(server.url, credentials=provide) as service:
        await warm(service)
        service._sender._token.invalidate("one")
        assert begin(service, "a").exchange is None
        await warm(service)
    assert hook.tokens == ["Bearer one", "Bearer two"]


async def test_a_token_of_a_function_is_used_for_many_requests(server: GCSServer) -> None:
    hook = Answering()
    server.app.hooks = (*server.app.hooks, hook)
    tokens = iter(["one"])
    async with opened(server.url, credentials=lambda: next(tokens)) as service:
        await warm(service)
        await begin(service, "a").result
        await warm(service)
    assert hook.tokens == ["Bearer one"] * 3


async def test_a_function_for_tokens_is_not_called_by_a_read_without_a_task(
    server: GCSServer,
) -> None:
    """What it raises is for a coroutine, and not for the callback that ended another read."""
    num_asked = 0

    def provide() -> str:
        nonlocal num_asked
        num_asked += 1
        return "one"

    async with opened(server.url, credentials=provide) as service:
        await warm(service)
        service._sender._token.invalidate("one")
        assert begin(service, "a").exchange is None
        assert num_asked == 1


# --- with and without a proxy ---------------------------------------------------------------


@pytest.mark.parametrize("by_proxy", [False, True], ids=["direct", "proxy"])
async def test_many_small_objects_come_alike_with_and_without_a_proxy(
    server: GCSServer, monkeypatch: pytest.MonkeyPatch, *, by_proxy: bool
) -> None:
    """Both use reads without a task."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    stored = {f"k{at:03}": b"%d," % at * (at + 1) for at in range(100)}
    for key, data in stored.items():
        server.put("bucket", f"p/{key}", data)
    server.faults.add("objects.media", status=503, probability=0.05, seed=1)
    retry = aioflux.RetryPolicy(initial_seconds=0.001, max_seconds=0.001)
    options = TransferOptions(max_in_flight=8, max_in_flight_bytes=8 * 1024 * 1024)
    with Gateway() as proxy:
        if by_proxy:
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
        async with aioflux.open_store(
            "gs://bucket/p",
            endpoint_url=server.url,
            retry=retry,
            transfer=options,
            credentials=anonymous(),
        ) as store:
            got = [pair async for pair in store.get_many(iter(stored))]
            service: Any = store._sessions.current().service
            assert begin(service, "a").exchange is not None
        num_proxied = sum(proxy.num_requests.values())
    assert got == list(stored.items())
    assert (num_proxied >= 100) is by_proxy


def anonymous() -> Any:
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials()

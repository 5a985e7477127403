"""Reads of small objects: fixed headers, `bytes` bodies, and GETs without a task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aioflux._http.codec import FixedHeaders
from aioflux._http.errors import ConnectionLostError, ProtocolError, StalledError
from tests.http.pools import MIB, SHORT, opening, until
from tests.http.scripted import Peer, answering, ok, serving

if TYPE_CHECKING:
    from aioflux._http.codec import Origin
    from aioflux._http.pool import Pool

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"

pytestmark = pytest.mark.asyncio


class TestRequests:
    async def test_fixed_headers_stand_before_the_others(self) -> None:
        fixed = FixedHeaders([(b"User-Agent", b"x"), (b"Authorization", b"Bearer t")])

        async def script(peer: Peer) -> None:
            while True:
                server.requests.append(await peer.read_request())
                await peer.send(ok(b"hello"))

        async with serving(script) as (server, origin), opening() as pool:
            for method, body in ((b"GET", None), (b"PUT", b"data")):
                await pool.request(origin, method, b"/", [(b"X-A", b"1")], body=body, fixed=fixed)
        for head, _ in server.requests:
            lines = head.split(b"\r\n")
            assert lines.index(b"User-Agent: x") + 1 == lines.index(b"Authorization: Bearer t")
            assert lines.index(b"Authorization: Bearer t") < lines.index(b"X-A: 1")
            assert sum(line.startswith(b"Host: ") for line in lines) == 1

    @pytest.mark.parametrize("size", [0, 1, 1000, 65_000, 70_000, 3 * MIB])
    async def test_a_body_becomes_bytes_without_loss(self, size) -> None:
        data = bytes(range(251)) * (size // 251 + 1)
        data = data[:size]
        async with serving(answering(ok(data))) as (_, origin), opening() as pool:
            for _ in range(3):
                response = await pool.request(origin, b"GET", b"/", into=bytes)
                assert type(response.body) is bytes
                assert (response.body, response.num_bytes) == (data, size)

    @pytest.mark.parametrize(
        "response",
        [
            CHUNKED,
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
            b"HTTP/1.1 100 Continue\r\n\r\n" + ok(b"hello"),
            ok(b"hello", b"Connection: close"),
            ok(b"hello", status=b"206 Partial Content"),
            ok(b"hello", status=b"201 Created"),
        ],
        ids=["chunked", "to the end", "interim", "close", "206", "201"],
    )
    async def test_bodies_of_every_framing_become_bytes(self, response) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(response)
            if b"close" in response:
                return
            await peer.wait_closed_by_client()

        async with serving(script) as (_, origin), opening() as pool:
            response = await pool.request(origin, b"GET", b"/", into=bytes, max_body_bytes=5)
            assert (type(response.body), response.body) == (bytes, b"hello")

    async def test_an_error_and_a_head_response_are_not_bytes_of_the_object(self) -> None:
        error = ok(b"no such key", status=b"404 Not Found")
        async with serving(answering(error)) as (_, origin), opening() as pool:
            response = await pool.request(origin, b"GET", b"/", into=bytes, max_body_bytes=3)
            assert (response.status, bytes(response.body)) == (404, b"no such key")
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"
        async with serving(answering(head)) as (_, origin), opening() as pool:
            for _ in range(2):
                response = await pool.request(origin, b"HEAD", b"/", into=bytes)
                assert (response.body, response.num_bytes) == (b"", 0)

    async def test_a_longer_body_than_requested_is_an_error(self) -> None:
        async with serving(answering(ok(b"hello"))) as (_, origin), opening() as pool:
            with pytest.raises(ProtocolError):
                await pool.request(origin, b"GET", b"/", into=bytes, max_body_bytes=4)

    async def test_of_a_bytes_body_that_breaks_off_the_caller_has_nothing(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok(b"x" * 100_000)[:70_000])

        async with serving(script) as (_, origin), opening() as pool:
            with pytest.raises(ConnectionLostError) as raised:
                await pool.request(origin, b"GET", b"/", into=bytes)
            assert raised.value.num_bytes_received == 0


@pytest.mark.parametrize(
    "items",
    [[(b"Host", b"a")], [(b"content-length", b"1")], [(b"A", b"b\r\nC: d")], [(b"A b", b"")]],
)
async def test_fixed_headers_are_checked_like_the_others(items) -> None:
    with pytest.raises(ValueError, match=r"the pool sets|contain|token"):
        FixedHeaders(items)


class Reader:
    """A ResponseFuture that records its results, and may start the next GET from there."""

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self.pool = pool
        self.origin = origin
        self.responses: list[Any] = []
        self.error: Exception | None = None
        self.connection: Any = None
        self.num_remaining = 0

    def done(self) -> bool:
        return self.connection is None

    def start(self, target: bytes = b"/", headers: Any = (), *, limit: int = 10**6) -> bool:
        self.connection = self.pool.start_get(self.origin, target, headers, self, bytes, limit)
        return self.connection is not None

    def release(self) -> None:
        connection, self.connection = self.connection, None
        assert connection is not None
        connection.release()

    def set_result(self, result: Any) -> None:
        self.release()
        self.responses.append(result)
        if self.num_remaining:
            self.num_remaining -= 1
            assert self.start(b"/%d" % self.num_remaining)

    def set_exception(self, exception: Exception) -> None:
        self.error = exception
        self.release()


async def warm(pool: Any, origin: Origin) -> Reader:
    """Open a connection, which is then idle, and return a reader."""
    await pool.request(origin, b"GET", b"/warm")
    return Reader(pool, origin)


class TestStartGet:
    async def test_nothing_is_started_without_an_idle_connection(self) -> None:
        async with serving(answering(ok(b"a"))) as (server, origin), opening() as pool:
            reader = Reader(pool, origin)
            assert not reader.start()
            assert server.num_accepted == 0
            reader = await warm(pool, origin)
            assert reader.start()
            assert not Reader(pool, origin).start()
            await until(reader.done)
        assert not reader.start()  # nor after the pool is closed

    async def test_the_request_is_sent_and_the_connection_is_idle_again(self) -> None:
        async def script(peer: Peer) -> None:
            while True:
                server.requests.append(await peer.read_request())
                await peer.send(ok(b"hello", b"ETag: abc"))

        async with serving(script) as (server, origin), opening() as pool:
            reader = await warm(pool, origin)
            assert reader.start(b"/a?b=c", [(b"Range", b"bytes=0-4")])
            assert pool.num_idle == 0
            await until(reader.done)
            assert pool.num_idle == 1
        [response] = reader.responses
        assert (response.status, response.body) == (200, b"hello")
        assert response.headers[b"etag"] == b"abc"
        head = server.requests[1][0]
        assert (
            head
            == b"GET /a?b=c HTTP/1.1\r\nHost: %b\r\nRange: bytes=0-4\r\n\r\n" % origin.authority
        )

    @pytest.mark.parametrize("step", [1, 7, 10**6])
    async def test_hundreds_follow_each_other_on_one_connection(self, step) -> None:
        """Each is started within the callback that ends the one before."""

        async def script(peer: Peer) -> None:
            num = 0
            while True:
                await peer.read_request()
                response = ok(b"%d." % num * num, b"X-Num: %d" % num)
                cut = len(response) if step > len(response) else (num * step) % len(response)
                await peer.send(response[:cut])
                if cut < len(response):
                    await asyncio.sleep(0.0005)  # so that it arrives in two pieces
                    await peer.send(response[cut:])
                num += 1

        async with serving(script) as (server, origin), opening() as pool:
            reader = await warm(pool, origin)
            reader.num_remaining = 200
            reader.start()
            await until(lambda: len(reader.responses) == 201)
            assert (server.num_accepted, pool.num_idle) == (1, 1)
        for num, response in enumerate(reader.responses, 1):
            assert response.body == b"%d." % num * num
            assert response.headers[b"x-num"] == b"%d" % num

    async def test_an_error_status_is_a_response(self) -> None:
        error = ok(b"slow down", status=b"503 No")
        async with serving(answering(ok(), error)) as (_, origin), opening() as pool:
            reader = await warm(pool, origin)
            reader.start()
            await until(reader.done)
            assert (reader.responses[0].status, reader.responses[0].body) == (503, b"slow down")
            assert pool.num_idle == 1

    @pytest.mark.parametrize("how", ["closes", "resets", "breaks off", "sends too much"])
    async def test_a_failure_is_reported_and_frees_the_slot(self, how) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())
            await peer.read_request()
            if how == "resets":
                peer.reset()
            elif how == "breaks off":
                await peer.send(ok(b"x" * 90)[:70])
            elif how == "sends too much":
                await peer.send(ok(b"x" * 100))
                await peer.wait_closed_by_client()

        async with serving(script, answering(ok())) as (_, origin), opening() as pool:
            reader = await warm(pool, origin)
            connection_before = pool.num_opened
            reader.start(limit=99)
            connection = reader.connection
            assert connection is not None
            await until(reader.done)
            expected = ProtocolError if how == "sends too much" else ConnectionLostError
            assert isinstance(reader.error, expected)
            assert connection.is_stale is (how in {"closes", "resets"})
            assert pool.num_idle == 0
            await pool.request(origin, b"GET", b"/")
            assert pool.num_opened == connection_before + 1

    async def test_a_stall_is_reported(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())
            await peer.wait_closed_by_client()

        async with serving(script) as (_, origin), opening(timeouts=SHORT) as pool:
            reader = await warm(pool, origin)
            reader.start()
            await until(reader.done)
            assert isinstance(reader.error, StalledError)

    async def test_an_aborted_get_reports_nothing_and_frees_its_slot(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())
            await peer.wait_closed_by_client()

        async with (
            serving(script, answering(ok())) as (_, origin),
            opening(max_idle=1) as pool,
        ):
            reader = await warm(pool, origin)
            reader.start()
            waiting = asyncio.create_task(pool.request(origin, b"GET", b"/"))
            await asyncio.sleep(0)
            assert reader.connection is not None
            reader.connection.abort()
            reader.release()
            assert (await waiting).status == 200
            assert (reader.responses, reader.error) == ([], None)

    async def test_a_get_that_is_aborted_at_once_is_not_sent(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())
            server.requests.append((await peer.wait_closed_by_client(), b""))

        async with serving(script) as (server, origin), opening() as pool:
            reader = await warm(pool, origin)
            reader.start()
            assert reader.connection is not None
            reader.connection.abort()
            reader.release()
            await until(lambda: bool(server.requests))
        assert server.requests == [(b"", b"")]

    async def test_it_fails_when_the_pool_is_closed(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())
            await peer.wait_closed_by_client()

        async with serving(script) as (_, origin):
            async with opening() as pool:
                reader = await warm(pool, origin)
                reader.start()
            assert isinstance(reader.error, ConnectionLostError)

    async def test_a_request_that_cannot_be_encoded_takes_no_connection(self) -> None:
        async with serving(answering(ok())) as (_, origin), opening(max_idle=1) as pool:
            reader = await warm(pool, origin)
            with pytest.raises(ValueError, match="target"):
                pool.start_get(origin, b"/a b", (), reader, bytes, 1)  # type: ignore[arg-type]
            assert pool.num_idle == 1
            assert (await pool.request(origin, b"GET", b"/")).status == 200

"""What reads of small objects stand on: fixed headers, bodies that become bytes, no task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aioflux._http import ConnectionLostError, FixedHeaders, ProtocolError, StalledError
from aioflux._http.proxy import AiohttpPool
from tests.http.pools import MIB, PATIENT, SHORT, opening, until
from tests.http.scripted import Peer, answering, ok, serving

if TYPE_CHECKING:
    from aioflux._http import Connection, Origin, Pool, Response

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"

pytestmark = pytest.mark.asyncio


class TestBothClients:
    async def test_fixed_headers_stand_before_the_others(self, make_pool) -> None:
        fixed = FixedHeaders([(b"User-Agent", b"x"), (b"Authorization", b"Bearer t")])

        async def script(peer: Peer) -> None:
            while True:
                server.requests.append(await peer.read_request())
                await peer.send(ok(b"hello"))

        async with serving(script) as (server, origin), make_pool() as pool:
            for method, body in ((b"GET", None), (b"PUT", b"data")):
                await pool.request(origin, method, b"/", [(b"X-A", b"1")], body=body, fixed=fixed)
        for head, _ in server.requests:
            lines = head.split(b"\r\n")
            assert lines.index(b"User-Agent: x") + 1 == lines.index(b"Authorization: Bearer t")
            assert lines.index(b"Authorization: Bearer t") < lines.index(b"X-A: 1")
            assert sum(line.startswith(b"Host: ") for line in lines) == 1

    @pytest.mark.parametrize("size", [0, 1, 1000, 65_000, 70_000, 3 * MIB])
    async def test_a_body_becomes_bytes_without_loss(self, make_pool, size) -> None:
        data = bytes(range(251)) * (size // 251 + 1)
        data = data[:size]
        async with serving(answering(ok(data))) as (_, origin), make_pool() as pool:
            for _ in range(3):
                response = await pool.request(origin, b"GET", b"/", into=bytes)
                assert type(response.body) is bytes
                assert (response.body, response.num_bytes) == (data, size)

    @pytest.mark.parametrize(
        "answer",
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
    async def test_bodies_of_every_framing_become_bytes(self, make_pool, answer) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(answer)
            if b"close" in answer:
                return
            await peer.wait_closed_by_client()

        async with serving(script) as (_, origin), make_pool() as pool:
            response = await pool.request(origin, b"GET", b"/", into=bytes, max_body_bytes=5)
            assert (type(response.body), response.body) == (bytes, b"hello")

    async def test_a_refusal_and_a_head_are_no_bytes_of_the_object(self, make_pool) -> None:
        refusal = ok(b"no such key", status=b"404 Not Found")
        async with serving(answering(refusal)) as (_, origin), make_pool() as pool:
            response = await pool.request(origin, b"GET", b"/", into=bytes, max_body_bytes=3)
            assert (response.status, bytes(response.body)) == (404, b"no such key")
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"
        async with serving(answering(head)) as (_, origin), make_pool() as pool:
            for _ in range(2):
                response = await pool.request(origin, b"HEAD", b"/", into=bytes)
                assert (response.body, response.num_bytes) == (b"", 0)

    async def test_more_than_was_asked_for_is_an_error(self, make_pool) -> None:
        async with serving(answering(ok(b"hello"))) as (_, origin), make_pool() as pool:
            with pytest.raises(ProtocolError):
                await pool.request(origin, b"GET", b"/", into=bytes, max_body_bytes=4)

    async def test_of_bytes_that_break_off_nothing_is_with_the_caller(self, make_pool) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok(b"x" * 100_000)[:70_000])

        async with serving(script) as (_, origin), make_pool() as pool:
            with pytest.raises(ConnectionLostError) as raised:
                await pool.request(origin, b"GET", b"/", into=bytes)
            assert raised.value.num_bytes_received == 0


@pytest.mark.parametrize(
    "items",
    [[(b"Host", b"a")], [(b"content-length", b"1")], [(b"A", b"b\r\nC: d")], [(b"A b", b"")]],
)
async def test_fixed_headers_are_checked_as_the_others_are(items) -> None:
    with pytest.raises(ValueError, match=r"set by the pool|contain|token"):
        FixedHeaders(items)


# --- without a task ------------------------------------------------------------------------


class Told:
    """A waiter that keeps what it is told, and may go on from there."""

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self.pool = pool
        self.origin = origin
        self.responses: list[Response] = []
        self.error: Exception | None = None
        self.connection: Connection | None = None
        self.num_left = 0

    def done(self) -> bool:
        return self.connection is None

    def start(self, target: bytes = b"/", *, fields: bytes = b"", limit: int = 10**6) -> bool:
        self.connection = self.pool.start(
            self.origin, target, fields, self, into=bytes, max_body_bytes=limit
        )
        return self.connection is not None

    def end(self) -> None:
        connection, self.connection = self.connection, None
        assert connection is not None
        self.pool.end(self.origin, connection)

    def set_result(self, result: Response) -> None:
        self.end()
        self.responses.append(result)
        if self.num_left:
            self.num_left -= 1
            assert self.start(b"/%d" % self.num_left)

    def set_exception(self, exception: Exception) -> None:
        self.error = exception
        self.end()


async def warm(pool: Any, origin: Origin) -> Told:
    """A waiter, and a connection that is idle."""
    await pool.request(origin, b"GET", b"/warm")
    return Told(pool, origin)


class TestWithoutATask:
    async def test_there_is_nothing_without_an_idle_connection(self) -> None:
        async with serving(answering(ok(b"a"))) as (server, origin), opening() as pool:
            told = Told(pool, origin)
            assert not told.start()
            assert server.num_accepted == 0
            told = await warm(pool, origin)
            assert told.start()
            assert not Told(pool, origin).start()
            await until(told.done)
        assert not told.start()  # nor when it is closed

    async def test_the_request_leaves_as_asked_and_the_connection_comes_back(self) -> None:
        async def script(peer: Peer) -> None:
            while True:
                server.requests.append(await peer.read_request())
                await peer.send(ok(b"hello", b"ETag: abc"))

        async with serving(script) as (server, origin), opening() as pool:
            told = await warm(pool, origin)
            assert told.start(b"/a?b=c", fields=b"Range: bytes=0-4\r\n")
            assert pool.num_idle == 0
            await until(told.done)
            assert pool.num_idle == 1
        [response] = told.responses
        assert (response.status, response.body) == (200, b"hello")
        assert response.headers[b"etag"] == b"abc"
        head = server.requests[1][0]
        assert (
            head
            == b"GET /a?b=c HTTP/1.1\r\nHost: %b\r\nRange: bytes=0-4\r\n\r\n" % origin.authority
        )

    @pytest.mark.parametrize("step", [1, 7, 10**6])
    async def test_hundreds_follow_each_other_on_one_connection(self, step) -> None:
        """Each is begun within the callback that ends the one before."""

        async def script(peer: Peer) -> None:
            num = 0
            while True:
                await peer.read_request()
                answer = ok(b"%d." % num * num, b"X-Num: %d" % num)
                cut = len(answer) if step > len(answer) else (num * step) % len(answer)
                await peer.send(answer[:cut])
                if cut < len(answer):
                    await asyncio.sleep(0.0005)  # so that it arrives in two pieces
                    await peer.send(answer[cut:])
                num += 1

        async with serving(script) as (server, origin), opening() as pool:
            told = await warm(pool, origin)
            told.num_left = 200
            told.start()
            await until(lambda: len(told.responses) == 201)
            assert (server.num_accepted, pool.num_idle) == (1, 1)
        for num, response in enumerate(told.responses, 1):
            assert response.body == b"%d." % num * num
            assert response.headers[b"x-num"] == b"%d" % num

    async def test_a_refusal_is_an_answer(self) -> None:
        refusal = ok(b"slow down", status=b"503 No")
        async with serving(answering(ok(), refusal)) as (_, origin), opening() as pool:
            told = await warm(pool, origin)
            told.start()
            await until(told.done)
            assert (told.responses[0].status, told.responses[0].body) == (503, b"slow down")
            assert pool.num_idle == 1

    @pytest.mark.parametrize("how", ["closes", "resets", "breaks off", "sends too much"])
    async def test_what_goes_wrong_is_told_and_frees_the_place(self, how) -> None:
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
            told = await warm(pool, origin)
            connection_before = pool.num_opened
            told.start(limit=99)
            connection = told.connection
            assert connection is not None
            await until(told.done)
            expected = ProtocolError if how == "sends too much" else ConnectionLostError
            assert isinstance(told.error, expected)
            assert connection.is_stale is (how in {"closes", "resets"})
            assert pool.num_idle == 0
            await pool.request(origin, b"GET", b"/")
            assert pool.num_opened == connection_before + 1

    async def test_a_stall_is_told(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())
            await peer.wait_closed_by_client()

        async with serving(script) as (_, origin), opening() as pool:
            told = await warm(pool, origin)
            pool._timeouts = SHORT  # from here on, or what warms could be what stalls
            told.start()
            await until(told.done)
            assert isinstance(told.error, StalledError)

    async def test_one_that_is_dropped_is_told_nothing_and_frees_its_place(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())
            await peer.wait_closed_by_client()

        async with (
            serving(script, answering(ok())) as (_, origin),
            opening(max_connections=1) as pool,
        ):
            told = await warm(pool, origin)
            told.start()
            waiting = asyncio.create_task(pool.request(origin, b"GET", b"/"))
            await asyncio.sleep(0)
            assert told.connection is not None
            told.connection.abort()
            told.end()
            assert (await waiting).status == 200
            assert (told.responses, told.error) == ([], None)

    async def test_one_that_is_dropped_at_once_never_leaves(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())
            server.requests.append((await peer.wait_closed_by_client(), b""))

        async with serving(script) as (server, origin), opening() as pool:
            told = await warm(pool, origin)
            told.start()
            assert told.connection is not None
            told.connection.abort()
            told.end()
            await until(lambda: bool(server.requests))
        assert server.requests == [(b"", b"")]

    async def test_who_waits_in_line_comes_before_one_without_a_task(self) -> None:
        async with serving(answering(ok(b"a"))) as (_, origin), opening(max_connections=1) as pool:
            told = await warm(pool, origin)
            told.start()
            waiting = asyncio.create_task(pool.request(origin, b"GET", b"/"))
            await asyncio.sleep(0)
            await until(told.done)
            assert not told.start()  # the connection is promised
            await waiting
            assert told.start()
            await until(told.done)

    async def test_it_fails_with_the_pool(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())
            await peer.wait_closed_by_client()

        async with serving(script) as (_, origin):
            async with opening() as pool:
                told = await warm(pool, origin)
                told.start()
            assert isinstance(told.error, ConnectionLostError)

    async def test_a_request_that_cannot_be_sent_keeps_no_connection(self) -> None:
        async with serving(answering(ok())) as (_, origin), opening(max_connections=1) as pool:
            told = await warm(pool, origin)
            with pytest.raises(TypeError):
                pool.start(origin, None, b"", told, into=bytes, max_body_bytes=1)  # type: ignore[arg-type]
            assert pool.num_idle == 0
            assert (await pool.request(origin, b"GET", b"/")).status == 200


async def test_the_stand_in_gives_no_connection_out() -> None:
    async with serving(answering(ok(b"a"))) as (_, origin):
        pool = AiohttpPool(max_connections=2, timeouts=PATIENT)
        await pool.request(origin, b"GET", b"/")
        told = Told(pool, origin)  # type: ignore[arg-type]
        assert not told.start()
        with pytest.raises(ValueError, match="not given out"):
            pool.end(origin, None)  # type: ignore[arg-type]
        await pool.aclose()

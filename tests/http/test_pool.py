"""The promises of a pool, against scripted servers and on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from aioflux._http.codec import Origin
from aioflux._http.errors import ConnectError, ConnectionLostError, ProtocolError, StalledError
from aioflux.options import Timeouts
from tests.http.oracle import FedConnection, Transport
from tests.http.pools import FAR_SECONDS, MIB, SHORT, STALL_SECONDS, opening, until
from tests.http.scripted import Peer, answering, echoing, ok, refusing, serving

pytestmark = pytest.mark.asyncio


class TestRequests:
    async def test_a_request_and_its_response_are_complete(self) -> None:
        async def script(peer: Peer) -> None:
            server.requests.append(await peer.read_request())
            await peer.send(ok(b"hello", b"ETag: abc", b"X-A: 1", b"X-A: 2"))
            await peer.wait_closed_by_client()

        async with serving(script) as (server, origin), opening() as pool:
            response = await pool.request(
                origin, b"GET", b"/a%2Fb?c=d%20e", [(b"Range", b"bytes=0-4")]
            )
            assert (response.status, bytes(response.body), response.num_bytes) == (200, b"hello", 5)
            assert response.headers.get(b"etag") == b"abc"
            assert response.headers.get(b"x-a") == b"1, 2"
            head = server.requests[0][0]
            assert head.startswith(b"GET /a%2Fb?c=d%20e HTTP/1.1\r\n")
            assert b"Range: bytes=0-4\r\n" in head
            assert b"Host: " + origin.authority in head
            assert b"user-agent" not in head.lower()
            assert b"content-length" not in head.lower()

    @pytest.mark.parametrize("size", [0, 5, 70_000, 3 * MIB])
    @pytest.mark.parametrize("method", [b"PUT", b"POST"])
    async def test_bodies_of_any_size_go_out_and_come_back(self, method, size) -> None:
        data = bytes(range(256)) * (size // 256 + 1)
        parts = [memoryview(data)[: size // 2], bytearray(data[size // 2 : size])]
        async with serving(echoing) as (_, origin), opening() as pool:
            response = await pool.request(origin, method, b"/", body=parts)
            assert bytes(response.body) == data[:size]

    @pytest.mark.parametrize("size", [1, 70_000, 3 * MIB])
    async def test_a_body_is_received_into_the_callers_memory_and_not_beyond(self, size) -> None:
        data = b"x" * size
        memory = bytearray(size + 10)
        async with serving(answering(ok(data))) as (_, origin), opening() as pool:
            response = await pool.request(origin, b"GET", b"/", into=memoryview(memory))
        assert response.num_bytes == size
        assert isinstance(response.body, memoryview)
        assert response.body.obj is memory
        assert memory == data + bytes(10)

    @pytest.mark.parametrize("size", [5, 70_000])
    async def test_a_destination_may_be_a_function_of_the_length(self, size) -> None:
        made: list[bytearray] = []

        def allocate(num_bytes: int) -> memoryview:
            made.append(bytearray(num_bytes))
            return memoryview(made[-1])

        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
            size,
            b"y" * size,
        )
        error = ok(b"no", status=b"404 Not Found")
        script = answering(ok(b"x" * size), chunked, error)
        async with serving(script) as (_, origin), opening() as pool:
            for _ in range(3):
                await pool.request(origin, b"GET", b"/", into=allocate)
        assert made == [b"x" * size, b"y" * size]

    async def test_into_receives_only_a_2xx_body(self) -> None:
        memory = bytearray(4)
        script = answering(ok(b"a long error page", status=b"404 Not Found"))
        async with serving(script) as (_, origin), opening() as pool:
            response = await pool.request(origin, b"GET", b"/", into=memoryview(memory))
        assert (response.status, bytes(response.body)) == (404, b"a long error page")
        assert memory == bytes(4)

    async def test_an_error_body_is_kept_up_to_1_mib(self) -> None:
        script = answering(ok(b"e" * 3 * MIB, status=b"500 Oops"))
        async with serving(script) as (_, origin), opening() as pool:
            response = await pool.request(origin, b"GET", b"/")
            assert (response.status, response.num_bytes) == (500, MIB)
            assert (await pool.request(origin, b"GET", b"/")).status == 500

    @pytest.mark.parametrize(
        "framed",
        [
            pytest.param(ok(b"12345"), id="length"),
            pytest.param(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n",
                id="chunked",
            ),
        ],
    )
    @pytest.mark.parametrize("limit", ["into", "max_body_bytes"])
    async def test_a_body_longer_than_allowed_is_an_error_that_names_the_limit(
        self, framed, limit
    ) -> None:
        memory = bytearray(8)
        option = {"into": memoryview(memory)[:4]} if limit == "into" else {"max_body_bytes": 4}
        async with serving(answering(framed)) as (_, origin), opening() as pool:
            with pytest.raises(ProtocolError, match=r"\b4\b"):
                await pool.request(origin, b"GET", b"/", **option)
        assert memory[4:] == bytes(4)

    @pytest.mark.parametrize(
        ("method", "response"),
        [
            (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"),
            (b"HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
            (b"DELETE", b"HTTP/1.1 204 No Content\r\n\r\n"),
            (b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"),
            (b"GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        ],
    )
    async def test_responses_without_a_body_keep_the_connection(self, method, response) -> None:
        async with serving(answering(response)) as (server, origin), opening() as pool:
            for _ in range(3):
                response = await pool.request(origin, method, b"/")
                assert response.num_bytes == 0
            assert server.num_accepted == 1

    async def test_chunked_bodies_arrive_whole_and_keep_the_connection(self) -> None:
        chunks = b"".join(b"%x\r\n%b\r\n" % (100_000, bytes([n]) * 100_000) for n in range(5))
        response = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        whole = b"".join(bytes([n]) * 100_000 for n in range(5))
        async with serving(answering(response)) as (server, origin), opening() as pool:
            assert bytes((await pool.request(origin, b"GET", b"/")).body) == whole
            memory = bytearray(600_000)
            response = await pool.request(origin, b"GET", b"/", into=memoryview(memory))
            assert response.num_bytes == 500_000
            assert response.body == whole
            assert server.num_accepted == 1

    async def test_a_body_without_framing_ends_with_the_connection(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(b"HTTP/1.1 200 OK\r\n\r\n" + b"z" * 200_000)

        async with serving(script) as (server, origin), opening() as pool:
            for num in range(1, 3):
                response = await pool.request(origin, b"GET", b"/")
                assert bytes(response.body) == b"z" * 200_000
                assert server.num_accepted == num

    async def test_redirects_are_returned_and_bodies_stay_encoded(self) -> None:
        response = ok(
            b"\x1f\x8bnot", b"Location: /b", b"Content-Encoding: gzip", status=b"302 Found"
        )
        async with serving(answering(response)) as (_, origin), opening() as pool:
            response = await pool.request(origin, b"GET", b"/")
            assert (response.status, bytes(response.body)) == (302, b"\x1f\x8bnot")

    async def test_interim_responses_are_skipped(self) -> None:
        response = b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + ok(b"hello")
        async with serving(answering(response)) as (_, origin), opening() as pool:
            assert bytes((await pool.request(origin, b"GET", b"/")).body) == b"hello"

    @pytest.mark.parametrize("num_here", [0, 10, 100_000])
    async def test_truncation_is_an_error_that_says_how_much_is_valid(self, num_here) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(b"HTTP/1.1 200 OK\r\nETag: a\r\nContent-Length: 200000\r\n\r\n")
            await peer.send(b"v" * num_here)

        memory = bytearray(200_000)
        async with serving(script) as (_, origin), opening() as pool:
            with pytest.raises(ConnectionLostError) as caught:
                await pool.request(origin, b"GET", b"/", into=memoryview(memory))
        assert caught.value.num_bytes_received == num_here
        assert caught.value.head.headers[b"etag"] == b"a"
        assert caught.value.request_sent
        assert memory == b"v" * num_here + bytes(200_000 - num_here)

    @pytest.mark.parametrize("destination", ["memory", "function"])
    @pytest.mark.parametrize(
        "begin",
        [
            pytest.param(b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nabc", id="length"),
            pytest.param(
                b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", id="chunked"
            ),
        ],
    )
    async def test_an_error_body_that_breaks_off_leaves_nothing_to_resume_from(
        self, begin, destination
    ) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(begin)

        into = memoryview(bytearray(9))
        async with serving(script) as (_, origin), opening() as pool:
            with pytest.raises(ConnectionLostError) as caught:
                await pool.request(
                    origin, b"GET", b"/", into=into if destination == "memory" else lambda _: into
                )
        assert caught.value.num_bytes_received == 0
        assert into == bytes(9)

    async def test_a_body_without_length_is_resumed_only_from_the_callers_memory(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")

        memory = memoryview(bytearray(9))
        async with serving(script) as (_, origin), opening() as pool:
            for into, num_bytes in ((memory, 3), (lambda _: memory, 0), (None, 0)):
                with pytest.raises(ConnectionLostError) as caught:
                    await pool.request(origin, b"GET", b"/", into=into)
                assert caught.value.num_bytes_received == num_bytes

    @pytest.mark.parametrize(
        "begin",
        [
            pytest.param(b"", id="before-the-response"),
            pytest.param(b"HTTP/1.1 200", id="in-the-head"),
            pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", id="in-the-body"),
        ],
    )
    async def test_a_stall_is_an_error_after_progress_seconds(self, begin) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(begin)
            await peer.wait_closed_by_client()

        loop = asyncio.get_running_loop()
        async with serving(script) as (_, origin), opening(timeouts=SHORT) as pool:
            started = loop.time()
            with pytest.raises(StalledError):
                await pool.request(origin, b"GET", b"/")
            seconds = loop.time() - started
            assert STALL_SECONDS - 0.01 <= seconds < FAR_SECONDS  # uvloop counts milliseconds

    async def test_a_server_that_reads_no_body_is_a_stall(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_head()
            peer.reader._transport.pause_reading()
            await stalled.wait()

        stalled = asyncio.Event()
        async with serving(script) as (_, origin), opening(timeouts=SHORT) as pool:
            with pytest.raises(StalledError):
                await pool.request(origin, b"PUT", b"/", body=bytes(32 * MIB))
            stalled.set()

    async def test_the_response_to_a_write_may_start_later_than_that_to_a_read(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await asyncio.sleep(2 * STALL_SECONDS)
            await peer.send(ok())
            await peer.read_request()
            await stalled.wait()

        stalled = asyncio.Event()
        async with serving(script) as (_, origin), opening(timeouts=SHORT) as pool:
            assert (await pool.request(origin, b"PUT", b"/", body=b"a")).status == 200
            with pytest.raises(StalledError):
                await pool.request(origin, b"PUT", b"/", body=b"a", head_seconds=0.1)
            stalled.set()

    async def test_cancellation_closes_the_connection_and_leaves_the_pool_usable(self) -> None:
        async def stalling(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
            begun.set()
            await peer.wait_closed_by_client()

        begun = asyncio.Event()
        async with (
            serving(stalling, answering(ok(b"b"))) as (server, origin),
            opening(max_idle=1) as pool,
        ):
            async with asyncio.TaskGroup() as group:
                under_way = group.create_task(pool.request(origin, b"GET", b"/"))
                await begun.wait()
                waiting = group.create_task(pool.request(origin, b"GET", b"/"))
                cancelled = group.create_task(pool.request(origin, b"GET", b"/"))
                last = group.create_task(pool.request(origin, b"GET", b"/"))
                await asyncio.sleep(0)
                cancelled.cancel()
                under_way.cancel()
            assert under_way.cancelled()
            assert cancelled.cancelled()
            assert waiting.result().body == last.result().body == b"b"
            await pool.aclose()
            async with asyncio.timeout(FAR_SECONDS):
                await server.all_closed.wait()

    async def test_a_refused_connection_is_a_connect_error_and_nothing_was_sent(self) -> None:
        with refusing() as origin:
            async with opening() as pool:
                with pytest.raises(ConnectError) as caught:
                    await pool.request(origin, b"GET", b"/")
                assert not caught.value.request_sent

    @pytest.mark.parametrize("name", [b"Host", b"content-length", b"Transfer-Encoding"])
    async def test_the_callers_headers_cannot_change_the_framing(self, name) -> None:
        async with serving(echoing) as (server, origin), opening() as pool:
            with pytest.raises(ValueError, match="pool"):
                await pool.request(origin, b"GET", b"/", [(name, b"1")])
            assert server.num_accepted == 0

    async def test_a_closed_pool_raises(self) -> None:
        async with serving(echoing) as (_, origin), opening() as pool:
            await pool.aclose()
            await pool.aclose()
            with pytest.raises(RuntimeError, match="closed"):
                await pool.request(origin, b"GET", b"/")

    async def test_aclose_fails_the_requests_under_way(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            begun.set()
            await peer.wait_closed_by_client()

        begun = asyncio.Event()
        async with serving(script) as (_, origin), opening() as pool:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(failing(pool.request(origin, b"POST", b"/", body=b"a")))
                await begun.wait()
                await pool.aclose()
            assert isinstance(task.result(), ConnectionLostError)


async def failing(awaitable: Any) -> BaseException | None:
    """Return the error of an awaitable that fails inside a TaskGroup."""
    try:
        await awaitable
    except Exception as error:  # which the test inspects
        return error
    return None


class TestPool:
    async def test_idle_connections_are_reused_last_in_first_out(self) -> None:
        async def script(peer: Peer) -> None:
            name = b"%d" % server.num_accepted
            while True:
                await peer.read_request()
                if name == b"1":
                    await release.wait()
                await peer.send(ok(name))

        release = asyncio.Event()
        async with serving(script) as (server, origin), opening() as pool:
            async with asyncio.TaskGroup() as group:
                first = group.create_task(pool.request(origin, b"GET", b"/"))
                await until(lambda: server.num_accepted == 1)
                assert (await pool.request(origin, b"GET", b"/")).body == b"2"
                release.set()
            assert first.result().body == b"1"
            assert pool.num_idle == 2
            for _ in range(3):
                assert (await pool.request(origin, b"GET", b"/")).body == b"1"
            assert pool.num_opened == 2

    @pytest.mark.skipif(sys.platform != "linux", reason="no other kernel reports it")
    @pytest.mark.parametrize("size", [300_000, 2 * MIB])
    async def test_a_body_in_the_buffer_of_the_kernel_is_not_sent(self, size) -> None:
        """The kernel accepts some MiB at once, even if the server reads nothing."""

        async def script(peer: Peer) -> None:
            await peer.read_head()
            peer.reader._transport.pause_reading()
            await stalled.wait()

        stalled = asyncio.Event()
        timeouts = Timeouts(progress_seconds=STALL_SECONDS, idle_seconds=10 * STALL_SECONDS)
        async with serving(script) as (_, origin), opening(timeouts=timeouts) as pool:
            with pytest.raises(StalledError, match="while sending the request body"):
                await pool.request(origin, b"PUT", b"/", body=bytes(size))
            stalled.set()

    @pytest.mark.parametrize("begin", [b"", ok(b"abc")[:-2]], ids=["no response", "half a body"])
    async def test_what_a_blocked_loop_leaves_unread_is_not_a_stall(self, begin) -> None:
        """As if the process was stopped, which is not the server's fault."""

        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(begin)
            begun.set()
            await go_on.wait()
            await peer.send(ok(b"abc")[len(begin) :])

        begun, go_on = asyncio.Event(), asyncio.Event()
        async with serving(script) as (_, origin), opening(timeouts=SHORT) as pool:
            asked = asyncio.create_task(pool.request(origin, b"GET", b"/"))
            await begun.wait()
            await asyncio.sleep(STALL_SECONDS / 2)  # so that the pool has seen it wait
            time.sleep(3 * STALL_SECONDS)  # noqa: ASYNC251  blocks the loop
            go_on.set()
            assert (await asked).body == b"abc"

    @pytest.mark.parametrize(
        ("begin", "limit_seconds"),
        [(b"", 1.0), (ok(b"abc")[:-2], 3.0)],
        ids=["no response", "half a body"],
    )
    async def test_a_stall_is_reported_when_its_limit_has_passed(
        self, begin, limit_seconds
    ) -> None:
        """And not later; with a clock of the test's own, so that a slow machine does not matter."""
        fed, timeouts = FedConnection(), Timeouts(progress_seconds=3.0)
        future, _ = fed.start(b"GET", "bytes")  # with a second for the head
        fed.feed(begin, ())
        for now in (64.0, 64.0 + limit_seconds - 0.25):
            fed.connection.check_timeouts(now, timeouts)
        assert not future.done()
        fed.connection.check_timeouts(64.0 + limit_seconds, timeouts)
        assert isinstance(future.exception(), StalledError)

    async def test_the_longest_phase_of_a_slow_request_is_known(self) -> None:
        """With a clock of the test's own; the next request has phases of its own."""

        class Buffering(Transport):
            num_unsent = 1

            def get_write_buffer_size(self) -> int:
                return self.num_unsent

        transport, waiting = Buffering(), "waiting for the response to start"
        connection = (fed := FedConnection(transport)).connection
        timeouts = Timeouts(progress_seconds=1000.0, slow_seconds=10.0)
        connection.on_connected(100.0, 1.0, timeouts.slow_seconds)
        assert connection.slow_request == 0

        fed.send(b"PUT / HTTP/1.1\r\nContent-Length: 3\r\n\r\n", [b"abc"])
        connection.check_timeouts(103.9, timeouts)
        assert connection.slow_request == 0
        connection.check_timeouts(104.0, timeouts)
        assert (connection.slow_request, connection.longest_phase) == (
            1,
            "sending the request body",
        )
        transport.num_unsent = 0
        connection.check_timeouts(109.0, timeouts)
        assert connection.longest_phase == waiting
        fed.feed(ok(b"abc")[:-2], ())
        connection.check_timeouts(120.0, timeouts)
        fed.feed(ok(b"abc")[-2:], ())
        assert (connection.slow_request, connection.longest_phase) == (1, "receiving the response")

        fed.start(b"GET", "bytes")
        timeouts = replace(timeouts, slow_seconds=1.0)
        for now in (200.0, 200.4):
            connection.check_timeouts(now, timeouts)
        assert connection.slow_request != connection.num_requests
        connection.check_timeouts(200.5, timeouts)
        assert (connection.slow_request, connection.longest_phase) == (2, waiting)

    async def test_a_fresh_connection_that_is_lost_is_an_error(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            peer.reset()

        async with serving(script) as (server, origin), opening() as pool:
            with pytest.raises(ConnectionLostError):
                await pool.request(origin, b"GET", b"/")
            assert server.num_accepted == 1

    async def test_a_connection_closed_while_idle_frees_its_slot(self) -> None:
        async def script(peer: Peer) -> None:
            await peer.read_request()
            await peer.send(ok())

        async with serving(script) as (_, origin), opening(max_idle=1) as pool:
            for num in range(1, 4):
                assert (await pool.request(origin, b"POST", b"/", body=b"a")).status == 200
                await until(lambda: pool.num_open == 0)
                assert pool.num_opened == num

    async def test_an_idle_connection_is_closed_after_idle_seconds(self) -> None:
        timeouts = Timeouts(connect_seconds=60, progress_seconds=0.4, idle_seconds=0.1)
        async with serving(echoing) as (server, origin), opening(timeouts=timeouts) as pool:
            started = asyncio.get_running_loop().time()
            await pool.request(origin, b"GET", b"/")
            async with asyncio.timeout(FAR_SECONDS):
                await server.all_closed.wait()
            assert asyncio.get_running_loop().time() - started >= timeouts.idle_seconds
            await until(lambda: pool.num_open == 0)

    @pytest.mark.parametrize(
        "response",
        [
            pytest.param(ok(b"a") + b"surplus", id="surplus"),
            pytest.param(ok(b"a", b"Connection: close"), id="close"),
            pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", id="HTTP/1.0"),
        ],
    )
    async def test_a_connection_that_may_be_out_of_step_is_not_used_again(self, response) -> None:
        async with serving(answering(response)) as (server, origin), opening() as pool:
            for num in range(1, 3):
                assert (await pool.request(origin, b"GET", b"/")).body == b"a"
                assert server.num_accepted == num
                assert pool.num_idle == 0

    @pytest.mark.parametrize(
        "response",
        [
            pytest.param(b"SSH-2.0-OpenSSH\r\n", id="not-HTTP"),
            pytest.param(b"HTTP/1.1 101 Switching Protocols\r\n\r\n", id="101"),
            pytest.param(b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000, id="long-head"),
            pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" * 50, id="endless-100"),
            pytest.param(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n",
                id="bad-chunk",
            ),
        ],
    )
    async def test_what_is_not_http_is_rejected_at_once(self, response) -> None:
        async with serving(answering(response)) as (_, origin), opening() as pool:
            with pytest.raises(ProtocolError):
                await pool.request(origin, b"GET", b"/")
            assert pool.num_idle == 0

    async def test_responses_split_at_every_byte_read_the_same(self) -> None:
        whole = b"HTTP/1.1 100 Continue\r\n\r\n" + ok(b"hello", b"ETag: abc")

        async def script(peer: Peer) -> None:
            for cut in range(1, len(whole)):
                await peer.read_request()
                await peer.send(whole[:cut])
                # Not a wait for an event: the two writes must not leave as one.
                await asyncio.sleep(0.001)
                await peer.send(whole[cut:])

        async with serving(script) as (server, origin), opening() as pool:
            for _ in range(1, len(whole)):
                response = await pool.request(origin, b"GET", b"/")
                assert (response.body, response.headers[b"etag"]) == (b"hello", b"abc")
            assert server.num_accepted == 1

    async def test_an_allocator_that_fails_fails_only_its_request(self) -> None:
        def fail(num_bytes: int) -> memoryview:
            raise MemoryError(num_bytes)

        async with serving(answering(ok(b"a"))) as (_, origin), opening() as pool:
            with pytest.raises(MemoryError):
                await pool.request(origin, b"GET", b"/", into=fail)
            assert (await pool.request(origin, b"GET", b"/")).body == b"a"

    async def test_read_only_memory_is_rejected_before_anything_is_sent(self) -> None:
        async with serving(echoing) as (server, origin), opening() as pool:
            with pytest.raises(ValueError, match="writable"):
                await pool.request(origin, b"GET", b"/", into=memoryview(b"abc"))
            assert server.num_accepted == 0

    async def test_an_upload_is_sent_without_a_copy_of_it(self) -> None:
        async def counting(peer: Peer) -> None:
            await peer.read_head()
            num_left = 20 * MIB
            while num_left:
                num_left -= len(await peer.reader.read(65536))
            await peer.send(ok())

        data = bytes(20 * MIB)
        async with serving(counting) as (_, origin), opening() as pool:
            tracemalloc.start()
            try:
                assert (await pool.request(origin, b"PUT", b"/", body=data)).status == 200
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        # asyncio copies the rest of one slice; the server runs in this process, too.
        assert peak < 4 * MIB

    async def test_memory_of_an_upload_is_free_when_the_request_is_cancelled(self) -> None:
        received = bytearray()

        async def script(peer: Peer) -> None:
            await peer.read_head()
            begun.set()
            await go_on.wait()
            received.extend(await peer.wait_closed_by_client())

        begun, go_on = asyncio.Event(), asyncio.Event()
        data = bytearray(b"a" * 16 * MIB)
        async with serving(script) as (server, origin), opening() as pool:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(pool.request(origin, b"PUT", b"/", body=data))
                await begun.wait()
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                data[:] = b"b" * len(data)
                go_on.set()
            async with asyncio.timeout(FAR_SECONDS):
                await server.all_closed.wait()
        assert b"b" not in received
        assert len(received) < len(data)

    async def test_connecting_has_a_deadline(self) -> None:
        # Accepted by the kernel, but the TLS handshake is never responseed.
        async def silent(peer: Peer) -> None:
            await peer.wait_closed_by_client()

        timeouts = Timeouts(connect_seconds=0.2)
        async with serving(silent) as (_, origin), opening(timeouts=timeouts) as pool:
            with pytest.raises(ConnectError, match="within"):
                await pool.request(Origin("https", origin.host, origin.port), b"GET", b"/")

    async def test_the_slot_of_a_failed_connection_is_free_again(self) -> None:
        with refusing() as gone:
            async with opening(max_idle=1) as pool:
                for _ in range(3):
                    with pytest.raises(ConnectError):
                        await pool.request(gone, b"GET", b"/")


class TestOrigin:
    @pytest.mark.parametrize(
        ("url", "authority"),
        [
            ("https://a.b/c?d", b"a.b"),
            ("https://a.b:443", b"a.b"),
            ("http://a.b:443", b"a.b:443"),
            ("http://[::1]:8080/", b"[::1]:8080"),
        ],
    )
    async def test_the_authority_has_a_port_that_is_not_the_default(self, url, authority) -> None:
        assert Origin.from_url(url).authority == authority

    @pytest.mark.parametrize(
        "url", ["ftp://a", "http://", "http://u:p@a/", "http://a:99999/", "http://a:0", "http://ä/"]
    )
    async def test_a_url_without_a_valid_origin_is_rejected(self, url) -> None:
        with pytest.raises(ValueError, match=r"."):
            Origin.from_url(url)

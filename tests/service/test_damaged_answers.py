"""Answers that the service did not send: one is a transient failure, what repeats is final.

A relay in front of a server damages answers on their way. What the server did is done.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import RetryPolicy, StorageError, TransferOptions, TransientError
from aioflux._services.base import ListRequest, ReadRequest
from aioflux.testing import GCSServer
from tests.http.scripted import Peer, answering, ok, serving
from tests.service.gcs_rig import OPERATIONS as OPERATIONS_OF_GCS
from tests.service.gcs_rig import opened
from tests.service.s3_rig import OPERATIONS as OPERATIONS_OF_S3
from tests.service.s3_rig import answer, asking, hello

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

QUICK = RetryPolicy(initial_seconds=0.001, max_seconds=0.002)
DATA = bytes(range(256)) * 40


def page(head: bytes, body: bytes) -> bytes:
    html = b"<html>Welcome</html>"
    lines = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n"
    return lines % len(html) + html


def cut(head: bytes, body: bytes) -> bytes:
    head = re.sub(rb"(?i)\r\ncontent-length: [0-9]+", b"\r\nconnection: close", head)
    return head + body[: len(body) // 2]


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "status-line": lambda head, body: b"\x15\x03HTTP garbage" + head + body,
    "status": lambda head, body: head.replace(b"HTTP/1.1 ", b"HTTP/1.1 2x", 1) + body,
    "length": lambda head, body: re.sub(rb"(?i)(content-length: )", rb"\g<1>-", head) + body,
    "page": page,
    "cut": cut,
}

OPERATIONS: dict[str, Callable[[aioflux.Store], Awaitable[Any]]] = {
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", start=0, end=100),
    "get_into": lambda store: store.get_into("a", bytearray(len(DATA))),
    "head": lambda store: store.head("a"),
    "list": lambda store: store.list_all(""),
    "put": lambda store: store.put("b", DATA),
    "create": lambda store: store.put("b", DATA, mode="create"),
    "delete": lambda store: store.delete("a"),
    "copy": lambda store: store.copy("a", "b"),
    "compose": lambda store: store.compose("b", ["a", "a"]),
    "writer": lambda store: store.put("b", bytes(11 << 20)),
}


class Relay:
    """Passes requests on to a server, and damages answers.

    Attributes:
        num_requests: Requests that came.
        num_reused: Those over a connection on which an answer had been damaged.
    """

    def __init__(self, url: str, damage: Callable[[bytes, bytes], bytes], *numbers: int) -> None:
        """Take the server, the damage, and the numbers of the answers, from 1; all by default."""
        self.num_requests = 0
        self.num_reused = 0
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._damage = damage
        self._numbers = numbers

    async def script(self, peer: Peer) -> None:
        was_damaged = False
        while True:
            request = b"".join(await peer.read_request())
            self.num_requests += 1
            self.num_reused += was_damaged
            is_damaged = not self._numbers or self.num_requests in self._numbers
            head, body = await self._ask(request)
            if not is_damaged:
                await peer.send(head + body)
                continue
            was_damaged = True
            await peer.send(self._damage(head, body))
            if self._damage is cut:
                return

    async def _ask(self, request: bytes) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            upstream = Peer(reader, writer)
            await upstream.send(request)
            return await upstream.read_request()
        finally:
            writer.close()
            await writer.wait_closed()


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        running.put("bucket", "a", DATA)
        yield running


@asynccontextmanager
async def relayed(relay: Relay) -> AsyncIterator[aioflux.Store]:
    transfer = TransferOptions(part_size_bytes=5 << 20, verify_ranges=False)
    async with serving(relay.script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        store = aioflux.open_store("gs://bucket", endpoint_url=url, retry=QUICK, transfer=transfer)
        async with store:
            yield store


each_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


@each_damage
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_one_damaged_answer_fails_no_operation(
    server: GCSServer, operation: str, damage: Callable[[bytes, bytes], bytes]
) -> None:
    relay = Relay(server.url, damage, 1)
    async with relayed(relay) as store:
        result = await OPERATIONS[operation](store)
    assert not relay.num_reused
    if operation == "get":
        assert result == DATA
    elif operation in {"put", "create", "copy", "compose", "writer"}:
        assert result.size == len(server.get("bucket", "b"))
    elif operation == "delete":
        assert server.keys("bucket") == []


@each_damage
async def test_one_damaged_answer_fails_no_small_read_of_many(
    server: GCSServer, damage: Callable[[bytes, bytes], bytes]
) -> None:
    """Also where it is read without a task."""
    for number in range(20):
        server.put("bucket", f"many/{number}", b"%d" % number)
    relay = Relay(server.url, damage, 5, 9, 17)
    async with relayed(relay) as store:
        listed = await store.list_all("many/")
        found = {key: data async for key, data in store.get_many(listed)}
    assert found == {f"many/{number}": b"%d" % number for number in range(20)}


@each_damage
@pytest.mark.parametrize("operation", ["get", "get_range", "head", "list", "writer"])
async def test_an_answer_that_is_damaged_each_time_is_final_soon(
    server: GCSServer, operation: str, damage: Callable[[bytes, bytes], bytes]
) -> None:
    relay = Relay(server.url, damage)
    async with relayed(relay) as store:
        with pytest.raises(StorageError, match="gs://bucket/"):
            await OPERATIONS[operation](store)
    assert 2 <= relay.num_requests <= 6


def lowered(head: bytes, body: bytes) -> bytes:
    """Shorten an object to 60 bytes in Content-Range, as a proxy with an old size would."""
    found = re.search(rb"(?i)content-range: bytes ([0-9]+)-[0-9]+/[0-9]+", head)
    if found is None:
        return head + body
    start = int(found[1])
    body = body[: 60 - start]
    head = re.sub(rb"(?i)(\r\ncontent-length: )[0-9]+", rb"\g<1>%d" % len(body), head)
    return head.replace(found[0], b"content-range: bytes %d-59/60" % start) + body


PARTS: dict[str, Callable[[aioflux.Store], Awaitable[Any]]] = {
    "get_range": lambda store: store.get_range("a", start=10, end=100),
    "get_range from 0": lambda store: store.get_range("a", start=0, end=100),
    "get_into": lambda store: store.get_into("a", bytearray(90), start=10),
    "get_into from 0": lambda store: store.get_into("a", bytearray(100)),
}


@pytest.mark.parametrize("operation", PARTS)
async def test_a_lowered_object_size_shortens_no_range(server: GCSServer, operation: str) -> None:
    """Once it is repeated, each time it is an error."""
    async with relayed(Relay(server.url, lowered, 1)) as store:
        result = await PARTS[operation](store)
    assert (len(result) if isinstance(result, bytes) else result) in {90, 100}
    async with relayed(Relay(server.url, lowered)) as store:
        with pytest.raises(TransientError, match="but the object has 10240"):
            await PARTS[operation](store)


def without_hash(head: bytes, body: bytes) -> bytes:
    return re.sub(rb"(?i)\r\nx-goog-hash: [^\r]*", b"", head) + body


async def test_a_lost_checksum_of_cloud_storage_is_requested(server: GCSServer) -> None:
    """The response of a composite, too, whose only checksum is the crc32c."""
    num_flipped = 0

    def stripped_and_flipped(head: bytes, body: bytes) -> bytes:
        nonlocal num_flipped
        if b"x-goog-hash" in head.lower() and num_flipped < 1:
            num_flipped += 1
            body = bytes([body[0] ^ 1]) + body[1:]
        return without_hash(head, body)

    async with aioflux.open_store("gs://bucket", endpoint_url=server.url) as direct:
        composite = await direct.compose("c", ["a", "a"])
    assert composite.crc32c is not None
    relay = Relay(server.url, stripped_and_flipped)
    async with relayed(relay) as store:
        assert await store.get("c") == DATA * 2
        assert num_flipped == 1
        assert store.stats.num_checksum_mismatches == 1
        assert store.stats.bytes_unverified == 0


async def test_a_web_server_is_distinguished_from_a_service_at_once(server: GCSServer) -> None:
    """The message is that of one attempt: the address, and what is there."""
    relay = Relay(server.url, page)
    async with relayed(relay) as store:
        with pytest.raises(StorageError, match="it is not from Cloud Storage") as caught:
            await store.get("a")
    assert "RetryPolicy" not in str(caught.value)


async def test_a_damaged_head_does_not_say_that_an_object_is_larger_than_was_guessed() -> None:
    async with asking(b"garbage\r\n\r\n", hello()) as (service, asked):
        with pytest.raises(TransientError, match="not an HTTP") as caught:
            await service.get(ReadRequest("a", start=0, end=100))
        assert caught.value.is_malformed
        assert bytes((await service.get(ReadRequest("a", start=0, end=100))).data) == b"hello"
    assert ["range" in each.headers for each in asked] == [False, False]


@pytest.mark.parametrize("operation", OPERATIONS_OF_S3)
async def test_a_web_server_in_place_of_s3_is_malformed_for_every_operation(operation: str) -> None:
    async with asking(answer(200, "<html>Welcome</html>")) as (service, _):
        with pytest.raises(TransientError, match="s3://bucket/p/") as caught:
            await OPERATIONS_OF_S3[operation](service)
    assert caught.value.is_malformed


@pytest.mark.parametrize("operation", OPERATIONS_OF_GCS)
async def test_a_web_server_in_place_of_gcs_is_malformed_for_every_operation(
    operation: str,
) -> None:
    html = b"<html>Welcome</html>"
    async with (
        serving(answering(ok(html, b"content-type: text/html"))) as (_, origin),
        opened(f"http://127.0.0.1:{origin.port}") as service,
    ):
        with pytest.raises(TransientError, match="gs://bucket/p/") as caught:
            await OPERATIONS_OF_GCS[operation](service)
    assert caught.value.is_malformed


async def test_a_size_that_no_listing_holds_is_malformed() -> None:
    page = b'{"kind":"storage#objects","items":[{"name":"p/a","size":"%d"}]}' % 10**30
    async with (
        serving(answering(ok(page, b"content-type: application/json"))) as (_, origin),
        opened(f"http://127.0.0.1:{origin.port}") as service,
    ):
        with pytest.raises(TransientError, match="the size of an object is 10") as caught:
            await service.list_page(ListRequest(""))
    assert caught.value.is_malformed

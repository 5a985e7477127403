"""Which failures leave open whether a request was carried out, and which do not."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import TransientError
from aioflux._services.base import PartRequest, Precondition, ReadRequest, Source, WriteRequest
from aioflux._values.checksums import crc32c
from aioflux.testing import GCSServer
from tests.servers.statuses import AMBIGUOUS
from tests.service.opening import opened_service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from aioflux._services.base import Service

ANY = Precondition()
WRITES: dict[str, Callable[[Service], Awaitable[object]]] = {
    "put": lambda service: service.put(WriteRequest("b"), [b"1"], crc32c=None),
    "delete": lambda service: service.delete("a"),
    "compose": lambda service: service.compose(WriteRequest("b"), [Source(key="a")]),
    "copy": lambda service: service.copy(Source(key="a"), "b", precondition=ANY),
    "initiate": lambda service: service.initiate_upload(WriteRequest("b")),
    "complete": lambda service: service.complete_upload(WriteRequest("b"), "id", []),
}
each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        running.put("bucket", "a", b"0123456789")
        yield running


def opened(url: str) -> AbstractAsyncContextManager[Any]:
    return opened_service("gs://bucket", endpoint_url=url)


@each_write
@pytest.mark.parametrize(
    "fault",
    [
        {"lost": True},
        {"lost": True, "reset": True},
        *({"status": status} for status in AMBIGUOUS),
    ],
    ids=str,
)
async def test_no_failure_that_passes_says_that_nothing_was_done(
    server: GCSServer,
    write: Callable[[Service], Awaitable[object]],
    fault: dict[str, int | bool],
) -> None:
    async with opened(server.url) as service:
        server.faults.add("*", **fault)
        with pytest.raises(TransientError) as raised:
            await write(service)
    assert raised.value.maybe_done


@each_write
async def test_what_was_never_sent_was_not_done(
    write: Callable[[Service], Awaitable[object]],
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with opened(f"http://127.0.0.1:{unused.getsockname()[1]}") as service:
            with pytest.raises(TransientError) as raised:
                await write(service)
    assert not raised.value.maybe_done


async def test_a_broken_body_reports_its_generation(server: GCSServer) -> None:
    generation = server.put("bucket", "a", bytes(1 << 20))
    async with opened(server.url) as service:
        server.faults.add("objects.media", truncate_at=1000)
        with pytest.raises(TransientError) as raised:
            await service.get(ReadRequest("a"), into=memoryview(bytearray(1 << 20)))
    assert raised.value.generation == str(generation)
    assert raised.value.num_bytes_received == 1000


async def test_a_part_reports_what_the_service_holds(server: GCSServer) -> None:
    async with opened(server.url) as service:
        upload_id = await service.initiate_upload(WriteRequest("b"))
        part = await service.put_part(PartRequest("b", upload_id, 1, (b"12", b"3")))
    assert (part.size, part.crc32c) == (3, crc32c(b"123"))


async def test_only_tls_guards_what_comes(server: GCSServer) -> None:
    async with opened(server.url) as service:
        assert not service.capabilities.guarded_transport
    async with opened("https://127.0.0.1:1") as service:
        assert service.capabilities.guarded_transport

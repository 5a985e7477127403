"""Every operation with every fault of the retry-test API, over the data plane.

The faults are added over HTTP as on Google's storage-testbench, and a gateway in front of the
server adds the header that selects them. The server reports afterwards whether each has happened.

Environment:
    AIOFLUX_TEST_GCS_URL: Another server that has this API; the embedded one by default.
        Faults that it does not know are skipped.
    AIOFLUX_TEST_GCS_BUCKET: An existing bucket on it, "bucket" by default.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux.testing import GCSServer
from tests.faults.gateway import Gateway
from tests.servers.statuses import AMBIGUOUS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

pytestmark = pytest.mark.more

MIB = 1024 * 1024
URL = os.environ.get("AIOFLUX_TEST_GCS_URL", "")
BUCKET = os.environ.get("AIOFLUX_TEST_GCS_BUCKET", "bucket")
SMALL = bytes(range(256)) * 3
LARGE = bytes(range(256)) * (6 * 4096)
"""More than one part of 5 MiB."""
TRANSFER = aioflux.TransferOptions(
    range_size_bytes=MIB, part_size_bytes=5 * MIB, max_buffered_bytes=10 * MIB
)
RETRY = aioflux.RetryPolicy(max_attempts=20, initial_seconds=0.01, max_seconds=0.2)
"""Attempts for all rejections, and for responses that a busy machine delays."""
TIMEOUTS = aioflux.Timeouts(progress_seconds=100, idle_seconds=100)
STALLED = aioflux.Timeouts(progress_seconds=0.5, idle_seconds=100)

REFUSALS = tuple(f"return-{status}" for status in AMBIGUOUS)
"""One after the other."""
NO_BODY = [REFUSALS, ("return-reset-connection",), ("stall-for-1s",)]
"""A response without a body cannot break off."""
ALL = [*NO_BODY, ("return-broken-stream",)]
LARGE_ANSWERS = [("return-broken-stream-after-256K",), ("stall-for-1s-after-256K",)]
LARGE_BODIES = [("return-503-after-256K",)]


# --- operations ---------------------------------------------------------------------------------


async def head(store: aioflux.Store) -> None:
    meta = await store.head("small")
    assert meta.size == len(SMALL)


async def get(store: aioflux.Store) -> None:
    assert await store.get("small") == SMALL


async def get_large(store: aioflux.Store) -> None:
    assert await store.get("large") == LARGE


async def get_into(store: aioflux.Store) -> None:
    buffer = bytearray(len(LARGE))
    assert await store.get_into("large", buffer) == len(LARGE)
    assert buffer == LARGE


async def get_range(store: aioflux.Store) -> None:
    got = await store.get_range("large", start=100, end=3 * MIB)
    assert got == LARGE[100 : 3 * MIB]


async def get_many(store: aioflux.Store) -> None:
    pairs = [pair async for pair in store.get_many(["small", "large"])]
    assert pairs == [("small", SMALL), ("large", LARGE)]


async def open_reader(store: aioflux.Store) -> None:
    pieces = []
    async with store.open_reader("large") as reader:
        while piece := await reader.read(MIB):
            pieces.append(piece)
    assert b"".join(pieces) == LARGE


async def list_all(store: aioflux.Store) -> None:
    assert [meta.key for meta in await store.list_all()] == ["large", "small"]


async def put(store: aioflux.Store) -> None:
    await store.put("new", SMALL * 500)
    assert await stored(store, "new") == SMALL * 500


async def create(store: aioflux.Store) -> None:
    await store.put("new", SMALL * 500, mode="create")
    assert await stored(store, "new") == SMALL * 500


async def put_multipart(store: aioflux.Store) -> None:
    await store.put("new", LARGE)
    assert await stored(store, "new") == LARGE


async def open_writer(store: aioflux.Store) -> None:
    async with store.open_writer("new") as writer:
        for start in range(0, len(LARGE), MIB):
            await writer.write(LARGE[start : start + MIB])
    assert await stored(store, "new") == LARGE


async def open_conditional_writer(store: aioflux.Store) -> None:
    async with store.open_writer("new", mode="create") as writer:
        await writer.write(LARGE)
    assert await stored(store, "new") == LARGE


async def compose(store: aioflux.Store) -> None:
    await store.compose("new", ["small", "small"])
    assert await stored(store, "new") == SMALL * 2


async def append(store: aioflux.Store) -> None:
    await store.compose("small", ["small", "small"], mode="overwrite")
    assert await stored(store, "small") == SMALL * 2


async def copy(store: aioflux.Store) -> None:
    await store.copy("small", "new", mode="create")
    assert await stored(store, "new") == SMALL


async def delete(store: aioflux.Store) -> None:
    await store.delete("small")
    assert await stored(store, "small") is None


async def delete_many(store: aioflux.Store) -> None:
    result = await store.delete_many(["small", "large"])
    assert (result.deleted, result.missing) == (("large", "small"), ())
    assert not result.errors
    assert await stored(store, "large") is None


async def stored(store: aioflux.Store, key: str) -> bytes | None:
    try:
        return await store.get(key)
    except aioflux.NotFoundError:
        return None


@dataclass(frozen=True)
class Row:
    """An operation of the store, one of its operations on the service, and faults of that."""

    run: Callable[[aioflux.Store], Awaitable[None]]
    operation: str
    faults: list[tuple[str, ...]]

    def __str__(self) -> str:
        return f"{self.run.__name__}-{self.operation}"


GET = "storage.objects.get"
READS = {GET, "storage.objects.list"}
CLEAN_UP = Row(open_conditional_writer, "storage.objects.delete", NO_BODY)
"""The object exists; a warning says that its temporary one does, too."""
ROWS = [
    Row(head, GET, ALL),
    Row(get, GET, ALL),
    Row(get_large, GET, ALL + LARGE_ANSWERS),
    Row(get_into, GET, ALL + LARGE_ANSWERS),
    Row(get_range, GET, ALL + LARGE_ANSWERS),
    Row(get_many, GET, ALL),
    Row(open_reader, GET, ALL),
    Row(list_all, "storage.objects.list", ALL),
    Row(put, "storage.objects.insert", NO_BODY + LARGE_BODIES),
    Row(create, "storage.objects.insert", NO_BODY + LARGE_BODIES),
    Row(put_multipart, "xml.multipart.create", ALL),
    Row(put_multipart, "xml.multipart.part", NO_BODY + LARGE_BODIES),
    Row(put_multipart, "xml.multipart.complete", ALL),
    Row(open_writer, "xml.multipart.part", NO_BODY),
    Row(open_writer, "xml.multipart.complete", ALL),
    Row(open_conditional_writer, "xml.multipart.complete", ALL),
    Row(open_conditional_writer, "storage.objects.compose", ALL),
    CLEAN_UP,
    Row(compose, "storage.objects.compose", ALL),
    Row(append, "storage.objects.compose", ALL),
    Row(copy, "storage.objects.rewrite", ALL),
    Row(delete, "storage.objects.delete", NO_BODY),
    Row(delete_many, "storage.objects.delete", NO_BODY),
]


# --- the server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if URL:
        yield URL
        return
    with GCSServer(buckets=(BUCKET,)) as server:
        yield server.url


@pytest.fixture(scope="module")
def gateway(url: str) -> Iterator[Gateway]:
    with Gateway(url) as gateway:
        yield gateway


def send(url: str, body: Any = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
        return json.load(response)


def add_faults(
    url: str, operation: str, faults: tuple[str, ...], *, may_skip: bool = bool(URL)
) -> str:
    """Add faults and return the id of the test, or skip it if another server does not know them."""
    body = {"instructions": {operation: faults}, "transport": "HTTP"}
    try:
        return send(f"{url}/retry_test", body)["id"]
    except urllib.error.HTTPError as exc:
        with exc:  # it is the response, and holds its connection
            if not may_skip:
                raise
            pytest.skip(f"the server does not know {operation} {faults}: {exc}")


@pytest.fixture(scope="module")
def uri(url: str) -> str:
    """The uri of two objects that operations only read."""
    uri = f"gs://{BUCKET}/{uuid.uuid4().hex}"
    with aioflux.sync.open_store(uri, endpoint_url=url) as store:
        store.put("small", SMALL)
        store.put("large", LARGE)
    return uri


async def run(
    row: Row, faults: tuple[str, ...], uri: str, gateway: Gateway, retry: aioflux.RetryPolicy
) -> dict[str, Any]:
    """Run an operation on the two objects, and return the server's report of the faults."""
    timeouts = STALLED if any("stall" in fault for fault in faults) else TIMEOUTS
    options: Any = {"transfer": TRANSFER, "timeouts": TIMEOUTS, "endpoint_url": gateway.url}
    if row.operation not in READS:
        shared, uri = uri, f"gs://{BUCKET}/{uuid.uuid4().hex}"
        async with aioflux.open_store(f"gs://{BUCKET}", **options) as store:
            for name in ("small", "large"):
                source, target = (f"{each}/{name}" for each in (shared, uri))
                start = len(f"gs://{BUCKET}/")
                await store.copy(source[start:], target[start:])
    test_id = add_faults(gateway.upstream, row.operation, faults)
    gateway.headers = (f"x-retry-test-id: {test_id}".encode(),)
    try:
        async with aioflux.open_store(
            uri, retry=retry, **{**options, "timeouts": timeouts}
        ) as store:
            await row.run(store)
    finally:
        gateway.headers = ()
        report = send(f"{gateway.upstream}/retry_test/{test_id}")
    return report


def cases() -> Iterator[Any]:
    for row in ROWS:
        for faults in row.faults:
            name = faults[0] if len(faults) == 1 else "statuses"
            yield pytest.param(row, faults, id=f"{row}-{name}")


def test_what_a_server_does_not_know_is_skipped_and_nothing_is_left_open(url: str) -> None:
    """An open connection would be a ResourceWarning, and so an error, of a later test."""
    with pytest.raises(pytest.skip.Exception, match="does not know storage") as skipped:
        add_faults(url, GET, ("unheard-of",), may_skip=True)
    response = skipped.value.__context__
    assert isinstance(response, urllib.error.HTTPError)
    assert response.closed


@pytest.mark.parametrize(("row", "faults"), list(cases()))
async def test_retries_mend_faults(
    row: Row, faults: tuple[str, ...], uri: str, gateway: Gateway
) -> None:
    """The result is right, and every fault has happened."""
    report = await run(row, faults, uri, gateway, RETRY)
    assert report["completed"], f"not all were met: {report}"


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_a_fault_without_retries_is_a_typed_error(
    row: Row, uri: str, gateway: Gateway
) -> None:
    faults, retry = ("return-503",), aioflux.RetryPolicy(max_attempts=1)
    if row.run is delete_many:
        with pytest.raises(AssertionError):  # shown in its result
            await run(row, faults, uri, gateway, retry)
    elif row == CLEAN_UP:
        await run(row, faults, uri, gateway, retry)
    else:
        with pytest.raises(aioflux.StorageError) as failure:
            await run(row, faults, uri, gateway, retry)
        assert failure.value.uri.startswith("gs://")

"""A gateway that forwards a write, and still responds that the server is busy.

After such a status a write may have happened: it is not repeated, it is no error if it did happen,
and there are no leftovers.
"""

from __future__ import annotations

import http.client
import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

import pytest

import aioflux
from tests.servers.clouds import open_bucket
from tests.servers.statuses import AMBIGUOUS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import TracebackType

MIB = 1024 * 1024
RETRY = aioflux.RetryPolicy(initial_seconds=0.001, max_seconds=0.01)
TRANSFER = aioflux.TransferOptions(part_size_bytes=5 * MIB, max_buffered_bytes=5 * MIB)
SMALL, LARGE = b"what was sent", bytes(range(256)) * (6 * 4096)
LABELS = {"RunId": "7"}
_OWN = frozenset({"connection", "content-length", "transfer-encoding"})
"""Headers of a response that the gateway writes itself."""


class Forwarded(NamedTuple):
    """One request."""

    method: str
    path: str
    query: str
    headers: http.client.HTTPMessage


class BusyGateway:
    """A proxy in front of a server, on its own threads, for the length of a `with` block.

    Attributes:
        url: Root url.
        num_swapped: Responses that were replaced.
        on_swap: Called after a request whose response is replaced was carried out.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._swaps: list[tuple[Callable[[Forwarded], bool], int]] = []
        self.num_swapped = 0
        self.on_swap: Callable[[], object] = lambda: None
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                gateway.serve(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def swap(self, matches: Callable[[Forwarded], bool], *statuses: int) -> None:
        """Replace the next responses to matching requests, which are still carried out."""
        self._swaps += [(matches, status) for status in statuses]

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        request = Forwarded(handler.command, url.path, url.query, handler.headers)
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(self._upstream)
        connection.request(handler.command, handler.path, body, dict(handler.headers))
        response = connection.getresponse()
        data = response.read()
        connection.close()
        status, headers = response.status, response.getheaders()
        if self._swaps and response.status < 300 and self._swaps[0][0](request):
            self.num_swapped += 1
            self.on_swap()
            status, headers, data = self._swaps.pop(0)[1], [], b"busy"
        handler.send_response_only(status)
        is_head = handler.command == "HEAD"
        for name, value in headers:
            if name.lower() not in _OWN or (is_head and name.lower() == "content-length"):
                handler.send_header(name, value)
        if not is_head:
            handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def is_copy(request: Forwarded) -> bool:
    return "/rewriteTo/" in request.path or any(
        name in request.headers for name in ("x-amz-copy-source", "x-ms-copy-source")
    )


def is_put(request: Forwarded) -> bool:
    return request.method == "PUT" and not request.query and not is_copy(request)


def is_initiation(request: Forwarded) -> bool:
    return request.method == "POST" and request.query.startswith("uploads")


def is_completion(request: Forwarded) -> bool:
    is_block_list = request.method == "PUT" and "comp=blocklist" in request.query
    return is_block_list or (request.method == "POST" and "uploadId=" in request.query)


def is_compose(request: Forwarded) -> bool:
    return request.path.endswith("/compose")


def is_delete(request: Forwarded) -> bool:
    return request.method == "DELETE"


async def create(store: aioflux.Store) -> bytes:
    await store.put("new", SMALL, mode="create", metadata=LABELS)
    return SMALL


async def replace(store: aioflux.Store) -> bytes:
    meta = await store.put("new", b"old")
    await store.put("new", SMALL, if_generation_match=meta.generation)
    return SMALL


async def write(store: aioflux.Store) -> bytes:
    await store.put("new", LARGE)
    return LARGE


async def write_new(store: aioflux.Store) -> bytes:
    async with store.open_writer("new", mode="create", metadata=LABELS) as writer:
        await writer.write(LARGE)
    return LARGE


async def copy_new(store: aioflux.Store) -> bytes:
    await store.copy("old", "new", mode="create")
    return SMALL


async def compose_new(store: aioflux.Store) -> bytes:
    await store.compose("new", ["old", "old"], mode="create", metadata=LABELS)
    return SMALL * 2


async def append(store: aioflux.Store) -> bytes:
    await store.put("new", b"1")
    await store.compose("new", ["new", "old"])
    return b"1" + SMALL


async def delete(store: aioflux.Store) -> None:
    meta = await store.put("new", b"1")
    await store.delete(meta)


CASES: list[tuple[str, Callable[[aioflux.Store], Awaitable[bytes | None]], Any]] = [
    ("gs s3 az", create, is_put),
    ("gs s3 az", copy_new, is_copy),
    ("gs s3 az", write, is_completion),
    ("gs s3 az", write_new, is_completion),
    ("gs s3", write, is_initiation),
    ("gs s3", write_new, is_initiation),
    ("gs", write_new, is_compose),
    ("gs", compose_new, is_compose),
    ("gs", append, is_compose),
    ("gs s3 az", delete, is_delete),
]


@pytest.fixture
def bucket(
    cloud: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    with open_bucket(cloud, request, monkeypatch) as bucket:
        yield bucket


@pytest.fixture
def gateway(bucket: Any) -> Iterator[BusyGateway]:
    with BusyGateway(bucket.url) as gateway:
        yield gateway


@pytest.fixture
async def store(bucket: Any, gateway: BusyGateway) -> AsyncIterator[aioflux.Store]:
    async with aioflux.open_store(
        bucket.root, endpoint_url=gateway.url, retry=RETRY, transfer=TRANSFER
    ) as store:
        yield store


@pytest.mark.parametrize(
    ("cloud", "run", "matches", "status"),
    [
        pytest.param(
            cloud,
            run,
            matches,
            status,
            id=f"{cloud}-{run.__name__}-{matches.__name__[3:]}-{status}",
        )
        for clouds, run, matches in CASES
        for cloud in clouds.split()
        for status in (AMBIGUOUS if run is create else (429, 500))
    ],
    indirect=["cloud"],
)
async def test_a_write_that_was_done_is_not_an_error(
    bucket: Any,
    gateway: BusyGateway,
    store: aioflux.Store,
    run: Callable[[aioflux.Store], Awaitable[bytes | None]],
    matches: Callable[[Forwarded], bool],
    status: int,
) -> None:
    bucket.put("bucket", "old", SMALL)
    gateway.swap(matches, status)
    content = await run(store)
    assert gateway.num_swapped == 1
    if content is None:
        assert "new" not in bucket.keys("bucket")
    else:
        assert bucket.get("bucket", "new") == content
    if matches is is_initiation:  # an upload without parts stays open
        assert bucket.stats.open_uploads
        await store.clean(older_than_seconds=0)
    assert bucket.stats.open_uploads == 0
    assert not bucket.keys("bucket", ".aioflux")


CONDITIONAL: list[tuple[str, Callable[[aioflux.Store], Awaitable[bytes]], Any]] = [
    ("gs s3 az", create, is_put),
    ("gs s3 az", replace, is_put),
    ("gs s3 az", copy_new, is_copy),
    ("s3 az", write_new, is_completion),
    ("gs", write_new, is_compose),
    ("gs", compose_new, is_compose),
]


@pytest.mark.parametrize(
    ("cloud", "run", "matches"),
    [
        pytest.param(cloud, run, matches, id=f"{cloud}-{run.__name__}")
        for clouds, run, matches in CONDITIONAL
        for cloud in clouds.split()
    ],
    indirect=["cloud"],
)
async def test_a_write_that_was_done_and_replaced_may_have_been_done(
    bucket: Any,
    gateway: BusyGateway,
    store: aioflux.Store,
    run: Callable[[aioflux.Store], Awaitable[bytes]],
    matches: Callable[[Forwarded], bool],
) -> None:
    """Another writer replaces the object between the lost answer and the next attempt."""
    bucket.put("bucket", "old", SMALL)
    # `replace` writes an old object first.
    puts_before = itertools.count(1 if run is replace else 2)

    def is_probe(request: Forwarded) -> bool:
        return ".aioflux-uploads/" in request.path and run is not write_new

    def is_write(request: Forwarded) -> bool:
        return matches(request) and not is_probe(request) and next(puts_before) > 1

    gateway.swap(is_write, 500)
    gateway.on_swap = lambda: bucket.put("bucket", "new", b"another")
    with pytest.raises(aioflux.StorageError, match=r"written|carried out") as raised:
        await run(store)
    assert gateway.num_swapped == 1
    assert raised.value.maybe_done
    assert bucket.get("bucket", "new") == b"another"
    assert not bucket.keys("bucket", ".aioflux")

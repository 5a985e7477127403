"""CPU time of each step of a GET: variants of the same reads, each with one step more.

The first variant (`floor`) is a loop of `recv_into` on one open socket, the last is
`Store.get_many`. The variants run alternately in one process on one event loop. Each variant has
its own open connections. Each calls the interface of one package: heads of `_http`, `Pool`,
`Service`, `Session`, `Store`.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import aioflux
from aioflux import Timeouts
from aioflux._http import FixedHeaders, Origin, Pool
from aioflux._http.codec import encode_head, parse_head
from aioflux._services.base import ReadRequest
from aioflux._values.checksums import crc32c
from aioflux.store import sessions_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from aioflux._http import Response
    from aioflux._services.base import Service
    from aioflux._transfer.session import Session

__all__ = ["STEPS", "Reads", "measure"]

_HEADERS = [(b"Accept-Encoding", b"gzip"), (b"User-Agent", b"aioflux-ledger")]
_SPARE_BYTES = 4096
"""Maximum size of the head of a response."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """The reads of every variant."""

    url: str
    """Root url of the server, plain HTTP."""
    bucket: str
    """Bucket on the server."""
    size_bytes: int = 100 * 1024
    """Size of each object, in bytes."""
    num_objects: int = 3000
    """Requests of each variant in each round."""
    num_keys: int = 64
    """Number of different objects."""
    in_flight: int = 64
    """Requests in flight; the variant `floor` has one."""
    num_rounds: int = 7
    """Runs of each variant, in addition to one warm-up run."""

    def each_key(self) -> Iterator[str]:
        """Yield the key of each request of one run."""
        return (f"{self.size_bytes}/{index % self.num_keys}" for index in range(self.num_objects))

    def target(self, key: str) -> bytes:
        """Return the path of a key."""
        return f"/{self.bucket}/{key}".encode()


STEPS = {
    "floor": "recv_into on one warm socket, blocking",
    "kernel": "an event loop, a connection for each request in flight",
    "request head": "encoding the head of the request",
    "parse": "parsing the head of the response",
    "data plane": "Pool: framing, timeouts, memory for the body, idle connections",
    "plan": "GCSService: building the request, and checks of the response",
    "checksum": "crc32c of the body",
    "limiter": "Session: requests and bytes in flight, retries, counters",
    "hand-over": "Store.get_batches: prefetching, errors, lists of results",
    "consumer": "Store.get_many: one object at a time",
}
"""Description of each step."""


class _CallbackRun:
    """One run of a variant with callbacks: its connections read keys until all are read."""

    def __init__(self, reads: Reads) -> None:
        self.keys = reads.each_key()
        self.num_left = reads.num_objects
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def count_response(self) -> None:
        """Count one response; the last one completes the run."""
        self.num_left -= 1
        if not self.num_left and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """Complete the run with an error."""
        if not self.ended.done():
            self.ended.set_exception(error)


# --- without Pool --------------------------------------------------------------------------------


class Floor:
    """A blocking socket: one request after the other, bodies into the same memory."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._socket = socket.create_connection(_address(reads))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memoryview(bytearray(reads.size_bytes + _SPARE_BYTES))
        self._requests = {
            key: encode_head(b"GET", reads.target(key), _HEADERS, _host(reads))
            for key in set(reads.each_key())
        }

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    async def run(self) -> None:
        """Do one run."""
        sock, memory, requests = self._socket, self._memory, self._requests
        for key in self._reads.each_key():
            sock.sendall(requests[key])
            at = sock.recv_into(memory)
            length = _response_bytes(memory, at, self._reads)
            while at < length:
                count = sock.recv_into(memory[at:])
                if not count:
                    raise ConnectionError("the server closed the connection")
                at += count


class _Bare(asyncio.BufferedProtocol):
    """One connection of `Bare`; responses into the same memory."""

    def __init__(self, reads: Reads, *, encodes: bool, parses: bool) -> None:
        self._reads = reads
        self._encodes = encodes
        self._parses = parses
        self._memory = memoryview(bytearray(reads.size_bytes + _SPARE_BYTES))
        self._at = self._length = 0
        self._host = _host(reads)
        self._requests = {
            key: encode_head(b"GET", reads.target(key), _HEADERS, self._host)
            for key in set(reads.each_key())
        }
        self._run: _CallbackRun | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def start(self, run: _CallbackRun) -> None:
        """Request the next key, if there is one."""
        self._run = run
        key = next(run.keys, None)
        if key is None:
            return
        self._at = self._length = 0
        if self._encodes:
            self.transport.write(encode_head(b"GET", self._reads.target(key), _HEADERS, self._host))
        else:
            self.transport.write(self._requests[key])

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        assert self._run is not None
        is_first = not self._at
        self._at += nbytes
        try:
            if is_first:
                self._length = _response_bytes(self._memory, self._at, self._reads)
                if self._parses:
                    head_bytes = self._length - self._reads.size_bytes
                    parse_head(bytes(self._memory[:head_bytes]))
        except ValueError as exc:
            self._run.fail(exc)
            return
        if self._at >= self._length:
            self._run.count_response()
            self.start(self._run)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._run is not None:
            self._run.fail(ConnectionError("the server closed the connection"))


class Bare:
    """Connections of an event loop, one for each request in flight."""

    def __init__(self, reads: Reads, *, encodes: bool = False, parses: bool = False) -> None:
        self._reads = reads
        self._flags = {"encodes": encodes, "parses": parses}
        self._connections: list[_Bare] = []

    async def open(self) -> None:
        """Open the connections."""
        loop = asyncio.get_running_loop()
        host, port = _address(self._reads)
        for _ in range(self._reads.in_flight):
            _, connection = await loop.create_connection(
                lambda: _Bare(self._reads, **self._flags), host, port
            )
            self._connections.append(connection)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.transport.abort()

    async def run(self) -> None:
        """Do one run."""
        run = _CallbackRun(self._reads)
        for connection in self._connections:
            connection.start(run)
        await run.ended


def _address(reads: Reads) -> tuple[str, int]:
    parts = urlsplit(reads.url)
    return parts.hostname or "", parts.port or 80


def _host(reads: Reads) -> bytes:
    """Return the encoded Host header."""
    return b"Host: %b\r\n" % urlsplit(reads.url).netloc.encode()


def _response_bytes(memory: memoryview, num_bytes: int, reads: Reads) -> int:
    """Return the length of a response, from its first `num_bytes` bytes.

    Raises:
        ValueError: The status is not 200.
    """
    start = bytes(memory[: min(num_bytes, _SPARE_BYTES)])
    end = start.find(b"\r\n\r\n")
    if end < 0 or not start.startswith(b"HTTP/1.1 200 "):
        raise ValueError(f"not the object: {start[:200]!r}")
    return end + 4 + reads.size_bytes


# --- with Pool, Service and Session --------------------------------------------------------------


class _PoolReader:
    """Reads with `Pool.start_get`; receives each response as the ResponseFuture of its request."""

    def __init__(self, reads: Reads, pool: Pool, run: _CallbackRun) -> None:
        self._reads, self._pool, self._run = reads, pool, run
        self._origin = Origin.from_url(reads.url)
        self._fixed = FixedHeaders(_HEADERS)
        self._connection: Any = None

    def start(self) -> None:
        """Request the next key, if there is one."""
        key = next(self._run.keys, None)
        if key is None:
            return
        self._connection = self._pool.start_get(
            self._origin,
            self._reads.target(key),
            (),
            self,
            bytes,
            self._reads.size_bytes,
            self._fixed,
        )
        if self._connection is None:
            self._run.fail(RuntimeError("no connection is idle"))

    def done(self) -> bool:
        """See ResponseFuture."""
        return self._connection is None

    def set_exception(self, exception: Exception) -> None:
        """See ResponseFuture."""
        self._run.fail(exception)

    def set_result(self, result: Response) -> None:
        """See ResponseFuture."""
        connection, self._connection = self._connection, None
        connection.release()
        if result.num_bytes != self._reads.size_bytes:
            self._run.fail(ValueError(f"received {result.num_bytes} bytes"))
            return
        self._run.count_response()
        self.start()


class _ServiceReader:
    """Reads with `Service.begin_get`, with or without the checksum and the session's limits."""

    def __init__(
        self,
        reads: Reads,
        session: Session,
        run: _CallbackRun,
        *,
        verifies: bool,
        limits: bool,
    ) -> None:
        self._reads, self._session, self._run = reads, session, run
        self._service: Service = session.service
        self._verifies, self._limits = verifies, limits
        self._request, self._began = ReadRequest(""), 0.0
        self._exchange: Any = None

    def start(self) -> None:
        """Request the next key, if there is one."""
        key = next(self._run.keys, None)
        if key is None:
            return
        size = self._reads.size_bytes
        self._request = ReadRequest(key, "", 0, size)
        if self._limits and not self._session.admission.try_enter(size):
            self._run.fail(RuntimeError("the session's limits are exhausted"))
            return
        self._exchange = self._service.begin_get(self._request, self)
        if self._exchange is None:
            self._run.fail(RuntimeError("no connection is idle"))
        elif self._limits:
            self._began = self._session.admission.start()

    def done(self) -> bool:
        """See ResponseFuture."""
        return self._exchange is None

    def set_exception(self, exception: Exception) -> None:
        """See ResponseFuture."""
        self._run.fail(exception)

    def set_result(self, result: Response) -> None:
        """See ResponseFuture."""
        size, exchange, self._exchange = self._reads.size_bytes, self._exchange, None
        try:
            body = self._service.end_get(self._request, exchange, result)
        except aioflux.StorageError as exc:  # a callback has no caller that could handle it
            self._run.fail(exc)
            return
        if self._limits:
            self._session.admission.bytes.release(size)
            self._session.count_success(self._request.key, body, 0, self._began)
        if body is None or body.size != size:
            self._run.fail(ValueError("received another object"))
        elif self._verifies and crc32c(body.data) != body.crc32c:
            self._run.fail(ValueError("the bytes do not match their checksum"))
        else:
            self._run.count_response()
            self.start()


async def _run_readers(new: Callable[[_CallbackRun], Any], reads: Reads) -> None:
    run = _CallbackRun(reads)
    for _ in range(reads.in_flight):
        new(run).start()
    await run.ended


async def _run_batches(store: aioflux.Store, reads: Reads) -> None:
    num_bytes = 0
    async for batch in store.get_batches(reads.each_key(), ordered=False):
        for _, data in batch:
            num_bytes += len(data)
    _check(num_bytes, reads)


async def _run_many(store: aioflux.Store, reads: Reads) -> None:
    num_bytes = 0
    async for _, data in store.get_many(reads.each_key(), ordered=False):
        num_bytes += len(data)
    _check(num_bytes, reads)


def _check(num_bytes: int, reads: Reads) -> None:
    if num_bytes != reads.num_objects * reads.size_bytes:
        raise ValueError(f"received {num_bytes} bytes")


# --- the run -------------------------------------------------------------------------------------


async def _open(reads: Reads, stack: AsyncExitStack) -> dict[str, Callable[[], Awaitable[None]]]:
    """Open the connections of each variant, and return the functions that do one run of each."""
    floor, variants = Floor(reads), dict[str, Any]()
    stack.callback(floor.close)
    variants["floor"] = floor.run
    for name, flags in (
        ("kernel", {}),
        ("request head", {"encodes": True}),
        ("parse", {"encodes": True, "parses": True}),
    ):
        bare = Bare(reads, **flags)
        stack.callback(bare.close)
        await bare.open()
        variants[name] = bare.run
    pool = Pool(max_idle=reads.in_flight, timeouts=Timeouts())
    stack.push_async_callback(pool.aclose)
    origin, target = Origin.from_url(reads.url), reads.target(next(reads.each_key()))
    await asyncio.gather(
        *(pool.request(origin, b"GET", target, _HEADERS) for _ in range(reads.in_flight))
    )
    variants["data plane"] = lambda: _run_readers(lambda run: _PoolReader(reads, pool, run), reads)
    session = await _session(reads, stack)
    for name, verifies, limits in (
        ("plan", False, False),
        ("checksum", True, False),
        ("limiter", True, True),
    ):
        variants[name] = lambda verifies=verifies, limits=limits: _run_readers(
            lambda run: _ServiceReader(reads, session, run, verifies=verifies, limits=limits),
            reads,
        )
    for name, run in (("hand-over", _run_batches), ("consumer", _run_many)):
        store = await stack.enter_async_context(_store(reads))
        variants[name] = lambda run=run, store=store: run(store, reads)
    return variants


def _store(reads: Reads) -> aioflux.Store:
    transfer = aioflux.TransferOptions(max_in_flight=reads.in_flight)
    return aioflux.open_store(f"gs://{reads.bucket}", endpoint_url=reads.url, transfer=transfer)


async def _session(reads: Reads, stack: AsyncExitStack) -> Session:
    """Return the session of a store, with all connections open."""
    store = await stack.enter_async_context(_store(reads))
    session = sessions_of(store).current()
    key = next(reads.each_key())
    await asyncio.gather(*(session.service.get(ReadRequest(key)) for _ in range(reads.in_flight)))
    return session


async def measure(reads: Reads) -> dict[str, list[float]]:
    """Run all variants alternately; return the CPU seconds per object of each run."""
    async with AsyncExitStack() as stack:
        variants = await _open(reads, stack)
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(reads.num_rounds + 1):
            for name, run in variants.items():
                begun = time.process_time()
                await run()
                if number:  # the first round is the warm-up
                    taken[name].append((time.process_time() - begun) / reads.num_objects)
        return taken


def added(taken: dict[str, list[float]]) -> dict[str, float]:
    """Return the additional time of each variant over the previous one: medians over the runs."""
    names = list(taken)
    return {
        name: statistics.median(
            more - less for more, less in zip(taken[name], taken[before], strict=True)
        )
        for before, name in pairwise(names)
    }

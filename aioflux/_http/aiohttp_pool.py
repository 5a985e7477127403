"""A pool of connections through a proxy, over aiohttp.

It has the methods and guarantees of `Pool`, and passes the same tests, but is slower. One
difference: invalid chunked framing is reported as a lost connection, because aiohttp does so.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
from yarl import URL

from aioflux._http.body import (
    Buffer,
    Destination,
    HashedMemory,
    StreamedBody,
    as_destination,
    as_views,
    check_length,
    memory_for,
)
from aioflux._http.codec import MAX_HEAD_BYTES, Headers, ResponseHead, encode_head
from aioflux._http.connect import SocketTracker, certificate_error_text, default_context
from aioflux._http.connection import Response
from aioflux._http.errors import (
    CertificateError,
    ConnectError,
    ConnectionLostError,
    ProtocolError,
    StalledError,
    TransportError,
)
from aioflux._http.memory import BytesBuffer, new_buffer
from aioflux._http.request import (
    BODY_METHODS,
    RESENDABLE,
    FixedHeaders,
    check_headers,
    default_head_seconds,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from types import SimpleNamespace

    from aiohttp.abc import AbstractStreamWriter

    from aioflux._http.request import Origin
    from aioflux.options import Timeouts

__all__ = ["AiohttpPool"]

_SLICE_BYTES: Final = 256 * 1024
_READ_BYTES: Final = 512 * 1024
_NO_HEADERS: Final = FixedHeaders()
_WITH_URL: Final = (aiohttp.ClientResponseError, aiohttp.InvalidURL)
"""Errors whose text contains a whole url, which may contain a password or a token."""


class AiohttpPool:
    """A pool of connections of one aiohttp session, through a proxy or directly."""

    def __init__(
        self,
        *,
        max_connections: int,
        timeouts: Timeouts,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        """Initialize as `Pool`, with the url of a proxy, or None for direct connections."""
        if max_connections < 1:
            raise ValueError(f"max_connections must be above 0, not {max_connections!r}")
        self._max_connections = max_connections
        self._timeouts = timeouts
        self._ssl_context = ssl_context
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None
        self._sockets = SocketTracker()
        self._is_closed = False

    async def request(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        body: Sequence[Buffer] | Buffer | None = None,
        into: Destination | None = None,
        max_body_bytes: int | None = None,
        head_seconds: float | None = None,
        fixed: FixedHeaders = _NO_HEADERS,
    ) -> Response:
        """Send one request and receive its complete response; see `Pool.request`."""
        if self._is_closed:
            raise RuntimeError("the pool is closed")
        check_headers(headers)
        headers = (*fixed.items, *headers)
        encode_head(method, target, headers)
        if isinstance(into, HashedMemory):
            into = into.memory
        if isinstance(into, memoryview):
            into = as_destination(into)
        if head_seconds is None:
            head_seconds = default_head_seconds(method, self._timeouts)
        attempt = _Attempt(
            self._timeouts.progress_seconds, head_seconds, is_resendable=method in RESENDABLE
        )
        views = as_views(body)
        payload = _Payload(views, attempt) if views or method in BODY_METHODS else None
        try:
            async with (
                asyncio.timeout(None) as attempt.timeout,
                self._open_session().request(
                    method.decode(),
                    URL(origin.url + target.decode(), encoded=True),
                    headers=[(name.decode(), value.decode()) for name, value in headers],
                    data=payload,
                    allow_redirects=False,
                    trace_request_ctx=attempt,
                ) as response,
            ):
                return await self._receive(response, attempt, payload, into, max_body_bytes)
        except TransportError as exc:
            raise attempt.add_progress(exc) from exc.__cause__
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            cause = None if isinstance(exc, _WITH_URL) else exc
            raise attempt.add_progress(_map_error(exc, origin)) from cause
        finally:
            attempt.timeout = None

    def start_get(self, *_: object) -> None:
        """Return None: aiohttp needs a task for each request. See `Pool.start_get`."""

    async def aclose(self) -> None:
        """Fail all pending requests, and close every connection."""
        self._is_closed = True
        if self._session is not None:
            await self._sockets.aclose(self._session)

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session; the first call opens it."""
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_request_headers_sent.append(_headers_sent)
            trace.on_connection_create_start.append(_reject_resend)
            trace.on_connection_reuseconn.append(_reject_resend)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    limit_per_host=self._max_connections,
                    keepalive_timeout=self._timeouts.idle_seconds,
                    # aiohttp's default context reads the environment when aiohttp is imported.
                    ssl=self._ssl_context or default_context(),
                    socket_factory=self._sockets.create,
                ),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self._timeouts.connect_seconds
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                # `trust_env` would also send credentials of ~/.netrc.
                proxy=self._proxy,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                read_bufsize=_READ_BYTES,
                max_line_size=MAX_HEAD_BYTES,
                max_field_size=MAX_HEAD_BYTES,
                trace_configs=[trace],
            )
        return self._session

    async def _receive(
        self,
        response: aiohttp.ClientResponse,
        attempt: _Attempt,
        payload: _Payload | None,
        into: Destination | None,
        max_body_bytes: int | None,
    ) -> Response:
        """Receive the body of a response into its destination."""
        head = attempt.head = _head_of(response)
        attempt.on_progress()
        num_bytes = head.content_length
        if response.method == "HEAD" or head.status in (204, 304):
            num_bytes = 0
        has_destination = into is not None and into is not bytes
        buffer: BytesBuffer | None = None
        if num_bytes is not None and 200 <= head.status < 300:
            check_length(num_bytes, into, max_body_bytes)
            if into is bytes:
                buffer = BytesBuffer(num_bytes)
                into = buffer.view
            else:
                into = (
                    memoryview(new_buffer(num_bytes))
                    if into is None
                    else memory_for(into, num_bytes)
                )
        streamed = StreamedBody(
            status=head.status, chunked=False, into=into, max_body_bytes=max_body_bytes
        )
        async for data in response.content.iter_any():
            attempt.on_progress()
            try:
                streamed.feed(data, 0, len(data))
            finally:
                attempt.num_in_destination = streamed.num_in_destination if has_destination else 0
            if streamed.is_truncated:
                break
        if streamed.is_truncated or (payload is not None and not payload.is_sent):
            # Otherwise aiohttp releases the response after this block, and its writer continues to
            # read the caller's memory.
            response.close()
        body = streamed.finish() if buffer is None else buffer.finish()
        return Response(head.status, head.headers, body, streamed.num_bytes)


class _Attempt:
    """State of one request. Its deadline is extended whenever bytes are received or sent.

    Attributes:
        timeout: The `asyncio.timeout` of the request; None when the request is complete.
        head: Head of the response, if it was received.
        num_in_destination: Bytes of the body that were written to memory of the caller.
        is_sent: The server may have received the request.
        is_resendable: aiohttp may send the request again after its connection was lost.
    """

    def __init__(
        self, progress_seconds: float, head_seconds: float, *, is_resendable: bool
    ) -> None:
        self.timeout: asyncio.Timeout | None = None
        self.head: ResponseHead | None = None
        self.num_in_destination = 0
        self.is_sent = False
        self.is_resendable = is_resendable
        self._progress_seconds = progress_seconds
        self._head_seconds = head_seconds

    def on_progress(self) -> None:
        """Extend the deadline after bytes were received or sent."""
        self._set_deadline(self._progress_seconds)

    def on_sent(self) -> None:
        """Set the deadline for the response to start, after the request was sent."""
        self._set_deadline(self._head_seconds)

    def add_progress(self, error: TransportError) -> TransportError:
        """Set the fields of `error` that describe the progress, and return `error`."""
        error.head = self.head
        error.num_bytes_received = self.num_in_destination
        error.request_sent = self.is_sent
        return error

    def _set_deadline(self, seconds: float) -> None:
        self.is_sent = True
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time() + seconds)


class _Payload(aiohttp.payload.Payload):
    """A request body that is written from memory of the caller, slice by slice.

    Attributes:
        is_sent: The whole body was written to the transport.
    """

    def __init__(self, views: list[memoryview], attempt: _Attempt) -> None:
        super().__init__(views)
        self.is_sent = False
        self._views = views
        self._attempt = attempt
        self._size = sum(map(len, views))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the text of the body, as the base class requires."""
        return b"".join(self._views).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the slices, and wait after each until the buffer of the transport has drained."""
        for view in self._views:
            for start in range(0, len(view), _SLICE_BYTES):
                self._attempt.on_progress()
                await writer.write(view[start : start + _SLICE_BYTES])
        self.is_sent = True
        self._attempt.on_sent()

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        """Write the whole body: `content_length` is the length of the payload."""
        await self.write(writer)


async def _reject_resend(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: object
) -> None:
    """Raise before aiohttp sends a PUT or DELETE again after a lost connection."""
    attempt: _Attempt = context.trace_request_ctx
    if attempt.is_sent and not attempt.is_resendable:
        raise ConnectionLostError("the connection was lost, and the request cannot be sent again")


async def _headers_sent(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: object
) -> None:
    attempt: _Attempt = context.trace_request_ctx
    attempt.on_sent()


def _head_of(response: aiohttp.ClientResponse) -> ResponseHead:
    """Return the head of a response of aiohttp."""
    fields = Headers()
    for raw, value in response.raw_headers:
        name = raw.lower()
        fields[name] = fields[name] + b", " + value if name in fields else value
    minor = 1 if response.version is None else response.version.minor
    length = response.content_length
    coding = fields.get(b"transfer-encoding")
    keep_alive = fields.get(b"connection", b"").lower() != b"close"
    return ResponseHead(response.status, fields, minor, keep_alive, length, coding is not None)


def _map_error(exc: Exception, origin: Origin) -> TransportError:
    """Return the error of `_http` for an error of aiohttp."""
    server = origin.url
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        return CertificateError(certificate_error_text(server, exc.certificate_error))
    if isinstance(exc, aiohttp.ClientHttpProxyError):
        reason = " ".join(exc.message.split())[:100]
        return ConnectError(f"no connection to {server}: the proxy returned {exc.status} {reason}")
    if isinstance(exc, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return ConnectError(f"no connection to {server}: {exc}")
    if isinstance(exc, TimeoutError):
        return StalledError(f"the request to {server} made no progress within its timeout")
    if isinstance(exc, _WITH_URL):
        return ProtocolError(f"not a valid response from {server}: {type(exc).__name__}")
    return ConnectionLostError(f"the connection to {server} was lost: {exc}")

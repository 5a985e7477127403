"""Sender of the HTTP requests of one service: credentials, resends, errors.

    Sender.send: _authorize -> HTTP request -> success: return the response
                                            -> error: should_resend ? send again : raise

A subclass authorizes requests and maps the error codes of its service. `HTTPService.begin_get`
calls only `authorize_nowait`, and sends the request itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

from aioflux._auth.access_token import NOT_READY
from aioflux._auth.redaction import add_secret, redact, redact_error
from aioflux._http import (
    MAX_METADATA_BYTES,
    CertificateError,
    FixedHeaders,
    ProtocolError,
    ProxyRefusedError,
    TransportError,
)
from aioflux._services.base import ATTEMPT, Service
from aioflux._services.responses import PLAIN, Failure, RequestKind
from aioflux.errors import CredentialsError, StorageError, TransientError

if TYPE_CHECKING:
    from aioflux._auth.access_token import AnonymousToken, Identity, ProvidedToken, RenewedToken
    from aioflux._auth.aws import AWSSource
    from aioflux._auth.azure import AzureAccess
    from aioflux._http import Connection, Origin, Pool, Response

    TokenSource = AnonymousToken | ProvidedToken | RenewedToken

T = TypeVar("T")

_log = logging.getLogger("aioflux.requests")
"""Logs each request, at the level DEBUG."""

USER_AGENT: Final = (b"User-Agent", b"aioflux")
MAX_PAGE_BYTES: Final = 64 * 1024 * 1024
"""Largest body of a page of a listing: a few MiB for 5,000 objects, or 45 MiB if each has 8 KiB of
metadata, the limit of Cloud Storage (cloud.google.com/storage/quotas)."""

_MAX_HASHED_ON_LOOP_BYTES: Final = 256 * 1024
"""Larger bodies are hashed in a thread. A body of this size takes 0.2 ms (SHA-256) or 0.4 ms (MD5)
on the event loop."""


_READS: Final = frozenset({b"GET", b"HEAD"})
_MAX_SLOW: Final = 256


AuthorizedRequest: TypeAlias = (
    "tuple[Origin, bytes, Sequence[tuple[bytes, bytes]], FixedHeaders, Any]"
)
"""A request, ready to send: server; path and query; its own headers with the signature; the headers
that all requests have; and its credentials, which `should_resend` compares with the current ones.
A plain tuple, since each request creates one."""


class ErrorResponse(Protocol):
    """An error response to a request, or to one request of a batch."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Headers, names in lower case."""

    @property
    def body(self) -> Any:
        """Body."""


async def hash_body(algorithm: str, body: Any) -> bytes:
    """Return the digest of a body, computed in a thread if the body is large."""
    pieces = _pieces_of(body)

    def run() -> bytes:
        import hashlib

        digest = hashlib.new(algorithm, usedforsecurity=False)
        for piece in pieces:
            digest.update(piece)
        return digest.digest()

    size = sum(memoryview(piece).nbytes for piece in pieces)
    return run() if size <= _MAX_HASHED_ON_LOOP_BYTES else await asyncio.to_thread(run)


def _pieces_of(body: Any) -> Sequence[Any]:
    return body if isinstance(body, (list, tuple)) else (body,)


async def resolve_credentials(credentials: Awaitable[T], action: str, uri: str) -> T:
    """Await credentials, or the settings of their source, and add action and uri to errors.

    Settings are for example the endpoint and the region of S3.

    Raises:
        CredentialsError: There are no usable credentials.
        TransientError: The source of credentials is temporarily unavailable.
    """
    try:
        return await credentials
    except CredentialsError as exc:
        raise CredentialsError(f"could not {action} {uri}: {exc.message}") from exc
    except TransientError as exc:
        raise TransientError(f"could not {action} {uri}: {exc.message}", uri=uri) from exc


def as_read_error(error: StorageError) -> StorageError:
    """Set `maybe_done` of the error of a read to False, since a read changes no object."""
    error.maybe_done = False
    return error


def hide_proxy_credentials(pool: Pool) -> Pool:
    """Remove the credentials of a pool's proxy from texts of servers; return the pool."""
    if pool.proxy is not None:
        add_secret(pool.proxy.credentials.decode())
        add_secret(b64decode(pool.proxy.credentials).partition(b":")[2].decode("utf-8", "replace"))
    return pool


class Sender(ABC):
    """Sender of the requests to one bucket.

    Attributes:
        pool: Connection pool; None before the server is known.
    """

    _max_sends: ClassVar[int] = 2
    """Number of times that `send` may send one request."""
    _credentials: AWSSource | AzureAccess | TokenSource

    def __init__(self, uri: Callable[[str], str]) -> None:
        """Initialize with a function that returns the uri of a key, for error messages."""
        self._uri = uri
        self.pool: Pool | None = None

    async def send(
        self,
        method: bytes,
        target: bytes,
        action: str,
        key: str,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: Any = None,
        into: Any = None,
        max_body_bytes: int | None = MAX_METADATA_BYTES,
        accept: int = 0,
        head_seconds: float | None = None,
        kind: RequestKind = PLAIN,
    ) -> Response:
        """Send one request and return its response.

        After an error response the request is sent again if `should_resend` returns True, at most
        `_max_sends` times in all.

        Args:
            method: HTTP method.
            target: Path and query, percent-encoded.
            action: Verb of error messages: "could not {action} {uri}".
            key: Key of the object, for error messages.
            headers: Headers of this request only.
            body: Body of the request, as in `Pool.request`.
            into: Memory for the body of the response, as in `Pool.request`.
            max_body_bytes: Largest body of the response; None for no limit.
            accept: A status besides 2xx that is not an error; 0 for none.
            head_seconds: Time until the head of the response; None for the default.
            kind: Properties that change headers and errors.

        Raises:
            StorageError: The response is an error, or there is no response.
            CredentialsError: There are no usable credentials.
        """
        num_left = self._max_sends
        while True:
            origin, full_target, signed_headers, fixed, credentials = await self._authorize(
                method, target, headers, body, action, key, kind
            )
            pool = self.pool
            assert pool is not None
            try:
                request = pool.request(
                    origin,
                    method,
                    full_target,
                    signed_headers,
                    body=body,
                    into=into,
                    max_body_bytes=max_body_bytes,
                    head_seconds=head_seconds,
                    fixed=fixed,
                )
                if _log.isEnabledFor(logging.DEBUG):
                    request = self._log_request(request, method, key, body)
                response = await request
            except (RuntimeError, TransportError) as exc:
                error = self.transport_error(exc, action, key)
                raise (as_read_error(error) if method in _READS else error) from exc
            connection = response.connection
            if connection is not None and connection.slow_request == connection.num_requests:
                self.note_slow(key, connection)
            if 200 <= response.status < 300 or response.status == accept:
                return response
            num_left -= 1
            if not num_left or not self.should_resend(response, credentials):
                error = self.response_error(response, action, key, kind)
                raise as_read_error(error) if method in _READS else error

    async def _log_request(
        self, request: Coroutine[Any, Any, Response], method: bytes, key: str, body: Any
    ) -> Response:
        """Await the response of a request, and log a line without its query and headers."""
        started_at, outcome = time.monotonic(), "no complete response"
        num_bytes = sum(
            memoryview(piece).nbytes for piece in _pieces_of(() if body is None else body)
        )
        try:
            response = await request
            outcome, num_bytes = f"HTTP {response.status}", num_bytes or response.num_bytes
            return response
        finally:
            name, milliseconds = method.decode(), 1000 * (time.monotonic() - started_at)
            text = f"{outcome}, {num_bytes} bytes, {milliseconds:.1f} ms, attempt {ATTEMPT.get()}"
            _log.debug("%s %s: %s", name, self._uri(key), text)

    def note_slow(self, key: str, connection: Connection) -> None:
        """Store the longest phase of a slow request for the log."""
        if len(Service.slow_phases) >= _MAX_SLOW:  # of requests that were not logged
            Service.slow_phases.clear()
        Service.slow_phases[self._uri(key)] = connection.longest_phase

    @abstractmethod
    async def _authorize(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: Any,
        action: str,
        key: str,
        kind: RequestKind,
    ) -> AuthorizedRequest:
        """Return the authorized request; arguments as in `send`.

        Raises:
            CredentialsError: There are no usable credentials.
            TransientError: The source of credentials is temporarily unavailable.
        """

    @abstractmethod
    def authorize_nowait(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> AuthorizedRequest | None:
        """Return an authorized GET request; None if no valid credentials are available yet."""

    @abstractmethod
    def should_resend(self, response: Response, credentials: Any) -> bool:
        """Return whether to send a request again, for example with new credentials.

        Args:
            response: The error response.
            credentials: Credentials of the request, invalidated here if the service rejects them.
        """

    @abstractmethod
    def _generation_of(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the generation in the headers of a response; empty if there is none."""

    @abstractmethod
    def _parse_error(self, response: ErrorResponse) -> tuple[str, str]:
        """Return code and message of an error response; empty texts if it has none."""

    @abstractmethod
    def _service_error(self, failure: Failure) -> StorageError:
        """Map an error response to an error of this package."""

    def transport_error(self, exc: Exception, action: str, key: str) -> StorageError:
        """Map an error of the connection pool to a StorageError."""
        uri = self._uri(key)
        if not isinstance(exc, TransportError):
            return StorageError(f"could not {action} {uri}: the store was closed", uri=uri)
        exc.message = redact(redact_error(exc))
        message = f"could not {action} {uri}: {exc}"
        if isinstance(exc, CertificateError | ProxyRefusedError):
            return StorageError(message, uri=uri)
        if isinstance(exc, ProtocolError):
            # The whole response may be wrong, also the bytes of the body received so far.
            return TransientError(message, uri=uri, maybe_done=exc.request_sent, is_malformed=True)
        error = TransientError(
            message,
            uri=uri,
            num_bytes_received=exc.num_bytes_received,
            generation=self._generation_of(exc.head.headers) if exc.head else "",
            maybe_done=exc.request_sent,
            unconnected=exc.unconnected,
        )
        error.__cause__ = exc  # also for callers that do not raise it
        return error

    def response_error(
        self, response: ErrorResponse, action: str, key: str, kind: RequestKind = PLAIN
    ) -> StorageError:
        """Return the error for an error response, with the action and the uri in its text."""
        code, detail = self._parse_error(response)
        retry_after = response.headers.get(b"retry-after", b"").decode("latin-1")
        return self._service_error(
            Failure(response.status, action, self._uri(key), code, detail, retry_after, kind)
        )

    async def ping(self) -> Response:
        """Send `HEAD /` without credentials, once, and return the response, of any status.

        Raises:
            StorageError: There is no response.
        """
        origin, pool = await self.open_server()
        try:
            return await pool.request(origin, b"HEAD", b"/", fixed=FixedHeaders([USER_AGENT]))
        except (RuntimeError, TransportError) as exc:
            raise as_read_error(self.transport_error(exc, "reach the server of", "")) from exc

    @abstractmethod
    async def open_server(self) -> tuple[Origin, Pool]:
        """Return the server and the pool; the endpoint is found first if it is not known."""

    async def identity(self) -> Identity:
        """Return the identity of the credentials. Raises errors as `resolve_credentials`."""
        return await resolve_credentials(self._credentials.identity(), "use", self._uri(""))

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections and the source of credentials."""


class TokenSender(Sender):
    """Sender of requests to one server, with an access token if there is one."""

    def __init__(
        self,
        token: TokenSource,
        pool: Pool,
        origin: Origin,
        uri: Callable[[str], str],
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Initialize; all requests have `headers`."""
        super().__init__(uri)
        self._common = (USER_AGENT, *headers)
        self._credentials = self._token = token
        self.pool: Pool = hide_proxy_credentials(pool)
        self._origin = origin
        self._encoded_token: str | None = None
        self._headers, self._read_headers = self._encode_headers(None)

    @abstractmethod
    def _encode_headers(self, token: str | None) -> tuple[FixedHeaders, FixedHeaders]:
        """Encode the headers that all requests have, and the headers that all reads have."""

    async def _authorize(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: Any,
        action: str,
        key: str,
        kind: RequestKind,
    ) -> AuthorizedRequest:
        token = self._token.get_nowait()
        if token is NOT_READY:
            token = await resolve_credentials(self._token.get(), action, self._uri(key))
        if token != self._encoded_token:
            self._set_token(token)
        fixed = self._read_headers if kind.is_read else self._headers
        return self._origin, target, headers, fixed, token

    def authorize_nowait(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> AuthorizedRequest | None:
        token = self._token.get_nowait()
        if token is NOT_READY:
            return None
        if token != self._encoded_token:
            self._set_token(token)
        return self._origin, target, headers, self._read_headers, token

    async def open_server(self) -> tuple[Origin, Pool]:
        return self._origin, self.pool

    async def ensure_token(self, action: str, key: str) -> str | None:
        """Wait for a valid token, set it for the next requests, and return it."""
        await TokenSender._authorize(self, b"", b"", (), None, action, key, PLAIN)
        return self._encoded_token

    def should_resend(self, response: ErrorResponse, credentials: str | None) -> bool:
        if response.status != 401 or credentials is None:
            return False
        self._token.invalidate(credentials)
        return True

    def _set_token(self, token: str | None) -> None:
        """Encode the common headers of requests with a new token."""
        self._headers, self._read_headers = self._encode_headers(token)
        self._encoded_token = token

    async def aclose(self) -> None:
        await self.pool.aclose()
        await self._token.close()

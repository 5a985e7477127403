"""Requests to one bucket: authorized, sent again after some errors, errors mapped.

    service -> Sender.send: authorize -> HTTP request -> response, or an error response
                                                         -> should_resend -> send again, or raise

A subclass authorizes requests and maps the error codes of its service. A service that reads
without a task calls `authorize_nowait`, and sends the request itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from aioflux._auth.access_token import NOT_READY
from aioflux._http import CertificateError, FixedHeaders, ProtocolError, TransportError
from aioflux.errors import CredentialsError, StorageError, TransientError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from aioflux._auth.access_token import AnonymousToken, ProvidedToken, RenewedToken
    from aioflux._http import Origin, RequestPool, Response

    TokenSource = AnonymousToken | ProvidedToken | RenewedToken

__all__ = [
    "CONDITIONAL",
    "PLAIN",
    "READ",
    "USER_AGENT",
    "AuthorizedRequest",
    "ErrorResponse",
    "RequestKind",
    "Sender",
    "TokenSender",
    "as_read",
    "hash_body",
    "name_errors",
]

T = TypeVar("T")

USER_AGENT: Final = (b"User-Agent", b"aioflux")
_MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024
"""Largest response that is not an object: a page of 5,000 objects has a few MiB, at most 45,
since the metadata of each is limited to 8 KiB (cloud.google.com/storage/quotas)."""


_HASHED_ON_LOOP_BYTES: Final = 256 * 1024
"""Bodies up to this size are hashed on the event loop: 0.2 ms by SHA-256, 0.4 by MD5."""


class RequestKind(NamedTuple):
    """Properties of a request on which its headers and its errors depend."""

    is_read: bool = False
    """It reads the bytes of an object, as they are stored."""
    generation: str = ""
    """It is a read of this generation."""
    is_conditional: bool = False
    """It is a write with a condition."""
    is_completion: bool = False
    """It completes an upload."""


PLAIN: Final = RequestKind()
READ: Final = RequestKind(is_read=True)
CONDITIONAL: Final = RequestKind(is_conditional=True)
_READS: Final = frozenset({b"GET", b"HEAD"})


AuthorizedRequest: TypeAlias = (
    "tuple[Origin, bytes, Sequence[tuple[bytes, bytes]], FixedHeaders, Any]"
)
"""A request as it is sent: server, whole path and query, its own headers with the signature, the
headers of all requests, and its credentials, which may have been replaced when an error response
arrives. A plain tuple, since each request makes one."""


class ErrorResponse(Protocol):
    """An error response, or a part with an error in the response to a batch."""

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
    """Return the digest of a body, computed in a thread if that takes long."""
    pieces = body if isinstance(body, (list, tuple)) else (body,)

    def run() -> bytes:
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for piece in pieces:
            digest.update(piece)
        return digest.digest()

    size = sum(memoryview(piece).nbytes for piece in pieces)
    return run() if size <= _HASHED_ON_LOOP_BYTES else await asyncio.to_thread(run)


async def name_errors(found: Awaitable[T], action: str, uri: str) -> T:
    """Await credentials or settings; errors name the action and the object.

    Raises:
        CredentialsError: There are no usable credentials.
        TransientError: They are temporarily unavailable.
    """
    try:
        return await found
    except CredentialsError as exc:
        raise CredentialsError(f"could not {action} {uri}: {exc.message}") from exc
    except TransientError as exc:
        raise TransientError(f"could not {action} {uri}: {exc.message}", uri=uri) from exc


def as_read(error: StorageError) -> StorageError:
    """Mark the error of a read: it changed nothing."""
    if isinstance(error, TransientError):
        error.maybe_done = False
    return error


class Sender(ABC):
    """Requests to one bucket.

    Attributes:
        pool: Sends requests; None before the server is known.
    """

    _num_sends: ClassVar[int] = 2
    """Most times that one request is sent."""

    def __init__(self, uri: Callable[[str], str]) -> None:
        """Initialize with a function that returns the whole uri of a key, for errors."""
        self._uri = uri
        self.pool: RequestPool | None = None

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
        max_body_bytes: int | None = _MAX_RESPONSE_BYTES,
        accept: int = 0,
        head_seconds: float | None = None,
        kind: RequestKind = PLAIN,
    ) -> Response:
        """Send one request, again if `should_resend` says so, and return its response.

        Args:
            method: HTTP method.
            target: Path and query, percent-encoded.
            action: Verb for errors: "could not {action} {uri}".
            key: Key for errors.
            headers: Headers of this request alone.
            body: See `Pool.request`, as for `into`, `max_body_bytes` and `head_seconds`.
            into: Memory for the body of the response.
            max_body_bytes: Largest body of a response.
            accept: A status besides 2xx that is not an error.
            head_seconds: Time until the head of the response.
            kind: Properties on which headers and errors depend.

        Raises:
            StorageError: There is no response, or it is an error.
            CredentialsError: There are no usable credentials.
        """
        num_left = self._num_sends
        while True:
            origin, whole, signed, fixed, credentials = await self._authorize(
                method, target, headers, body, action, key, kind
            )
            pool = self.pool
            assert pool is not None
            try:
                response = await pool.request(
                    origin,
                    method,
                    whole,
                    signed,
                    body=body,
                    into=into,
                    max_body_bytes=max_body_bytes,
                    head_seconds=head_seconds,
                    fixed=fixed,
                )
            except (RuntimeError, TransportError) as exc:
                error = self.transport_error(exc, action, key)
                raise (as_read(error) if method in _READS else error) from exc
            if 200 <= response.status < 300 or response.status == accept:
                return response
            num_left -= 1
            if not num_left or not self.should_resend(response, credentials):
                error = self.response_error(response, action, key, kind)
                raise as_read(error) if method in _READS else error

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
            TransientError: They are temporarily unavailable.
        """

    @abstractmethod
    def authorize_nowait(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> AuthorizedRequest | None:
        """Return an authorized read; None if credentials have to be found or renewed first."""

    @abstractmethod
    def should_resend(self, response: Response, credentials: Any) -> bool:
        """Return whether to send a request again, for example with new credentials.

        Args:
            response: The error response.
            credentials: Credentials of the request; invalidated if they are no longer valid.
        """

    @abstractmethod
    def _generation_of(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the generation in the head of a response; empty if there is none."""

    @abstractmethod
    def _service_error(
        self,
        response: ErrorResponse,
        kind: RequestKind,
        *,
        action: str,
        uri: str,
        retry_after: str | None,
    ) -> StorageError:
        """Map an error response of the service to an error of this package."""

    def transport_error(self, exc: Exception, action: str, key: str) -> StorageError:
        """Map an error of the connection pool to a StorageError."""
        uri = self._uri(key)
        if not isinstance(exc, TransportError):
            return StorageError(f"could not {action} {uri}: the store was closed", uri=uri)
        message = f"could not {action} {uri}: {exc}"
        if isinstance(exc, CertificateError):
            return StorageError(message, uri=uri)
        if isinstance(exc, ProtocolError):
            # No part of the response is trusted, including the body received so far.
            return TransientError(message, uri=uri, maybe_done=exc.request_sent, is_malformed=True)
        return TransientError(
            message,
            uri=uri,
            num_bytes_received=exc.num_bytes_received,
            generation=self._generation_of(exc.head.headers) if exc.head else "",
            maybe_done=exc.request_sent,
        )

    def response_error(
        self, response: ErrorResponse, action: str, key: str, kind: RequestKind = PLAIN
    ) -> StorageError:
        """Map an error response to an error that names the action and the object."""
        retry_after = response.headers.get(b"retry-after")
        return self._service_error(
            response,
            kind,
            action=action,
            uri=self._uri(key),
            retry_after=retry_after.decode("latin-1") if retry_after else None,
        )

    @abstractmethod
    async def aclose(self) -> None:
        """Close connections and the source of credentials."""


class TokenSender(Sender):
    """Requests to one server, most of them with an access token."""

    def __init__(
        self, token: TokenSource, pool: RequestPool, origin: Origin, uri: Callable[[str], str]
    ) -> None:
        super().__init__(uri)
        self._token = token
        self.pool: RequestPool = pool
        self._origin = origin
        self._fixed_token: str | None = None
        self._fixed, self._fixed_for_reads = self._fix(None)

    @abstractmethod
    def _fix(self, token: str | None) -> tuple[FixedHeaders, FixedHeaders]:
        """Return the headers of all requests, and of all reads, with a token."""

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
            token = await name_errors(self._token.get(), action, self._uri(key))
        if token != self._fixed_token:
            self._use(token)
        fixed = self._fixed_for_reads if kind.is_read else self._fixed
        return self._origin, target, headers, fixed, token

    def authorize_nowait(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> AuthorizedRequest | None:
        token = self._token.get_nowait()
        if token is NOT_READY:
            return None
        if token != self._fixed_token:
            self._use(token)
        return self._origin, target, headers, self._fixed_for_reads, token

    async def make_ready(self, action: str, key: str) -> str | None:
        """Wait for a token, use it for the next requests, and return it."""
        await TokenSender._authorize(self, b"", b"", (), None, action, key, PLAIN)
        return self._fixed_token

    def should_resend(self, response: ErrorResponse, credentials: str | None) -> bool:
        if response.status != 401 or credentials is None:
            return False
        self._token.invalidate(credentials)
        return True

    def _use(self, token: str | None) -> None:
        """Encode the headers of all requests with a new token."""
        self._fixed, self._fixed_for_reads = self._fix(token)
        self._fixed_token = token

    async def aclose(self) -> None:
        await self.pool.aclose()
        await self._token.close()

"""Sending requests to one bucket: authorized, asked again where that helps, errors mapped to ours.

    service -> Sender.send: authorize -> data plane -> answer, or a refusal from which to learn once

A subclass says how requests are authorized, what is to be learned from a refusal, and what its
codes mean. Reads without a task go the same way in two halves: `begin`, and `end` for the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias

from aioflux._auth.access_token import NOT_READY
from aioflux._http import CertificateError, FixedHeaders, ProtocolError, TransportError
from aioflux.errors import StorageError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aioflux._auth.access_token import AnonymousToken, ProvidedToken, RenewedToken
    from aioflux._http import Connection, Origin, RequestPool, Response, ResponseFuture

    TokenSource = AnonymousToken | ProvidedToken | RenewedToken

__all__ = [
    "CONDITIONAL",
    "PLAIN",
    "READ",
    "USER_AGENT",
    "Answer",
    "Call",
    "Sender",
    "Terms",
    "TokenSender",
    "as_read",
]

USER_AGENT: Final = (b"User-Agent", b"aioflux")
_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
"""Longest answer that is not an object: a page of 5,000 objects has a few MiB, and 45 at most, the
metadata of each being limited to 8 KiB (cloud.google.com/storage/quotas)."""


class Terms(NamedTuple):
    """What a request was, as far as its headers and its errors depend on it."""

    is_read: bool = False
    """The bytes of an object are wanted, as they are stored."""
    generation: str = ""
    """A read is pinned to this generation."""
    is_conditional: bool = False
    """A write under a condition."""
    is_completion: bool = False
    """The completion of an upload."""


PLAIN: Final = Terms()
READ: Final = Terms(is_read=True)
CONDITIONAL: Final = Terms(is_conditional=True)
_READS: Final = frozenset({b"GET", b"HEAD"})


Call: TypeAlias = "tuple[Origin, bytes, Sequence[tuple[bytes, bytes]], FixedHeaders, Any]"
"""A request that may be sent: where to, whole path and query, its own headers with its signature,
those that it shares with others, and what authorized it: a refusal speaks of that, whatever is in
use by then. A bare tuple, since every request makes one."""


class Answer(Protocol):
    """What a refusal is read from."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Headers, names in lower case."""

    @property
    def body(self) -> Any:
        """Body."""


def as_read(error: StorageError) -> StorageError:
    """Note on the error of a read that nothing can have been changed by it."""
    if isinstance(error, TransientError):
        error.maybe_done = False
    return error


class Sender(ABC):
    """Requests to one bucket."""

    _num_sends: ClassVar[int] = 2
    """Times that one request is sent, at most."""

    def __init__(self, uri: Callable[[str], str]) -> None:
        """Take what returns the whole uri of a key, for errors."""
        self._uri = uri
        self._pool: RequestPool | None = None
        # What authorized each read that was started without a task.
        self._started: dict[Connection, tuple[Origin, Any]] = {}

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
        max_body_bytes: int | None = _MAX_ANSWER_BYTES,
        accept: int = 0,
        head_seconds: float | None = None,
        terms: Terms = PLAIN,
    ) -> Response:
        """Send one request and return its answer; again, where a refusal tells how to ask better.

        Args:
            method: Method.
            target: Path and query, percent-encoded.
            action: What is asked, as a verb; errors say it.
            key: Of what.
            headers: Headers of this request alone.
            body: See `Pool.request`, as for `into`, `max_body_bytes` and `head_seconds`.
            into: Where the answer goes.
            max_body_bytes: Longest answer that is taken.
            accept: A status beside 2xx that is an answer.
            head_seconds: Time for the answer to begin.
            terms: What it is beside that.

        Raises:
            StorageError: There is no answer, or it is a refusal.
            CredentialsError: There are no usable credentials.
        """
        num_left = self._num_sends
        while True:
            origin, whole, signed, fixed, signer = await self._authorize(
                method, target, headers, body, action, key, terms
            )
            pool = self._pool
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
                error = self.failed(exc, action, key)
                raise (as_read(error) if method in _READS else error) from exc
            if 200 <= response.status < 300 or response.status == accept:
                return response
            num_left -= 1
            if not num_left or not self.learn(response, signer):
                error = self.refused(response, action, key, terms)
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
        terms: Terms,
    ) -> Call:
        """Return a request as it is sent; the arguments are those of `send`.

        Raises:
            CredentialsError: There are no usable credentials.
            TransientError: There are none this time.
        """

    @abstractmethod
    def learn(self, response: Response, signer: Any) -> bool:
        """Learn from a refusal how to ask better, and tell whether there was something to learn.

        Args:
            response: The refusal.
            signer: What authorized the request.
        """

    def start_read(
        self,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        future: ResponseFuture,
        *,
        max_body_bytes: int,
    ) -> Connection | None:
        """Start a GET without a task; None if it cannot be authorized or sent at once.

        Raises:
            ValueError: The request cannot be encoded.
        """
        call = self._authorize_nowait(target, headers)
        pool = self._pool
        if call is None or pool is None:
            return None
        origin, whole, signed, fixed, signer = call
        connection = pool.start_get(
            origin, whole, signed, future, into=bytes, max_body_bytes=max_body_bytes, fixed=fixed
        )
        if connection is not None:
            self._started[connection] = origin, signer
        return connection

    def finish_read(self, connection: Connection) -> Any:
        """Release the connection of a started read, and return what authorized it."""
        origin, signer = self._started.pop(connection)
        assert self._pool is not None
        self._pool.release(origin, connection)
        return signer

    @abstractmethod
    def _authorize_nowait(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> Call | None:
        """Return a read as it is sent; None if credentials have to be found or renewed first."""

    @abstractmethod
    def _generation_of(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the generation that the head of an answer tells; empty where it does not."""

    @abstractmethod
    def _refusal(
        self, response: Answer, terms: Terms, *, action: str, uri: str, retry_after: str | None
    ) -> StorageError:
        """Return our error for an answer that is no success."""

    def failed(self, exc: Exception, action: str, key: str) -> StorageError:
        """Return our error for one of the data plane; the one place where they are mapped."""
        uri = self._uri(key)
        if not isinstance(exc, TransportError):
            return StorageError(f"could not {action} {uri}: the store was closed", uri=uri)
        message = f"could not {action} {uri}: {exc}"
        if isinstance(exc, CertificateError):
            return StorageError(message, uri=uri)
        if isinstance(exc, ProtocolError):
            # Nothing that the answer carries is to be trusted, the part of its body included.
            return TransientError(message, uri=uri, maybe_done=exc.request_sent, is_malformed=True)
        return TransientError(
            message,
            uri=uri,
            num_bytes_received=exc.num_bytes_received,
            generation=self._generation_of(exc.head.headers) if exc.head else "",
            maybe_done=exc.request_sent,
        )

    def refused(
        self, response: Answer, action: str, key: str, terms: Terms = PLAIN
    ) -> StorageError:
        """Return our error for an answer that is no success."""
        told = response.headers.get(b"retry-after")
        return self._refusal(
            response,
            terms,
            action=action,
            uri=self._uri(key),
            retry_after=told.decode("latin-1") if told else None,
        )

    @abstractmethod
    async def aclose(self) -> None:
        """Close connections and what finds credentials."""


class TokenSender(Sender):
    """Requests to one server, most of them with an access token."""

    def __init__(
        self, token: TokenSource, pool: RequestPool, origin: Origin, uri: Callable[[str], str]
    ) -> None:
        """Take how requests are authorized and sent.

        Args:
            token: Gives access tokens, or none.
            pool: Sends requests.
            origin: Where to.
            uri: Returns the whole uri of a key, for errors.
        """
        super().__init__(uri)
        self._token = token
        self._pool: RequestPool = pool
        self._origin = origin
        self._fixed_token: str | None = None
        self._fixed, self._fixed_for_reads = self._fix(None)

    @abstractmethod
    def _fix(self, token: str | None) -> tuple[FixedHeaders, FixedHeaders]:
        """Return the headers that all requests, and all reads, have in common with a token."""

    @abstractmethod
    async def _await_token(self, action: str, key: str) -> str | None:
        """Wait for a token; errors tell what for."""

    def _sign(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: Any,
    ) -> tuple[bytes, Sequence[tuple[bytes, bytes]]]:
        """Return target and headers with what authorizes this request alone."""
        return target, headers

    async def _authorize(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: Any,
        action: str,
        key: str,
        terms: Terms,
    ) -> Call:
        token = self._token.get_nowait()
        if token is NOT_READY:
            token = await self._await_token(action, key)
        return self._call(method, target, headers, body, token, is_read=terms.is_read)

    def _authorize_nowait(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> Call | None:
        token = self._token.get_nowait()
        if token is NOT_READY:
            return None
        return self._call(b"GET", target, headers, None, token, is_read=True)

    def _call(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: Any,
        token: str | None,
        *,
        is_read: bool,
    ) -> Call:
        if token != self._fixed_token:
            self._use(token)
        target, headers = self._sign(method, target, headers, body)
        fixed = self._fixed_for_reads if is_read else self._fixed
        return self._origin, target, headers, fixed, token

    async def make_ready(self, action: str, key: str) -> str | None:
        """Have a token, and return it, for what is signed ahead of the request it travels in."""
        token = self._token.get_nowait()
        self._use(await self._await_token(action, key) if token is NOT_READY else token)
        return self._fixed_token

    def learn(self, response: Answer, signer: str | None) -> bool:
        if response.status != 401 or signer is None:
            return False
        self._token.invalidate(signer)
        return True

    def _use(self, token: str | None) -> None:
        """Encode the headers that requests have in common, anew with each new token."""
        self._fixed, self._fixed_for_reads = self._fix(token)
        self._fixed_token = token

    async def aclose(self) -> None:
        await self._pool.aclose()
        await self._token.close()

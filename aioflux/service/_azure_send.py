"""Requests to one container: authorized, sent, and what went wrong with them as errors of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from aioflux._errors import CredentialsError, StorageError, TransientError
from aioflux.auth._azure import is_sas
from aioflux.auth._provided import WAIT
from aioflux.http import CertificateError, FixedHeaders, ProtocolError, TransportError
from aioflux.service import _azure_wire as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aioflux.auth._azure import AzureAccess
    from aioflux.http import Connection, Origin, RequestPool, Response, Waiter
    from aioflux.service._azure_batch import SubAnswer

__all__ = ["Sender"]

_USER_AGENT = (b"User-Agent", b"aioflux")
_VERSION = (b"x-ms-version", wire.VERSION)
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Longest answer that is not an object: a page of 5,000 blobs has 5 MiB, and 45 at most, the
metadata of each being limited to 8 KiB."""


class Sender:
    """Sends requests to one container."""

    def __init__(
        self,
        access: AzureAccess,
        pool: RequestPool,
        origin: Origin,
        *,
        uri: Callable[[str], str],
    ) -> None:
        """Take how requests are authorized and sent.

        Args:
            access: Key, SAS token or access token.
            pool: Sends them.
            origin: Where to.
            uri: Returns the whole uri of a key, for errors.
        """
        self._access = access
        self._token = access.token
        self._pool = pool
        self._origin = origin
        self._uri = uri
        self._sas = access.sas.encode()
        self._fixed_token: str | None
        self._fix_headers(None)

    async def send(
        self,
        method: bytes,
        path: bytes,
        action: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: Any = None,
        into: Any = None,
        max_body_bytes: int | None = _MAX_ANSWER_BYTES,
        accept: int = 0,
        head_seconds: float | None = None,
        is_conditional: bool = False,
    ) -> Response:
        """Send one request; with another token once more, where the service refuses the first.

        Args:
            method: Method.
            path: Path, encoded.
            action: What is asked, as a verb; errors say it.
            key: Of what.
            query: Parameters, not encoded.
            headers: Headers of this request alone.
            body: See `Pool.request`, as for `into`, `max_body_bytes` and `head_seconds`.
            into: Where the answer goes.
            max_body_bytes: Longest answer that is taken.
            accept: A status beside 2xx that is an answer.
            head_seconds: Time for the answer to begin.
            is_conditional: It is to change the object only in a generation.
        """
        is_again = False
        while True:
            token = self._token.ready()
            if token is WAIT:
                token = await self._await_token(action, key)
            if token != self._fixed_token:
                self._fix_headers(token)
            pairs = urlencode(query, quote_via=quote).encode() if query else b""
            parameters = b"&".join(filter(None, (pairs, self._sas)))
            try:
                response = await self._pool.request(
                    self._origin,
                    method,
                    b"%b?%b" % (path, parameters) if parameters else path,
                    self._signed(method, path, query or {}, headers, body),
                    body=body,
                    into=into,
                    max_body_bytes=max_body_bytes,
                    head_seconds=head_seconds,
                    fixed=self._fixed,
                )
            except (RuntimeError, TransportError) as exc:
                raise self.failed(exc, action, key) from exc
            if response.status != 401 or token is None or is_again:
                break
            self._token.refuse(token)
            is_again = True
        if 200 <= response.status < 300 or response.status == accept:
            return response
        raise self.refused(response, action, key, is_conditional=is_conditional)

    def _signed(
        self,
        method: bytes,
        path: bytes,
        query: Mapping[str, str],
        headers: Sequence[tuple[bytes, bytes]],
        body: Any,
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers of a request with its signature, where an account key signs."""
        if self._access.key is None:
            return headers
        pieces = () if body is None else body if isinstance(body, (list, tuple)) else (body,)
        num_bytes = sum(memoryview(piece).nbytes for piece in pieces)
        signed = (_VERSION, *headers)
        return [
            *headers,
            *self._access.key.sign(method, path, query, signed, num_bytes=num_bytes),
        ]

    async def _await_token(self, action: str, key: str) -> str | None:
        uri = self._uri(key)
        try:
            return await self._token.get()
        except CredentialsError as exc:
            raise CredentialsError(f"could not {action} {uri}: {exc}") from exc
        except TransientError as exc:
            raise TransientError(f"could not {action} {uri}: {exc}", uri=uri) from exc

    def _fix_headers(self, token: str | None) -> None:
        """Encode the headers that requests have in common; anew with each new token."""
        headers = [_USER_AGENT, _VERSION]
        self._fixed_token = token
        if token is not None and is_sas(token):
            self._sas = token.removeprefix("?").encode()
        elif token is not None:
            self._sas = b""
            headers.append((b"Authorization", b"Bearer " + token.encode()))
        self._fixed = FixedHeaders(headers)

    def failed(self, exc: Exception, action: str, key: str) -> StorageError:
        """Return our error for one of the data plane; the one place where they are mapped."""
        uri = self._uri(key)
        if not isinstance(exc, TransportError):
            return StorageError(f"could not {action} {uri}: the store was closed", uri=uri)
        message = f"could not {action} {uri}: {exc}"
        if isinstance(exc, (ProtocolError, CertificateError)):
            return StorageError(message, uri=uri)
        return TransientError(
            message,
            uri=uri,
            num_bytes_received=exc.num_bytes_received,
            generation=wire.etag_of(exc.head.headers) if exc.head else "",
            maybe_done=exc.request_sent,
        )

    def refused(
        self, response: Response | SubAnswer, action: str, key: str, *, is_conditional: bool = False
    ) -> StorageError:
        code, detail = wire.parse_error(response.headers, response.body)
        retry_after = response.headers.get(b"retry-after")
        return wire.error_of(
            response.status,
            action=action,
            uri=self._uri(key),
            code=code,
            detail=detail,
            retry_after=retry_after.decode("latin-1") if retry_after else None,
            is_conditional=is_conditional,
        )

    def begin(
        self, path: bytes, headers: Sequence[tuple[bytes, bytes]], waiter: Waiter, *, end: int
    ) -> Connection | None:
        """Begin a GET of `end` bytes at most without a task; None where that cannot be done."""
        token = self._token.ready()
        if token is WAIT:
            return None
        if token != self._fixed_token:
            self._fix_headers(token)
        fields = self._fixed.encoded
        for line in self._signed(b"GET", path, {}, headers, None):
            fields += b"%b: %b\r\n" % line
        target = self.with_sas(path)
        return self._pool.start(
            self._origin, target, fields, waiter, into=bytes, max_body_bytes=end
        )

    def end(self, exchange: Connection) -> None:
        """Take back what `begin` gave out."""
        self._pool.end(self._origin, exchange)

    def refuse_token(self) -> None:
        """Take note that the service refused the token in use."""
        if self._fixed_token is not None:
            self._token.refuse(self._fixed_token)

    def with_sas(self, url: bytes) -> bytes:
        """Return a url that the SAS token authorizes, where there is one."""
        return b"%b?%b" % (url, self._sas) if self._sas else url

    def sign(
        self, method: bytes, path: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers of a request that travels in the body of another one."""
        if self._access.key is not None:
            return [*headers, *self._access.key.sign(method, path, {}, headers)]
        return [*headers, *(item for item in self._fixed.items if item[0] == b"Authorization")]

    def url(self, path: bytes) -> bytes:
        """Return the whole url of a path, as the service is told it."""
        return b"%b://%b%b" % (self._origin.scheme.encode(), self._origin.authority, path)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()
        await self._token.close()

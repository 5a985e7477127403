"""Sender of requests to one container, with an account key, a SAS token or an access token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from aioflux._auth.azure import is_sas
from aioflux._auth.redaction import add_secret
from aioflux._http import FixedHeaders
from aioflux._services.azure import wire
from aioflux._services.sender import ErrorResponse, TokenSender
from aioflux.errors import (
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from aioflux._auth.azure import AzureAccess
    from aioflux._http import Origin, Pool
    from aioflux._services.responses import Failure, RequestKind
    from aioflux._services.sender import AuthorizedRequest

_VERSION = (b"x-ms-version", wire.VERSION)


class AzureSender(TokenSender):
    """Sender of the requests to one container."""

    def __init__(
        self,
        access: AzureAccess,
        pool: Pool,
        origin: Origin,
        uri: Callable[[str], str],
    ) -> None:
        self._access = access
        self._set_sas(access.sas)
        super().__init__(access.token, pool, origin, uri, [_VERSION])
        self._credentials = access

    def _encode_headers(self, token: str | None) -> tuple[FixedHeaders, FixedHeaders]:
        headers = [*self._common]
        if token is not None and is_sas(token):
            self._set_sas(token.removeprefix("?"))
        elif token is not None:
            add_secret(token)
            self._sas = b""
            headers.append((b"Authorization", b"Bearer " + token.encode()))
        fixed = FixedHeaders(headers)
        return fixed, fixed

    def _set_sas(self, sas: str) -> None:
        self._sas = sas.encode()
        add_secret(dict(parse_qsl(sas)).get("sig"))

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
        request = await super()._authorize(method, target, headers, body, action, key, kind)
        return self._sign(method, request, body)

    def authorize_nowait(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> AuthorizedRequest | None:
        request = super().authorize_nowait(target, headers)
        return None if request is None else self._sign(b"GET", request, None)

    def _sign(self, method: bytes, request: AuthorizedRequest, body: Any) -> AuthorizedRequest:
        """Add the signature of the account key, or the SAS token, if there is one."""
        origin, target, headers, fixed, token = request
        if self._access.key is not None:
            path, _, query = target.partition(b"?")
            parameters = dict(parse_qsl(query.decode(), keep_blank_values=True)) if query else {}
            pieces = () if body is None else body if isinstance(body, (list, tuple)) else (body,)
            num_bytes = sum(memoryview(piece).nbytes for piece in pieces)
            signed = (_VERSION, *headers)
            headers = [
                *headers,
                *self._access.key.sign(method, path, parameters, signed, num_bytes=num_bytes),
            ]
        return origin, (self.with_sas(target) if self._sas else target), headers, fixed, token

    def _generation_of(self, headers: Mapping[bytes, bytes]) -> str:
        return wire.etag_of(headers)

    def _parse_error(self, response: ErrorResponse) -> tuple[str, str]:
        return wire.parse_error(response.headers, response.body)

    def _service_error(self, failure: Failure) -> StorageError:
        error, generation = wire.service_error(failure), failure.kind.generation
        if not (generation and isinstance(error, PreconditionFailedError)):
            return error
        replaced = NotFoundError(
            f"{error.uri} no longer has generation {generation}: it was replaced; list it again",
            uri=error.uri,
            status=error.status,
        )
        replaced.__cause__ = error
        return replaced

    def with_sas(self, url: bytes) -> bytes:
        """Return a url with the SAS token, if there is one."""
        if not self._sas:
            return url
        return b"%b%b%b" % (url, b"&" if b"?" in url else b"?", self._sas)

    def sign(
        self, method: bytes, path: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers of one request of a batch, with its authorization."""
        if self._access.key is not None:
            return [*headers, *self._access.key.sign(method, path, {}, headers)]
        return [*headers, *(item for item in self._headers.items if item[0] == b"Authorization")]

    def presign(self, path: bytes, name: str, key: str, permissions: str, expires_at: float) -> str:
        """Return the url of a blob with a SAS token; arguments as in `SharedKey.sas`.

        Raises:
            UnsupportedError: The credentials are not an account key.
        """
        uri = self._uri(key)
        if self._access.key is None:
            raise UnsupportedError(
                f"could not sign a url of {uri}: it needs an account key; pass one, or a "
                "connection string with one, as credentials=",
                uri=uri,
            )
        sas = self._access.key.sas(
            name,
            permissions,
            version=wire.VERSION.decode(),
            expires_at=expires_at,
            is_https=self._origin.scheme == "https",
        )
        return f"{self.url(path).decode()}?{sas}"

    def url(self, path: bytes) -> bytes:
        """Return the url of a path."""
        return b"%b://%b%b" % (self._origin.scheme.encode(), self._origin.authority, path)

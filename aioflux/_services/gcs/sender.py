"""Requests to one bucket of Google Cloud Storage, with an access token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aioflux._http import FixedHeaders
from aioflux._services.gcs import wire
from aioflux._services.gcs.control import get_token
from aioflux._services.sender import USER_AGENT, ErrorResponse, RequestKind, TokenSender
from aioflux._services.status import error_from_status
from aioflux._services.xml_multipart import parse_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.errors import StorageError

__all__ = ["GCSSender"]

_STORED_BYTES: Final = (b"Accept-Encoding", b"gzip")


class GCSSender(TokenSender):
    """Requests to one bucket of the XML API, and listings."""

    def _fix(self, token: str | None) -> tuple[FixedHeaders, FixedHeaders]:
        headers = [USER_AGENT]
        if token is not None:
            headers.append((b"Authorization", b"Bearer " + token.encode()))
        return FixedHeaders(headers), FixedHeaders([*headers, _STORED_BYTES])

    async def _await_token(self, action: str, key: str) -> str | None:
        return await get_token(self._token, action=action, uri=self._uri(key))

    def _generation_of(self, headers: Mapping[bytes, bytes]) -> str:
        return wire.generation_of(headers)

    def _service_error(
        self,
        response: ErrorResponse,
        kind: RequestKind,
        *,
        action: str,
        uri: str,
        retry_after: str | None,
    ) -> StorageError:
        code, detail = parse_error(response.body)
        return error_from_status(
            response.status,
            action=action,
            uri=uri,
            code=code,
            detail=detail or wire.decode_error(response.body),
            retry_after=retry_after,
            generation=kind.generation,
        )

"""Copies and composes of Google Cloud Storage, by gcloud-aio over one aiohttp session."""

from __future__ import annotations

import asyncio
import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from gcloud.aio.auth import AioSession
from gcloud.aio.storage import Storage

from aioflux._auth.google import AnonymousToken
from aioflux._http import (
    MAX_METADATA_BYTES,
    CertificateError,
    ConnectError,
    ConnectionLostError,
    Headers,
    ProtocolError,
    Response,
    SocketTracker,
    StreamedBody,
    TransportError,
    certificate_error_text,
    default_context,
)
from aioflux._services.gcs import wire
from aioflux._services.status import malformed_response
from aioflux.errors import PreconditionFailedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from types import SimpleNamespace

    from aioflux._services.base import Precondition, ServiceConfig, Source, WriteRequest
    from aioflux._services.gcs.service import GCSSender

__all__ = ["GCSControl"]

T = TypeVar("T")

_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors of aiohttp before it has sent a request."""
_TRANSPORT_ERRORS = (
    aiohttp.ClientError,
    TransportError,
    TimeoutError,
    asyncio.IncompleteReadError,
    OSError,
)
"""Errors of a request without a complete response."""


class GCSControl:
    """Sender of copies and composes within one bucket, each with the token of `GCSSender`.

    gcloud-aio-storage sends copies. Composes are sent here, over the session of gcloud-aio, since
    its storage client has no parameters for the generations of compose sources, or for the metadata
    of the composed object.
    """

    def __init__(
        self,
        config: ServiceConfig,
        api_root: str,
        sender: GCSSender,
        *,
        uri: Callable[[str], str],
        proxy: str | None,
        is_closed: bool = False,
    ) -> None:
        self._config = config
        self._bucket = config.location.bucket
        self._api_root = api_root.rstrip("/")
        self._root = f"{self._api_root}/storage/v1/b/{quote(self._bucket, safe='')}/o"
        self._sender = sender
        self._uri = uri
        self._proxy = proxy
        timeouts = config.timeouts
        self._timeout = aiohttp.ClientTimeout(
            connect=timeouts.connect_seconds, sock_read=timeouts.idle_seconds
        )
        self._sockets = SocketTracker()
        self._is_closed = is_closed

    @cached_property
    def _client(self) -> aiohttp.ClientSession:
        """The session, opened on first use, since most stores never use it."""
        if self._is_closed:
            raise RuntimeError("Session is closed")  # the message of aiohttp
        context = self._config.ssl_context
        if context is None and self._api_root.startswith("https:"):
            context = default_context()
        connector = aiohttp.TCPConnector(
            limit=self._config.max_connections,
            keepalive_timeout=self._config.timeouts.idle_seconds,
            ssl=context or True,
            socket_factory=self._sockets.create,
        )
        # aiohttp follows redirects by default, and gcloud-aio-storage has no option against it.
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_reject_redirect)
        trace.on_request_end.append(_reject_redirect)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            # `trust_env` would also set the proxy, but send the credentials of ~/.netrc, too.
            proxy=self._proxy,
            response_class=_LimitedResponse,
            # Decompression of one read from the socket may take a thousand times its size.
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding",),
            trace_configs=[trace],
        )

    @cached_property
    def _session(self) -> AioSession:
        return AioSession(self._client)  # type: ignore[arg-type]  # it accepts a session of aiohttp

    @cached_property
    def _storage(self) -> Storage:
        return Storage(
            session=self._client,  # type: ignore[arg-type]  # as above
            token=AnonymousToken(),  # type: ignore[arg-type]  # not used, see below
            api_root=self._api_root,
            # With this flag, gcloud-aio-storage adds no token to the given headers.
            api_is_dev=True,
        )

    async def copy(
        self, source: Source, source_name: str, name: str, key: str, precondition: Precondition
    ) -> bytes:
        """Copy an object, and return the resource of the copy.

        Large copies take several requests. `name` is the full name of the target, `key` its key.
        """
        params = {**wire.precondition_params(precondition)}
        if source.generation:
            params["sourceGeneration"] = source.generation
        try:
            response = await self._send(
                lambda headers: self._storage.copy(
                    self._bucket,
                    source_name,
                    self._bucket,
                    new_name=name,
                    params=dict(params),
                    headers=headers,
                    timeout=self._timeout,  # type: ignore[arg-type]  # takes a ClientTimeout too
                ),
                "copy",
                source.key,
            )
        except PreconditionFailedError as exc:
            uri = self._uri(key)
            raise PreconditionFailedError(
                f"could not copy {self._uri(source.key)} to {uri}: the generation of the target is "
                "not the expected one",
                uri=uri,
                status=exc.status,
            ) from exc
        return json.dumps(response.get("resource")).encode()

    async def compose(
        self, name: str, sources: Sequence[tuple[str, Source]], request: WriteRequest
    ) -> bytes:
        """Concatenate objects, and return the resource of the new object.

        `sources` are pairs of full object name and source.
        """
        destination: dict[str, Any] = {}
        if request.content_type:
            destination["contentType"] = request.content_type
        if request.metadata:
            destination["metadata"] = dict(request.metadata)
        rows = [
            {"name": name, **({"generation": source.generation} if source.generation else {})}
            for name, source in sources
        ]
        body = json.dumps({"sourceObjects": rows, "destination": destination}).encode()
        url = f"{self._root}/{wire.quote_key(name)}/compose"
        params = dict(wire.precondition_params(request.precondition))

        async def post(headers: dict[str, str]) -> bytes:
            headers["Content-Type"] = "application/json; charset=UTF-8"
            response = await self._session.post(
                url, data=body, headers=headers, params=params, timeout=self._timeout
            )
            return await response.read()

        return await self._send(post, "compose", request.key)

    async def aclose(self) -> None:
        """Close the session, but not the sender, which `GCSService` closes."""
        self._is_closed = True
        if "_client" in vars(self):
            await self._sockets.aclose(self._client)

    async def _send(
        self, request: Callable[[dict[str, str]], Awaitable[T]], action: str, key: str
    ) -> T:
        """Run a request, given its headers; if its token is rejected, run it again with a new one.

        Raises:
            StorageError: As `Sender.send`.
            CredentialsError: There are no usable credentials.
        """
        sender, is_second = self._sender, False
        while True:
            token = await sender.ensure_token(action, key)
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            try:
                return await request(headers)
            except aiohttp.ClientResponseError as exc:
                if isinstance(exc.__cause__, HttpProcessingError):
                    # The server sent no valid status; aiohttp filled in one.
                    malformed = ProtocolError("not a valid HTTP/1.1 response", request_sent=True)
                    error = sender.transport_error(malformed, action, key)
                else:
                    response = _error_response(exc)
                    error = sender.response_error(response, action, key)
                    if not is_second and sender.should_resend(response, token):
                        is_second = True
                        continue
            except _TRANSPORT_ERRORS as exc:
                raise sender.transport_error(_transport_error(exc), action, key) from exc
            except (ValueError, RecursionError, AttributeError) as exc:  # of gcloud-aio-storage
                why = "the response is not a JSON object"
                raise malformed_response(action, self._uri(key), why) from exc
            except RuntimeError as exc:  # error of aiohttp for a closed session
                raise sender.transport_error(exc, action, key) from exc
            # Not raised in the `except` block: aiohttp's error, which has the request with its
            # token, would become the `__context__` of this one.
            raise error


class _LimitedResponse(aiohttp.ClientResponse):
    """A response whose body is limited, and decoded as UTF-8."""

    def get_encoding(self) -> str:
        """Return the encoding of JSON; the one that the response names may not be of text."""
        return "utf-8"

    async def read(self) -> bytes:
        """Read the body.

        Raises:
            ProtocolError: The body of a successful response is over the limit. Other bodies are
                truncated.
        """
        if self._body is None:
            body = StreamedBody(
                status=self.status, chunked=False, into=bytes, max_body_bytes=MAX_METADATA_BYTES
            )
            try:
                async for data in self.content.iter_any():
                    body.feed(data, 0, len(data))
                    if body.is_truncated:
                        self.close()
                        break
            except BaseException:
                self.close()
                raise
            self._body = bytes(body.finish())
        return self._body


async def _reject_redirect(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestRedirectParams | aiohttp.TraceRequestEndParams,
) -> None:
    response = params.response
    if 300 <= response.status < 400:
        response.close()
        raise aiohttp.ClientResponseError(response.request_info, (), status=response.status)


def _error_response(exc: aiohttp.ClientResponseError) -> Response:
    """Return the response in an error of aiohttp, or of gcloud-aio (`<reason>: <body>`)."""
    fields: Mapping[str, str] = exc.headers or {}
    headers = {name.lower().encode(): value.encode() for name, value in fields.items()}
    body = exc.message.partition(": ")[2].encode()
    return Response(exc.status, Headers(headers), body, len(body))


def _transport_error(exc: Exception) -> TransportError:
    """Return the error of `_http` for an error of aiohttp."""
    if isinstance(exc, TransportError):
        return exc
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        server = f"https://{exc.host}:{exc.port}"
        return CertificateError(certificate_error_text(server, exc.certificate_error))
    text = str(exc) or type(exc).__name__
    if isinstance(exc, _NOT_SENT):
        return ConnectError(text)
    return ConnectionLostError(text, request_sent=True)

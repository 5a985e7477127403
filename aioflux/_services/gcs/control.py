"""The control plane of Google Cloud Storage, through gcloud-aio-storage."""

from __future__ import annotations

import asyncio
import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from gcloud.aio.auth import AioSession
from gcloud.aio.storage import Storage

from aioflux._auth.google import AnonymousToken
from aioflux._http import SocketTracker, certificate_error_text
from aioflux._services.gcs import wire
from aioflux._services.status import error_from_status
from aioflux.errors import (
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from types import SimpleNamespace

    from aioflux._services.base import Precondition, Source, WriteRequest
    from aioflux.options import Timeouts

__all__ = ["GCSControl", "token_of"]

T = TypeVar("T")

_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class GCSControl:
    """JSON requests on one bucket, each one attempt, each with whole keys.

    gcloud-aio-storage sends them over one aiohttp session and asks our token for credentials. What
    it has no words for (a generation to read, generations of compose sources, user metadata of a
    composite) goes over the same session.
    """

    def __init__(
        self,
        bucket: str,
        *,
        api_root: str,
        token: Any,
        timeouts: Timeouts,
        max_connections: int,
        ssl_context: ssl.SSLContext | None,
        proxy: str | None,
    ) -> None:
        self._bucket = bucket
        self._bucket_url = f"{api_root}/storage/v1/b/{quote(bucket, safe='')}"
        self._root = f"{self._bucket_url}/o"
        self._token = token
        self._timeouts = timeouts
        self._max_connections = max_connections
        self._ssl_context = ssl_context
        self._proxy = proxy
        self._api_root = api_root
        # A read is answered at once or not at all; a write may be worked on before its answer.
        self._read_timeout = aiohttp.ClientTimeout(
            sock_connect=timeouts.connect_seconds, sock_read=timeouts.progress_seconds
        )
        self._timeout = aiohttp.ClientTimeout(
            sock_connect=timeouts.connect_seconds, sock_read=timeouts.idle_seconds
        )
        self._sockets = SocketTracker()
        self._is_closed = False

    @cached_property
    def _client(self) -> aiohttp.ClientSession:
        """Made on first use: most stores move bytes alone, and one that is never closed warns."""
        if self._is_closed:
            raise RuntimeError("Session is closed")  # as aiohttp says it
        connector = aiohttp.TCPConnector(
            limit=self._max_connections,
            keepalive_timeout=self._timeouts.idle_seconds,
            ssl=True if self._ssl_context is None else self._ssl_context,
            socket_factory=self._sockets.create,
        )
        # gcloud-aio-storage leaves aiohttp at its default, which follows redirects; these refuse.
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse_redirect)
        trace.on_request_end.append(_refuse_redirect)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Named, because `trust_env` would let ~/.netrc add credentials to ours.
            proxy=self._proxy,
            trace_configs=[trace],
        )

    @cached_property
    def _session(self) -> AioSession:
        return AioSession(self._client)  # type: ignore[arg-type]  # its own is one, too

    @cached_property
    def _storage(self) -> Storage:
        return Storage(
            session=self._client,  # type: ignore[arg-type]  # as above
            token=self._token,
            api_root=self._api_root,
            # What it calls a development API is one that is asked without credentials.
            api_is_dev=isinstance(self._token, AnonymousToken),
        )

    async def head(self, key: str, *, generation: str, uri: str) -> wire.ObjectResource:
        """Read the resource of an object."""
        params = {"generation": generation} if generation else {}
        url = f"{self._root}/{wire.quote_key(key)}"
        action = "read the metadata of"
        try:
            answer = await self._call(
                lambda: self._send("get", url, params=params), action=action, uri=uri
            )
        except NotFoundError as exc:
            if not generation:
                raise
            raise error_from_status(404, action=action, uri=uri, generation=generation) from exc
        return _decode(answer, action=action, uri=uri, name=key, generation=generation)

    async def copy(
        self,
        source: Source,
        source_key: str,
        key: str,
        *,
        precondition: Precondition,
        uri: str,
        target_uri: str,
    ) -> wire.ObjectResource:
        """Copy an object within the bucket; gcloud-aio repeats the call where it is large."""
        params = {**wire.precondition_params(precondition)}
        if source.generation:
            params["sourceGeneration"] = source.generation
        try:
            answer = await self._call(
                lambda: self._storage.copy(
                    self._bucket,
                    source_key,
                    self._bucket,
                    new_name=key,
                    params=dict(params),
                    timeout=self._timeout,  # type: ignore[arg-type]  # takes a ClientTimeout too
                ),
                action="copy",
                uri=uri,
            )
        except PreconditionFailedError as exc:
            raise PreconditionFailedError(
                f"could not copy {uri} to {target_uri}: the generation there is another",
                uri=target_uri,
                status=exc.status,
            ) from exc
        resource = json.dumps(answer.get("resource")).encode()
        return _decode(resource, action="copy", uri=uri, name=key)

    async def compose(
        self,
        key: str,
        sources: Sequence[tuple[str, Source]],
        request: WriteRequest,
        *,
        uri: str,
    ) -> wire.ObjectResource:
        """Concatenate objects; `sources` are pairs of whole key and source."""
        destination: dict[str, Any] = {}
        if request.content_type:
            destination["contentType"] = request.content_type
        if request.metadata:
            destination["metadata"] = dict(request.metadata)
        rows = [
            {"name": whole, **({"generation": source.generation} if source.generation else {})}
            for whole, source in sources
        ]
        body = json.dumps({"sourceObjects": rows, "destination": destination}).encode()
        url = f"{self._root}/{wire.quote_key(key)}/compose"
        params = wire.precondition_params(request.precondition)
        answer = await self._call(
            lambda: self._send("post", url, params=params, body=body), action="compose", uri=uri
        )
        return _decode(answer, action="compose", uri=uri, name=key)

    async def granted_permissions(self, permissions: Sequence[str], *, uri: str) -> Sequence[str]:
        """Return those of `permissions` that the credentials in use have on the bucket."""
        action = "test the permissions of"
        query = urlencode([("permissions", each) for each in permissions])
        url = f"{self._bucket_url}/iam/testPermissions?{query}"
        answer = await self._call(lambda: self._send("get", url, params={}), action=action, uri=uri)
        try:
            return wire.decode_permissions(answer)
        except ValueError as exc:
            raise TransientError(
                f"could not {action} {uri}: the answer tells none ({exc})",
                uri=uri,
                is_malformed=True,
            ) from exc

    async def aclose(self) -> None:
        """Close the session; the token belongs to the service."""
        self._is_closed = True
        if "_client" in vars(self):
            await self._sockets.aclose(self._client)

    async def _call(self, request: Callable[[], Awaitable[T]], *, action: str, uri: str) -> T:
        """Run a request; with another token once more, where the service refuses the first."""
        token = await token_of(self._token, action=action, uri=uri)
        try:
            return await _guard(request, action=action, uri=uri)
        except PermissionDeniedError as exc:
            if exc.status != 401 or token is None:
                raise
        self._token.invalidate(token)
        await token_of(self._token, action=action, uri=uri)
        return await _guard(request, action=action, uri=uri)

    async def _send(
        self, method: str, url: str, *, params: Mapping[str, str], body: bytes | None = None
    ) -> bytes:
        headers: dict[str, str] = {}
        if token := await self._token.get():
            headers["Authorization"] = f"Bearer {token}"
        if body is None:
            response = await self._session.get(
                url, headers=headers, params=dict(params), timeout=self._read_timeout
            )
        else:
            headers["Content-Type"] = "application/json; charset=UTF-8"
            response = await self._session.post(
                url, data=body, headers=headers, params=dict(params), timeout=self._timeout
            )
        return await response.read()


async def token_of(source: Any, *, action: str, uri: str) -> str | None:
    """Return the token to send, or None for a request without one.

    Raises:
        CredentialsError: There are no usable credentials.
        TransientError: There is no token this time.
    """
    try:
        token: str | None = await source.get()
    except TransientError as exc:
        raise TransientError(f"could not {action} {uri}: {exc}", uri=uri) from exc
    return token


class _RedirectError(Exception):
    """The service answers that something is elsewhere."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


async def _refuse_redirect(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestRedirectParams | aiohttp.TraceRequestEndParams,
) -> None:
    if 300 <= params.response.status < 400:
        raise _RedirectError(params.response.status)


async def _guard(request: Callable[[], Awaitable[T]], *, action: str, uri: str) -> T:
    """Run one request of the control plane; the one place where its foreign errors become ours."""
    error: StorageError
    try:
        return await request()
    except aiohttp.ClientResponseError as exc:
        error = _response_error(exc, action=action, uri=uri)
    except _RedirectError as exc:
        error = error_from_status(exc.status, action=action, uri=uri)
    except aiohttp.ClientConnectorCertificateError as exc:
        where = f"https://{exc.host}:{exc.port}"
        raise StorageError(
            f"could not {action} {uri}: {certificate_error_text(where, exc.certificate_error)}",
            uri=uri,
        ) from exc
    except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as exc:
        raise TransientError(
            f"could not {action} {uri}: {str(exc) or type(exc).__name__}",
            uri=uri,
            maybe_done=not isinstance(exc, _NEVER_SENT),
        ) from exc
    except json.JSONDecodeError as exc:
        raise TransientError(
            f"could not {action} {uri}: the answer is not JSON",
            uri=uri,
            maybe_done=True,
            is_malformed=True,
        ) from exc
    except RuntimeError as exc:  # aiohttp's word for a session that was closed
        raise StorageError(f"could not {action} {uri}: the store was closed", uri=uri) from exc
    # Not from aiohttp's error, nor in its context: that one shows the request with its token.
    raise error


def _response_error(exc: aiohttp.ClientResponseError, *, action: str, uri: str) -> StorageError:
    """Return our error for an answer that aiohttp or gcloud-aio took for a failure."""
    if isinstance(exc.__cause__, HttpProcessingError):
        # The status is aiohttp's own, the server sent none that is valid.
        return TransientError(
            f"could not {action} {uri}: the answer is not valid HTTP/1.1",
            uri=uri,
            maybe_done=True,
            is_malformed=True,
        )
    return error_from_status(
        exc.status,
        action=action,
        uri=uri,
        detail=_message(exc.message),
        retry_after=exc.headers.get("Retry-After") if exc.headers else None,
    )


def _decode(
    answer: bytes, *, action: str, uri: str, name: str, generation: str = ""
) -> wire.ObjectResource:
    """Read the resource of the object that was asked for.

    Args:
        answer: JSON.
        action: What was asked, for errors.
        uri: Of what, for errors.
        name: Whole name of the object.
        generation: Generation that was asked for; empty for any.
    """
    try:
        resource = wire.decode_resource(answer)
    except ValueError as exc:
        raise TransientError(
            f"could not {action} {uri}: the answer is no object resource",
            uri=uri,
            maybe_done=True,
            is_malformed=True,
        ) from exc
    if resource.name != name or generation not in {"", resource.generation}:
        raise StorageError(
            f"could not {action} {uri}: the answer is about {resource.name!r} of generation "
            f"{resource.generation}",
            uri=uri,
        )
    return resource


def _message(text: str) -> str:
    """Cut the service's message out of gcloud-aio's `Reason: body`."""
    body = text.partition(": ")[2]
    return wire.decode_error(body.encode()) or body

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
from aioflux._services.sender import name_errors
from aioflux._services.status import error_from_status, malformed_response
from aioflux.errors import (
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from types import SimpleNamespace

    from aioflux._services.base import Precondition, ServiceConfig, Source, WriteRequest

__all__ = ["GCSControl"]

T = TypeVar("T")

_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class GCSControl:
    """JSON requests on one bucket, by full object names; one call is one attempt.

    gcloud-aio-storage sends them over one aiohttp session, with the store's token. Requests that it
    cannot express (of a generation, with generations of compose sources, with metadata of a
    composite) are sent over the same session.
    """

    def __init__(
        self, config: ServiceConfig, api_root: str, token: Any, *, proxy: str | None
    ) -> None:
        self._config = config
        self._bucket = config.location.bucket
        self._api_root = api_root.rstrip("/")
        self._bucket_url = f"{self._api_root}/storage/v1/b/{quote(self._bucket, safe='')}"
        self._root = f"{self._bucket_url}/o"
        self._token = token
        self._proxy = proxy
        timeouts = config.timeouts
        # The service responds to a read at once; a write may be processed for some time first.
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
        """The session, opened on first use: most stores never need one."""
        if self._is_closed:
            raise RuntimeError("Session is closed")  # the message of aiohttp
        connector = aiohttp.TCPConnector(
            limit=self._config.max_connections,
            keepalive_timeout=self._config.timeouts.idle_seconds,
            ssl=self._config.ssl_context or True,
            socket_factory=self._sockets.create,
        )
        # aiohttp follows redirects by default, and gcloud-aio-storage does not change that.
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_reject_redirect)
        trace.on_request_end.append(_reject_redirect)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Explicit, because `trust_env` would add the credentials of ~/.netrc.
            proxy=self._proxy,
            trace_configs=[trace],
        )

    @cached_property
    def _session(self) -> AioSession:
        return AioSession(self._client)  # type: ignore[arg-type]  # it makes the same one itself

    @cached_property
    def _storage(self) -> Storage:
        return Storage(
            session=self._client,  # type: ignore[arg-type]  # as above
            token=self._token,
            api_root=self._api_root,
            # gcloud-aio-storage sends no credentials to what it calls a development API.
            api_is_dev=isinstance(self._token, AnonymousToken),
        )

    async def head(self, key: str, *, generation: str, uri: str) -> wire.ObjectResource:
        """Read the resource of an object."""
        params = {"generation": generation} if generation else {}
        url = f"{self._root}/{wire.quote_key(key)}"
        action = "read the metadata of"
        try:
            response = await self._call(
                lambda: self._send("get", url, params=params), action=action, uri=uri
            )
        except NotFoundError as exc:
            if not generation:
                raise
            raise error_from_status(404, action=action, uri=uri, generation=generation) from exc
        return _decode(response, action=action, uri=uri, name=key, generation=generation)

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
        """Copy an object within the bucket; gcloud-aio repeats the call if it is large."""
        params = {**wire.precondition_params(precondition)}
        if source.generation:
            params["sourceGeneration"] = source.generation
        try:
            response = await self._call(
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
                f"could not copy {uri} to {target_uri}: the target has another generation",
                uri=target_uri,
                status=exc.status,
            ) from exc
        resource = json.dumps(response.get("resource")).encode()
        return _decode(resource, action="copy", uri=uri, name=key)

    async def compose(
        self,
        key: str,
        sources: Sequence[tuple[str, Source]],
        request: WriteRequest,
        *,
        uri: str,
    ) -> wire.ObjectResource:
        """Concatenate objects; `sources` are pairs of full name and source."""
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
        url = f"{self._root}/{wire.quote_key(key)}/compose"
        params = wire.precondition_params(request.precondition)
        response = await self._call(
            lambda: self._send("post", url, params=params, body=body), action="compose", uri=uri
        )
        return _decode(response, action="compose", uri=uri, name=key)

    async def granted_permissions(self, permissions: Sequence[str], *, uri: str) -> Sequence[str]:
        """Return those of `permissions` that the credentials in use have on the bucket."""
        action = "test the permissions of"
        query = urlencode([("permissions", each) for each in permissions])
        url = f"{self._bucket_url}/iam/testPermissions?{query}"
        response = await self._call(
            lambda: self._send("get", url, params={}), action=action, uri=uri
        )
        try:
            return wire.decode_permissions(response)
        except ValueError as exc:
            why = f"the response has no permissions ({exc})"
            raise malformed_response(action, uri, why, maybe_done=False) from exc

    async def aclose(self) -> None:
        """Close the session; the token belongs to the service."""
        self._is_closed = True
        if "_client" in vars(self):
            await self._sockets.aclose(self._client)

    async def _call(self, request: Callable[[], Awaitable[T]], *, action: str, uri: str) -> T:
        """Run a request; once more with another token, if the service rejects the first."""
        token = await name_errors(self._token.get(), action, uri)
        try:
            return await _run_request(request, action=action, uri=uri)
        except PermissionDeniedError as exc:
            if exc.status != 401 or token is None:
                raise
        self._token.invalidate(token)
        await name_errors(self._token.get(), action, uri)
        return await _run_request(request, action=action, uri=uri)

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


class _RedirectError(Exception):
    """The service returned a redirect."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


async def _reject_redirect(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestRedirectParams | aiohttp.TraceRequestEndParams,
) -> None:
    if 300 <= params.response.status < 400:
        raise _RedirectError(params.response.status)


async def _run_request(request: Callable[[], Awaitable[T]], *, action: str, uri: str) -> T:
    """Run one request of the control plane, and map its errors to those of `errors.py`."""
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
        raise malformed_response(action, uri, "the response is not JSON") from exc
    except RuntimeError as exc:  # aiohttp's error for a closed session
        raise StorageError(f"could not {action} {uri}: the store was closed", uri=uri) from exc
    # Neither from aiohttp's error nor in its context, which has the request with its token.
    raise error


def _response_error(exc: aiohttp.ClientResponseError, *, action: str, uri: str) -> StorageError:
    """Return the error to raise for an error response of aiohttp or gcloud-aio."""
    if isinstance(exc.__cause__, HttpProcessingError):
        # The status is aiohttp's own: the server sent no valid one.
        return malformed_response(action, uri, "the response is not valid HTTP/1.1")
    return error_from_status(
        exc.status,
        action=action,
        uri=uri,
        detail=_message(exc.message),
        retry_after=exc.headers.get("Retry-After") if exc.headers else None,
    )


def _decode(
    response: bytes, *, action: str, uri: str, name: str, generation: str = ""
) -> wire.ObjectResource:
    """Decode the resource of an object."""
    try:
        resource = wire.decode_resource(response)
    except ValueError as exc:
        raise malformed_response(action, uri, "the response is not an object resource") from exc
    if resource.name != name or generation not in {"", resource.generation}:
        raise StorageError(
            f"could not {action} {uri}: the response is about {resource.name!r} of generation "
            f"{resource.generation}",
            uri=uri,
        )
    return resource


def _message(text: str) -> str:
    """Return the service's message, from gcloud-aio's `Reason: body`."""
    body = text.partition(": ")[2]
    return wire.decode_error(body.encode()) or body

"""Metadata, copies, composes and permissions of Google Cloud Storage, by its JSON API."""

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
from aioflux._http import SocketTracker, certificate_error_text, default_context
from aioflux._services.gcs import resources, wire
from aioflux._services.sender import resolve_credentials
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

_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors of aiohttp before it has sent a request."""


class GCSControl:
    """Sender of requests of the JSON API to one bucket; repeats them only with a new token.

    Keys are full object names. gcloud-aio-storage sends copies. The other requests are sent here,
    over the same aiohttp session, since gcloud-aio-storage has no parameters for a generation, for
    the generations of compose sources, or for the metadata of the composed object.
    """

    def __init__(
        self,
        config: ServiceConfig,
        api_root: str,
        token: Any,
        *,
        proxy: str | None,
        is_closed: bool = False,
    ) -> None:
        self._config = config
        self._bucket = config.location.bucket
        self._api_root = api_root.rstrip("/")
        self._bucket_url = f"{self._api_root}/storage/v1/b/{quote(self._bucket, safe='')}"
        self._root = f"{self._bucket_url}/o"
        self._token = token
        self._proxy = proxy
        timeouts = config.timeouts
        # The service responds to a read immediately, but may process a write for some time first.
        # `sock_connect` would not cover the response of a proxy to CONNECT.
        self._read_timeout = aiohttp.ClientTimeout(
            connect=timeouts.connect_seconds, sock_read=timeouts.progress_seconds
        )
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
            trace_configs=[trace],
        )

    @cached_property
    def _session(self) -> AioSession:
        return AioSession(self._client)  # type: ignore[arg-type]  # it accepts a session of aiohttp

    @cached_property
    def _storage(self) -> Storage:
        return Storage(
            session=self._client,  # type: ignore[arg-type]  # as above
            token=self._token,
            api_root=self._api_root,
            # With this flag, gcloud-aio-storage sends no credentials.
            api_is_dev=isinstance(self._token, AnonymousToken),
        )

    async def head(self, key: str, *, generation: str, uri: str) -> resources.ObjectResource:
        """Read the resource of an object."""
        params = {"generation": generation} if generation else {}
        url = f"{self._root}/{wire.quote_key(key)}"
        action = "read the metadata of"
        try:
            response = await self._send_with_token(
                lambda: self._send_json("get", url, params=params), action=action, uri=uri
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
    ) -> resources.ObjectResource:
        """Copy an object within the bucket; large copies take several requests."""
        params = {**wire.precondition_params(precondition)}
        if source.generation:
            params["sourceGeneration"] = source.generation
        try:
            response = await self._send_with_token(
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
                f"could not copy {uri} to {target_uri}: the generation of the target is not the "
                "expected one",
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
    ) -> resources.ObjectResource:
        """Concatenate objects; `sources` are pairs of full object name and source."""
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
        response = await self._send_with_token(
            lambda: self._send_json("post", url, params=params, body=body),
            action="compose",
            uri=uri,
        )
        return _decode(response, action="compose", uri=uri, name=key)

    async def granted_permissions(self, permissions: Sequence[str], *, uri: str) -> Sequence[str]:
        """Return the subset of `permissions` that the credentials have on the bucket."""
        action = "test the permissions of"
        query = urlencode([("permissions", permission) for permission in permissions])
        url = f"{self._bucket_url}/iam/testPermissions?{query}"
        response = await self._send_with_token(
            lambda: self._send_json("get", url, params={}), action=action, uri=uri
        )
        try:
            return resources.decode_permissions(response)
        except ValueError as exc:
            why = f"the response is not a list of permissions ({exc})"
            raise malformed_response(action, uri, why, maybe_done=False) from exc

    async def aclose(self) -> None:
        """Close the session, but not the token, which `GCSService` closes."""
        self._is_closed = True
        if "_client" in vars(self):
            await self._sockets.aclose(self._client)

    async def _send_with_token(
        self, request: Callable[[], Awaitable[T]], *, action: str, uri: str
    ) -> T:
        """Run a request; if the service rejects its token, run it again with a new one."""
        token = await resolve_credentials(self._token.get(), action, uri)
        try:
            return await _map_errors(request, self._api_root, action=action, uri=uri)
        except PermissionDeniedError as exc:
            if exc.status != 401 or token is None:
                raise
        self._token.invalidate(token)
        await resolve_credentials(self._token.get(), action, uri)
        return await _map_errors(request, self._api_root, action=action, uri=uri)

    async def _send_json(
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
    """A response with a redirect."""

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


async def _map_errors(
    request: Callable[[], Awaitable[T]], server: str, *, action: str, uri: str
) -> T:
    """Await `request()`, and map errors of aiohttp to the errors of `errors.py`."""
    error: StorageError
    try:
        return await request()
    except aiohttp.ClientResponseError as exc:
        error = _response_error(exc, action=action, uri=uri)
    except _RedirectError as exc:
        error = error_from_status(exc.status, action=action, uri=uri)
    except aiohttp.ClientConnectorCertificateError as exc:
        server = f"https://{exc.host}:{exc.port}"
        raise StorageError(
            f"could not {action} {uri}: {certificate_error_text(server, exc.certificate_error)}",
            uri=uri,
        ) from exc
    except _NOT_SENT as exc:
        why = f"no connection to {server}: {getattr(exc, 'os_error', exc)}"
        message = f"could not {action} {uri}: {why}"
        raise TransientError(message, uri=uri, unconnected="unreachable") from exc
    except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as exc:
        raise TransientError(
            f"could not {action} {uri}: {str(exc) or type(exc).__name__}",
            uri=uri,
            maybe_done=True,
        ) from exc
    except json.JSONDecodeError as exc:
        raise malformed_response(action, uri, "the response is not JSON") from exc
    except RuntimeError as exc:  # error of aiohttp for a closed session
        raise StorageError(f"could not {action} {uri}: the store was closed", uri=uri) from exc
    # Not raised in the `except` block: aiohttp's error, which has the request with its token, would
    # become the `__context__` of this one.
    raise error


def _response_error(exc: aiohttp.ClientResponseError, *, action: str, uri: str) -> StorageError:
    """Return the error to raise for an error response of aiohttp or gcloud-aio."""
    if isinstance(exc.__cause__, HttpProcessingError):
        # The server sent no valid status; aiohttp filled in one.
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
) -> resources.ObjectResource:
    """Decode the resource of an object, and check its name, and its generation if one is given."""
    try:
        resource = resources.decode_resource(response)
    except ValueError as exc:
        raise malformed_response(action, uri, "the response is not an object resource") from exc
    if resource.name != name or generation not in {"", resource.generation}:
        raise StorageError(
            f"could not {action} {uri}: the response is for {resource.name!r} in generation "
            f"{resource.generation}",
            uri=uri,
        )
    return resource


def _message(text: str) -> str:
    """Return the message of the service from an error of gcloud-aio, `<reason>: <body>`."""
    body = text.partition(": ")[2]
    return resources.decode_error(body.encode()) or body

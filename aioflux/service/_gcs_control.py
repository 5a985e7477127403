"""The control plane of Google Cloud Storage, through gcloud-aio-storage."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from gcloud.aio.auth import AioSession
from gcloud.aio.storage import Storage

from aioflux._errors import PreconditionFailedError, StorageError, TransientError
from aioflux.auth._google import AnonymousToken
from aioflux.service import _gcs_wire as wire
from aioflux.service._status import error_from_status

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Mapping, Sequence

    from aioflux._policy import Timeouts
    from aioflux.service._base import Precondition, Source

__all__ = ["GCSControl"]

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
    ) -> None:
        self._bucket = bucket
        self._root = f"{api_root}/storage/v1/b/{quote(bucket, safe='')}/o"
        self._token = token
        connector = aiohttp.TCPConnector(
            limit=max_connections,
            keepalive_timeout=timeouts.idle_seconds,
            ssl=True if ssl_context is None else ssl_context,
        )
        self._timeout = aiohttp.ClientTimeout(
            sock_connect=timeouts.connect_seconds, sock_read=timeouts.idle_seconds
        )
        # Proxies named in the environment are honoured, as on the data plane.
        self._client = aiohttp.ClientSession(connector=connector, trust_env=True)
        self._session = AioSession(self._client)  # type: ignore[arg-type]  # its own is one, too
        self._storage = Storage(
            session=self._client,  # type: ignore[arg-type]  # as above
            token=token,
            api_root=api_root,
            # What it calls a development API is one that is asked without credentials.
            api_is_dev=isinstance(token, AnonymousToken),
        )

    async def head(self, key: str, *, generation: str, uri: str) -> wire.ObjectResource:
        """Read the resource of an object."""
        params = {"generation": generation} if generation else {}
        url = f"{self._root}/{wire.quote_key(key)}"
        request = self._send("get", url, params=params)
        action = "read the metadata of"
        return _decode(await _guard(request, action=action, uri=uri), action=action, uri=uri)

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
        request = self._storage.copy(
            self._bucket,
            source_key,
            self._bucket,
            new_name=key,
            params=params,
            timeout=self._timeout,  # type: ignore[arg-type]  # its session takes a ClientTimeout too
        )
        try:
            answer = await _guard(request, action="copy", uri=uri)
        except PreconditionFailedError as exc:
            raise PreconditionFailedError(
                f"could not copy {uri} to {target_uri}: the generation there is another",
                uri=target_uri,
                status=exc.status,
            ) from exc
        return _decode(json.dumps(answer.get("resource")).encode(), action="copy", uri=uri)

    async def compose(
        self,
        key: str,
        sources: Sequence[tuple[str, Source]],
        *,
        precondition: Precondition,
        content_type: str,
        metadata: Mapping[str, str] | None,
        uri: str,
    ) -> wire.ObjectResource:
        """Concatenate objects; `sources` are pairs of whole key and source."""
        destination: dict[str, Any] = {"contentType": content_type} if content_type else {}
        if metadata:
            destination["metadata"] = dict(metadata)
        rows = [
            {"name": whole, **({"generation": source.generation} if source.generation else {})}
            for whole, source in sources
        ]
        body = json.dumps({"sourceObjects": rows, "destination": destination}).encode()
        url = f"{self._root}/{wire.quote_key(key)}/compose"
        params = wire.precondition_params(precondition)
        request = self._send("post", url, params=params, body=body)
        answer = await _guard(request, action="compose", uri=uri)
        return _decode(answer, action="compose", uri=uri)

    async def aclose(self) -> None:
        """Close the session; the token belongs to the service."""
        await self._client.close()

    async def _send(
        self, method: str, url: str, *, params: Mapping[str, str], body: bytes | None = None
    ) -> bytes:
        headers: dict[str, str] = {}
        if token := await self._token.get():
            headers["Authorization"] = f"Bearer {token}"
        if body is None:
            response = await self._session.get(
                url, headers=headers, params=dict(params), timeout=self._timeout
            )
        else:
            headers["Content-Type"] = "application/json; charset=UTF-8"
            response = await self._session.post(
                url, data=body, headers=headers, params=dict(params), timeout=self._timeout
            )
        return await response.read()


async def _guard(request: Awaitable[T], *, action: str, uri: str) -> T:
    """Run one request of the control plane; the one place where its foreign errors become ours."""
    error: StorageError
    try:
        return await request
    except aiohttp.ClientResponseError as exc:
        error = error_from_status(
            exc.status,
            action=action,
            uri=uri,
            detail=_message(exc.message),
            retry_after=exc.headers.get("Retry-After") if exc.headers else None,
        )
    except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as exc:
        raise TransientError(
            f"could not {action} {uri}: {str(exc) or type(exc).__name__}",
            uri=uri,
            maybe_done=not isinstance(exc, _NEVER_SENT),
        ) from exc
    except json.JSONDecodeError as exc:
        raise TransientError(
            f"could not {action} {uri}: the answer is not JSON", uri=uri, maybe_done=True
        ) from exc
    except RuntimeError as exc:  # aiohttp's word for a session that was closed
        raise StorageError(f"could not {action} {uri}: the store was closed", uri=uri) from exc
    # Not from aiohttp's error, nor in its context: that one shows the request with its token.
    raise error


def _decode(answer: bytes, *, action: str, uri: str) -> wire.ObjectResource:
    try:
        return wire.decode_resource(answer)
    except msgspec.MsgspecError as exc:
        raise TransientError(
            f"could not {action} {uri}: the answer is no object resource", uri=uri, maybe_done=True
        ) from exc


def _message(text: str) -> str:
    """Cut the service's message out of gcloud-aio's `Reason: body`."""
    body = text.partition(": ")[2]
    return wire.decode_error(body.encode()) or body

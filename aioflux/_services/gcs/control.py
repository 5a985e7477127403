"""Copies and composes of Google Cloud Storage, by gcloud-aio-storage.

    GCSControl -> gcloud-aio-storage -> _Exchange -> TokenSender

gcloud-aio-storage encodes the requests, and continues copies that take several. The sender sends
them as all other requests: it limits responses, maps errors and renews tokens. gcloud-aio's own
aiohttp session would decompress and collect a response of any size.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import msgspec
from gcloud.aio.storage import Storage

from aioflux._auth.google import AnonymousToken
from aioflux._services.gcs import wire
from aioflux._services.gcs.listing import decode_json
from aioflux._services.responses import malformed_response
from aioflux.errors import PreconditionFailedError

if TYPE_CHECKING:
    from aioflux._services.base import Precondition, Source, WriteRequest
    from aioflux._services.sender import TokenSender

_ROOT: Final = "https://storage"
"""Begin of the urls of gcloud-aio-storage; the sender has the real server."""

_FIELDS: Final = {
    "content_type": "contentType",
    "content_encoding": "contentEncoding",
    "content_disposition": "contentDisposition",
    "cache_control": "cacheControl",
    "storage_class": "storageClass",
    "metadata": "metadata",
}
"""Fields of an object resource, by attribute."""

_decoder = msgspec.json.Decoder(dict[str, Any])


class GCSControl:
    """Copies and composes within one bucket. Keys are relative to the prefix, names are full."""

    def __init__(
        self,
        bucket: str,
        path: str,
        sender: TokenSender,
        params: Mapping[str, str],
        kms_key: str,
        *,
        uri: Callable[[str], str],
    ) -> None:
        """Initialize; `path` is that of the bucket, and all requests have the query `params`.

        Objects are encrypted with `kms_key`, if it is not empty. `uri` returns the uri of a key,
        for errors.
        """
        self._bucket = bucket
        self._path = path
        self._sender = sender
        self._params = params
        self._kms_key = kms_key
        self._uri = uri

    async def copy(
        self, source: Source, source_name: str, name: str, key: str, precondition: Precondition
    ) -> bytes:
        """Copy an object, and return the resource of the copy.

        Large copies take several requests. `name` is the full name of the target, `key` its key.
        """
        params = {**self._params, **wire.precondition_params(precondition)}
        if self._kms_key:
            params["destinationKmsKeyName"] = self._kms_key
        if source.generation:
            params["sourceGeneration"] = source.generation
        try:
            return await self._run(
                "copy",
                source.key,
                lambda storage: storage.copy(
                    self._bucket, source_name, self._bucket, new_name=name, params=params
                ),
                "resource",
            )
        except PreconditionFailedError as exc:
            action = f"copy {self._uri(source.key)} to"
            why = "the generation of the target is not the expected one"
            raise PreconditionFailedError.of(action, self._uri(key), why, status=412) from exc

    async def compose(
        self, name: str, sources: Sequence[tuple[str, Source]], request: WriteRequest
    ) -> bytes:
        """Concatenate objects, and return the resource of the new object.

        `sources` are pairs of full object name and source.
        """
        destination = {
            field: value
            for name, field in _FIELDS.items()
            if (value := getattr(request.attributes, name))
        }
        rows = [
            {"name": name, **({"generation": source.generation} if source.generation else {})}
            for name, source in sources
        ]
        body = json.dumps({"sourceObjects": rows, "destination": destination})
        params = {**self._params, **wire.precondition_params(request.precondition)}
        if self._kms_key:
            params["kmsKeyName"] = self._kms_key
        url = f"{_ROOT}{self._path}/o/{wire.quote_key(name)}/compose"
        headers = {"Content-Type": "application/json; charset=UTF-8"}

        async def compose(storage: Storage) -> dict[str, Any]:
            # `Storage.compose` has no parameters for the generations of sources, and for metadata.
            response = await storage.session.post(url, data=body, headers=headers, params=params)
            resource: dict[str, Any] = await response.json(content_type=None)
            return resource

        return await self._run("compose", request.key, compose)

    async def _run(
        self,
        action: str,
        key: str,
        call: Callable[[Storage], Awaitable[dict[str, Any]]],
        field: str = "",
    ) -> bytes:
        """Call gcloud-aio-storage, and return its result, or one field of it, as JSON."""
        storage = Storage(
            session=_Exchange(self._sender, action, key),  # type: ignore[arg-type]
            token=AnonymousToken(),  # type: ignore[arg-type]
            api_root=_ROOT,
            api_is_dev=True,  # adds no token to requests
        )
        try:
            result = await call(storage)
        except ValueError as exc:
            why = "the response is not a JSON object"
            raise malformed_response(action, self._uri(key), why) from exc
        return json.dumps(result.get(field) if field else result).encode()


class _Exchange:
    """Replacement for the aiohttp session of gcloud-aio, and for its response, over the sender."""

    status = 200

    def __init__(self, sender: TokenSender, action: str, key: str) -> None:
        self._sender = sender
        self._action = action
        self._key = key

    async def post(
        self,
        url: str,
        *,
        data: str,
        headers: Mapping[str, str],
        params: Mapping[str, str],
        timeout: object,  # noqa: ASYNC109  # not used: the sender has its own
    ) -> _Exchange:
        """Send a request, given its body."""
        query = f"?{urlencode(params)}" if params else ""
        self._response = await self._sender.send(
            b"POST",
            f"{url.removeprefix(_ROOT)}{query}".encode(),
            self._action,
            self._key,
            headers=[(b"Content-Type", headers["Content-Type"].encode())],
            body=data.encode(),
        )
        return self

    async def json(self, *, content_type: None) -> dict[str, Any]:
        """Return the parsed body; ValueError if it is not an object."""
        try:
            return decode_json(_decoder, self._response.body)
        except ValueError:
            self._response.discard_connection()
            raise

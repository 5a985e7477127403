"""Multipart uploads of GCS and S3, with the XML API, whose requests `xml_multipart` encodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from aioflux._services import xml_multipart as multipart
from aioflux._services.http import HTTPService
from aioflux._services.sender import MAX_PAGE_BYTES
from aioflux._services.status import EmptyPageCounter, malformed_response
from aioflux._values.uri import check_name

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import WriteRequest
    from aioflux._values.meta import OpenUpload


class XMLService(HTTPService):
    """One bucket and prefix of a service with the XML multipart API."""

    _encodes_keys: ClassVar[bool] = False
    """Whether the service can percent-encode the keys in a listing of uploads."""
    _bucket_path: bytes = b""
    """Path of the bucket in urls."""

    async def initiate_upload(self, request: WriteRequest) -> str:
        key, action = request.key, "begin an upload of"
        response = await self._sender.send(
            b"POST",
            self._path(key) + b"?uploads",
            action,
            key,
            headers=self._upload_headers(request),
            body=b"",
        )
        return self._fields(response, "UploadId", action, key)["UploadId"]

    async def abort_upload(self, key: str, upload_id: str) -> None:
        target = multipart.upload_target(self._path(key), upload_id)
        action = "abort the upload of"
        response = await self._sender.send(b"DELETE", target, action, key, accept=404)
        if response.num_bytes and response.status != 404:
            raise self._not_from_service(action, key, response)

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        matching: list[OpenUpload] = []
        key_marker = id_marker = ""
        is_encoded = False
        num_cut, full_prefix = len(self._prefix), self._prefix + prefix
        action = "list the uploads of"
        empty_pages = EmptyPageCounter(self.uri(prefix))
        while True:
            target = multipart.list_uploads_target(
                self._bucket_path,
                prefix=full_prefix,
                key_marker=key_marker,
                id_marker=id_marker,
                is_encoded=is_encoded,
            )
            response = await self._sender.send(
                b"GET", target, action, prefix, max_body_bytes=MAX_PAGE_BYTES
            )
            try:
                uploads, key_marker, id_marker = multipart.parse_uploads(
                    response.body, is_encoded=is_encoded
                )
            except (ValueError, KeyError) as exc:
                if self._encodes_keys and not is_encoded:
                    # XML cannot represent one of the keys. The first request asks for plain keys:
                    # SeaweedFS, when asked for encoded keys, returns plain keys and marks them as
                    # encoded.
                    is_encoded = True
                    continue
                response.discard_connection()
                raise malformed_response(action, self.uri(prefix), exc, maybe_done=False) from exc
            matching += [
                replace(upload, key=upload.key[num_cut:])
                for upload in uploads
                # Some servers also list uploads of keys with other prefixes.
                if upload.key.startswith(full_prefix)
            ]
            if not key_marker:
                return sorted(matching, key=lambda upload: (upload.key, upload.upload_id))
            empty_pages.count(len(uploads))

    @abstractmethod
    def _path(self, key: str) -> bytes:
        """Return the path of an object in urls.

        Raises:
            ValueError: No object can have this key.
        """

    @abstractmethod
    def _upload_headers(self, request: WriteRequest) -> list[tuple[bytes, bytes]]:
        """Return the headers that describe the object of an upload."""

    @abstractmethod
    def _fields(self, response: Response, name: str, action: str, key: str) -> Mapping[str, str]:
        """Return the fields of an XML response that must have the field `name`.

        Raises:
            StorageError: The field is missing, for example in an error with status 200.
        """

    def _part_target(self, key: str, upload_id: str, number: int) -> bytes:
        return multipart.part_target(self._path(key), upload_id, number)

    def _part_etag(self, response: Response, upload_id: str, number: int) -> str:
        return (response.headers.get(b"etag") or b"").decode("latin-1")

    def _name(self, key: str) -> str:
        """Return the object's full name in the bucket; ValueError if no object can have it."""
        name = self._prefix + key
        check_name(name)
        return name

"""Multipart uploads in the XML protocol of GCS and S3, encoded by `xml_multipart`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from aioflux._services import xml_multipart as multipart
from aioflux._services.http import HTTPService
from aioflux._services.status import EmptyPageCounter, malformed_response
from aioflux._values.uri import check_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflux._http import Response
    from aioflux._services.base import WriteRequest
    from aioflux._values.meta import OpenUpload

__all__ = ["XMLService"]


class XMLService(HTTPService):
    """One bucket and prefix of a service with the XML multipart protocol."""

    _encodes_keys: ClassVar[bool] = False
    """The service can list uploads with percent-encoded keys."""
    _bucket_path: bytes = b""
    """Path of the bucket in targets."""

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
        found: list[OpenUpload] = []
        key_marker = id_marker = ""
        is_encoded = False
        cut, whole, action = len(self._prefix), self._prefix + prefix, "list the uploads of"
        empty = EmptyPageCounter(self.uri(prefix))
        while True:
            target = multipart.list_uploads_target(
                self._bucket_path,
                prefix=whole,
                key_marker=key_marker,
                id_marker=id_marker,
                is_encoded=is_encoded,
            )
            response = await self._sender.send(b"GET", target, action, prefix)
            try:
                uploads, key_marker, id_marker = multipart.parse_uploads(
                    response.body, is_encoded=is_encoded
                )
            except (ValueError, KeyError) as exc:
                if self._encodes_keys and not is_encoded:
                    # A key that XML cannot hold. Not in the first request, since SeaweedFS says
                    # that it encodes keys, and does not.
                    is_encoded = True
                    continue
                response.discard_connection()
                raise malformed_response(action, self.uri(prefix), exc, maybe_done=False) from exc
            found += [
                replace(upload, key=upload.key[cut:])
                for upload in uploads
                # Some servers list uploads of other keys, too.
                if upload.key.startswith(whole)
            ]
            if not key_marker:
                return sorted(found, key=lambda upload: (upload.key, upload.upload_id))
            empty.count(len(uploads))

    @abstractmethod
    def _path(self, key: str) -> bytes:
        """Return the path of an object.

        Raises:
            ValueError: No object can have this key.
        """

    @abstractmethod
    def _upload_headers(self, request: WriteRequest) -> list[tuple[bytes, bytes]]:
        """Return the headers that describe the object of an upload."""

    @abstractmethod
    def _fields(self, response: Response, name: str, action: str, key: str) -> Mapping[str, str]:
        """Return the fields of a response, which has one of this name.

        Raises:
            StorageError: It has not; it may be an error with status 200.
        """

    def _part_target(self, key: str, upload_id: str, number: int) -> bytes:
        return multipart.part_target(self._path(key), upload_id, number)

    def _part_etag(self, response: Response, upload_id: str, number: int) -> str:
        return (response.headers.get(b"etag") or b"").decode("latin-1")

    def _name(self, key: str) -> str:
        """Return the object's whole name, or raise ValueError if no object can have it."""
        name = self._prefix + key
        check_name(name)
        return name

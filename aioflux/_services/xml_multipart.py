"""The XML multipart API of GCS and S3: its encodings, and the services that have it.

Sources: cloud.google.com/storage/docs/multipart-uploads and
docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote, unquote_plus

from aioflux._services.http import HTTPService
from aioflux._services.responses import EmptyPageCounter, malformed_response
from aioflux._services.sender import MAX_PAGE_BYTES
from aioflux._services.xml_reader import read_xml
from aioflux._values.meta import OpenUpload
from aioflux._values.uri import check_name

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import PartRequest, UploadedPart, WriteRequest


def part_target(path: bytes, upload_id: str, number: int) -> bytes:
    """Return the target of a request that sends one part."""
    return b"%b?partNumber=%d&uploadId=%b" % (path, number, quote(upload_id, safe="").encode())


def upload_target(path: bytes, upload_id: str) -> bytes:
    """Return the target of a request that completes or aborts an upload."""
    return b"%b?uploadId=%b" % (path, quote(upload_id, safe="").encode())


def list_uploads_target(
    bucket_path: bytes, *, prefix: str, key_marker: str, id_marker: str, is_encoded: bool = False
) -> bytes:
    """Return the target of a request that lists open uploads.

    The previous page returned the markers; both are empty for the first page. `is_encoded`
    requests percent-encoded keys, since XML cannot represent some characters.
    """
    query = f"uploads&prefix={quote(prefix, safe='')}"
    if is_encoded:
        query += "&encoding-type=url"
    if key_marker:
        query += (
            f"&key-marker={quote(key_marker, safe='')}&upload-id-marker={quote(id_marker, safe='')}"
        )
    return b"%b?%b" % (bucket_path, query.encode())


def complete_body(parts: Sequence[UploadedPart]) -> bytes:
    """Return the body of a request that completes an upload; `parts` must be sorted by number."""
    from xml.sax.saxutils import escape

    rows = "".join(
        f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag></Part>"
        for part in parts
    )
    return f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()


def parse_uploads(
    data: bytes | bytearray | memoryview, *, is_encoded: bool = False
) -> tuple[list[OpenUpload], str, str]:
    """Return the uploads of one page, and the key marker and the id marker of the next page.

    Keys are full object names. Both markers are empty for the last page.

    Args:
        data: Body of the response.
        is_encoded: The request asked for percent-encoded keys.

    Raises:
        KeyError: An upload has no key, no id or no time.
        ValueError: The body is not a page of open uploads.
    """
    rows: list[dict[str, str]] = []
    root, fields = read_xml(data, {"Upload": rows.append})
    if root != "ListMultipartUploadsResult":
        raise ValueError(f"the response is <{root}>, not a page of uploads")
    is_encoded = is_encoded and fields.get("EncodingType") == "url"
    uploads: list[OpenUpload] = []
    for row in rows:
        time = datetime.fromisoformat(row["Initiated"])
        uploads.append(
            OpenUpload(
                key=unquote_plus(row["Key"]) if is_encoded else row["Key"],
                upload_id=row["UploadId"],
                initiated=time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC),
            )
        )
    if fields.get("IsTruncated", "").lower() != "true":
        return uploads, "", ""
    marker = fields.get("NextKeyMarker", "")
    if is_encoded:
        marker = unquote_plus(marker)
    if not marker and uploads:
        marker = uploads[-1].key  # SeaweedFS returns no key marker
    if not marker:
        raise ValueError("the page is truncated, but has no marker of the next page")
    return uploads, marker, fields.get("NextUploadIdMarker", "")


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
        target = upload_target(self._path(key), upload_id)
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
            target = list_uploads_target(
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
                uploads, key_marker, id_marker = parse_uploads(response.body, is_encoded=is_encoded)
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

    def _part_target(self, request: PartRequest) -> bytes:
        return part_target(self._path(request.key), request.upload_id, request.number)

    def _part_etag(self, response: Response, request: PartRequest) -> str:
        return (response.headers.get(b"etag") or b"").decode("latin-1")

    def _name(self, key: str) -> str:
        """Return the object's full name in the bucket; ValueError if no object can have it."""
        name = self._prefix + key
        check_name(name)
        return name

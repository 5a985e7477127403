"""XML API: multipart uploads of one object."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote

from aioflux.testing.gcs_server import _multipart
from aioflux.testing.gcs_server._checksums import declared_in
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import Request, Response, xml_response
from aioflux.testing.gcs_server._preconditions import integer
from aioflux.testing.gcs_server._render import hash_headers, timestamp, xml_etag
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._xml import document, limit, malformed, nodes, parse
from aioflux.testing.gcs_server._xml_objects import attributes_of

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import MultipartUpload, Part
    from aioflux.testing.gcs_server._state import State

_NUMBER = re.compile(r"\d{1,9}")
_PRECONDITIONS = ("x-goog-if-generation-match", "x-goog-if-metageneration-match")


def create_upload(state: State, request: Request) -> Response:
    """Begin an upload; the object will have the attributes that this request names."""
    _refuse_preconditions(request)
    params = request.params
    upload = _multipart.begin(state, params["bucket"], params["object"], attributes_of(request))
    content = nodes(Bucket=upload.bucket, Key=upload.name, UploadId=upload.upload_id)
    return xml_response(document("InitiateMultipartUploadResult", content))


def put_part(state: State, request: Request) -> Response:
    """Store one part."""
    _refuse_preconditions(request)
    part = _multipart.put_part(
        state,
        _upload(state, request),
        integer(request.query, "partNumber") or 0,
        request.pieces,
        declared_in(request.headers),
    )
    headers = [("ETag", part.etag), ("x-goog-hash", f"crc32c={part.crc32c_base64}")]
    if part.md5_base64 is not None:
        headers.append(("x-goog-hash", f"md5={part.md5_base64}"))
    return Response(headers=headers)


def complete_upload(state: State, request: Request) -> Response:
    """Make the object of the parts that the body lists."""
    _refuse_preconditions(request)
    upload = _upload(state, request)
    record = _multipart.complete(state, upload, _listed(request))
    location = f"{request.base_url}/{quote(upload.bucket)}/{quote(upload.name)}"
    content = nodes(Location=location, Bucket=upload.bucket, Key=upload.name, ETag=xml_etag(record))
    headers = [pair for pair in hash_headers(record) if pair[0] != "ETag"]
    return xml_response(document("CompleteMultipartUploadResult", content), headers=headers)


def abort_upload(state: State, request: Request) -> Response:
    """Forget an upload and its parts."""
    state.drop_multipart(_upload(state, request))
    return Response(status=204)


def list_parts(state: State, request: Request) -> Response:
    """List the parts of an upload by number."""
    upload = _upload(state, request)
    marker = integer(request.query, "part-number-marker") or 0
    size = limit(request.query, "max-parts")
    numbers = sorted(number for number in upload.parts if number > marker)
    page = [upload.parts[number] for number in numbers[:size]]
    content = nodes(
        Bucket=upload.bucket,
        Key=upload.name,
        UploadId=upload.upload_id,
        StorageClass=upload.attributes.storage_class,
        PartNumberMarker=marker,
        NextPartNumberMarker=page[-1].number if page else marker,
        MaxParts=size,
        IsTruncated=0 < size < len(numbers),
    )
    return xml_response(document("ListPartsResult", content, *map(_describe, page)))


def _describe(part: Part) -> str:
    content = nodes(
        PartNumber=part.number,
        LastModified=timestamp(part.updated_us),
        ETag=part.etag,
        Size=part.blob.size,
    )
    return f"<Part>{content}</Part>"


def _upload(state: State, request: Request) -> MultipartUpload:
    params = request.params
    return _multipart.find(state, params["bucket"], params["object"], request.query["uploadId"])


def _listed(request: Request) -> list[tuple[int, str]]:
    """Read the number and ETag of each part that a completion lists."""
    parts = parse(request.body, "CompleteMultipartUpload").findall("Part")
    listed = []
    for part in parts:
        number, etag = part.findtext("PartNumber", ""), part.findtext("ETag", "")
        if not _NUMBER.fullmatch(number.strip()) or not etag.strip():
            raise malformed("Each Part needs a PartNumber and an ETag.")
        listed.append((int(number), etag))
    return listed


def _refuse_preconditions(request: Request) -> None:
    """Refuse what would promise more than a multipart upload keeps.

    Source: cloud.google.com/storage/docs/request-preconditions: 400 NotImplemented.
    """
    named = [name for name in _PRECONDITIONS if name in request.headers]
    if named:
        message = f"Multipart uploads take no preconditions: {', '.join(named)}"
        raise APIError(400, "notImplemented", message, code="NotImplemented")


_PATTERN = "/{bucket}/{object*}"
_UPLOAD = {"uploadId": None}
ROUTES = (
    Route(
        method="POST",
        pattern=_PATTERN,
        operation="xml.multipart.create",
        handler=create_upload,
        where={"uploads": None},
    ),
    Route(
        method="PUT",
        pattern=_PATTERN,
        operation="xml.multipart.part",
        handler=put_part,
        where={"partNumber": None, "uploadId": None},
    ),
    Route(
        method="POST",
        pattern=_PATTERN,
        operation="xml.multipart.complete",
        handler=complete_upload,
        where=_UPLOAD,
    ),
    Route(
        method="DELETE",
        pattern=_PATTERN,
        operation="xml.multipart.abort",
        handler=abort_upload,
        where=_UPLOAD,
    ),
    Route(
        method="GET",
        pattern=_PATTERN,
        operation="xml.multipart.list_parts",
        handler=list_parts,
        where=_UPLOAD,
    ),
)

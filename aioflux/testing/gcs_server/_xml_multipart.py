"""XML API: multipart uploads (cloud.google.com/storage/docs/multipart-uploads).

An upload never expires. GCS supports no preconditions here: completing an upload replaces any
object with the same name.
"""

from __future__ import annotations

import re
import secrets
from itertools import pairwise
from typing import TYPE_CHECKING
from urllib.parse import quote

from aioflux.testing.gcs_server._checksums import combine_crc32c, hash_pieces, read_checksum_headers
from aioflux.testing.gcs_server._download import hash_headers
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import Request, Response, timestamp, xml_response
from aioflux.testing.gcs_server._preconditions import read_integer
from aioflux.testing.gcs_server._records import MultipartUpload, Part, check_object_name
from aioflux.testing.gcs_server._routes import Route
from aioflux.testing.gcs_server._xml import document, elements, malformed, parse, read_page_size
from aioflux.testing.gcs_server._xml_objects import attributes_of

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._state import State

_MAX_PARTS = 10_000
_MIN_PART_BYTES = 5 * 1024**2
_MAX_PART_BYTES = 5 * 1024**3
_NUMBER = re.compile(r"\d{1,9}")
_PRECONDITIONS = ("x-goog-if-generation-match", "x-goog-if-metageneration-match")


def create_upload(state: State, request: Request) -> Response:
    """Start an upload. The attributes of the future object are in this request."""
    _check_unconditional(request)
    bucket, name = request.params["bucket"], request.params["object"]
    state.bucket(bucket)
    check_object_name(name)
    upload = MultipartUpload(
        # sorted ids are in the order of creation
        upload_id=f"{state.next_generation():014x}-{secrets.token_urlsafe(24)}",
        bucket=bucket,
        name=name,
        attributes=attributes_of(request),
        started_us=state.now(),
    )
    state.journal.put_multipart(upload)
    state.multipart_uploads[upload.upload_id] = upload
    content = elements(Bucket=bucket, Key=name, UploadId=upload.upload_id)
    return xml_response(document("InitiateMultipartUploadResult", content))


def put_part(state: State, request: Request) -> Response:
    """Store one part. It replaces a part with the same number."""
    _check_unconditional(request)
    upload = _find_upload(state, request)
    number, pieces = read_integer(request.query, "partNumber") or 0, request.pieces
    declared = read_checksum_headers(request.headers)
    if not 1 <= number <= _MAX_PARTS:
        raise _error(
            "InvalidArgument", f"Part number must be an integer between 1 and {_MAX_PARTS}."
        )
    if request.size > _MAX_PART_BYTES:
        raise _error("EntityTooLarge", f"A part may have {_MAX_PART_BYTES} bytes at most.")
    crc32c, md5 = hash_pieces(pieces, with_md5=state.needs_md5(declared))
    declared.check(crc32c=crc32c, md5=md5)
    blob = state.blobs.put(pieces)
    part = Part(number=number, blob=blob, md5=md5, crc32c=crc32c, updated_us=state.now())
    state.journal.put_part(upload, part)
    old = upload.parts.get(number)
    upload.parts[number] = part
    if old is not None:
        old.blob.discard()
    return Response(headers=[("ETag", part.etag), *part.hash_headers()])


def complete_upload(state: State, request: Request) -> Response:
    """Write the object from the parts listed in the body, and delete the upload."""
    _check_unconditional(request)
    upload = _find_upload(state, request)
    parts = _select_parts(upload, _listed_parts(request))
    record = state.commit(
        upload.bucket,
        upload.name,
        state.blobs.concat([part.blob for part in parts]),
        crc32c=combine_crc32c((part.crc32c, part.blob.size) for part in parts),
        md5=None,
        attributes=upload.attributes,
    )
    state.drop_multipart(upload)
    location = f"{request.base_url}/{quote(upload.bucket)}/{quote(upload.name)}"
    content = elements(
        Location=location, Bucket=upload.bucket, Key=upload.name, ETag=record.xml_etag
    )
    headers = [pair for pair in hash_headers(record) if pair[0] != "ETag"]
    return xml_response(document("CompleteMultipartUploadResult", content), headers=headers)


def abort_upload(state: State, request: Request) -> Response:
    state.drop_multipart(_find_upload(state, request))
    return Response(status=204)


def list_parts(state: State, request: Request) -> Response:
    upload = _find_upload(state, request)
    marker = read_integer(request.query, "part-number-marker") or 0
    size = read_page_size(request.query, "max-parts")
    numbers = sorted(number for number in upload.parts if number > marker)
    page = [upload.parts[number] for number in numbers[:size]]
    content = elements(
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
    content = elements(
        PartNumber=part.number,
        LastModified=timestamp(part.updated_us),
        ETag=part.etag,
        Size=part.blob.size,
    )
    return f"<Part>{content}</Part>"


def _find_upload(state: State, request: Request) -> MultipartUpload:
    """Return the open upload of a request. Raise APIError (404) if it does not exist."""
    bucket, name = request.params["bucket"], request.params["object"]
    state.bucket(bucket)
    upload = state.multipart_uploads.get(request.query["uploadId"])
    if upload is None or (upload.bucket, upload.name) != (bucket, name):
        message = "The requested upload was not found."
        raise APIError(404, "notFound", message, code="NoSuchUpload")
    return upload


def _listed_parts(request: Request) -> list[tuple[int, str]]:
    """Return the number and the ETag of each part in the body of a completion."""
    listed = []
    for part in parse(request.body, "CompleteMultipartUpload").findall("Part"):
        number, etag = part.findtext("PartNumber", ""), part.findtext("ETag", "")
        if not _NUMBER.fullmatch(number.strip()) or not etag.strip():
            raise malformed("Each Part needs a PartNumber and an ETag.")
        listed.append((int(number), etag))
    return listed


def _select_parts(upload: MultipartUpload, listed: list[tuple[int, str]]) -> list[Part]:
    """Return the listed parts.

    Raises:
        APIError: 400, the list is invalid or a part is too small. The upload stays open.
    """
    if not listed:
        raise malformed("You must specify at least one part.")
    if any(left >= right for (left, _), (right, _) in pairwise(listed)):
        raise _error("InvalidPartOrder", "The list of parts was not in ascending order.")
    parts = []
    for number, etag in listed:
        part = upload.parts.get(number)
        if part is None or part.etag.strip('"') != etag.strip().strip('"'):
            message = f"Part {number} was not found, or its ETag did not match."
            raise _error("InvalidPart", message)
        parts.append(part)
    small = next((part for part in parts[:-1] if part.blob.size < _MIN_PART_BYTES), None)
    if small is not None:
        message = (
            f"Part {small.number} has {small.blob.size} bytes; all parts but the last need "
            f"at least {_MIN_PART_BYTES}."
        )
        raise _error("EntityTooSmall", message)
    return parts


def _check_unconditional(request: Request) -> None:
    """Reject preconditions with 400 (cloud.google.com/storage/docs/request-preconditions)."""
    preconditions = [name for name in _PRECONDITIONS if name in request.headers]
    if preconditions:
        message = f"Multipart uploads have no preconditions: {', '.join(preconditions)}"
        raise APIError(400, "notImplemented", message, code="NotImplemented")


def _error(code: str, message: str) -> APIError:
    return APIError(400, "invalid", message, code=code)


_PATTERN = "/{bucket}/{object*}"
_UPLOAD = {"uploadId": None}
ROUTES = (
    Route("POST", _PATTERN, "xml.multipart.create", create_upload, query={"uploads": None}),
    Route(
        "PUT",
        _PATTERN,
        "xml.multipart.part",
        put_part,
        query={"partNumber": None, "uploadId": None},
    ),
    Route("POST", _PATTERN, "xml.multipart.complete", complete_upload, query=_UPLOAD),
    Route("DELETE", _PATTERN, "xml.multipart.abort", abort_upload, query=_UPLOAD),
    Route("GET", _PATTERN, "xml.multipart.list_parts", list_parts, query=_UPLOAD),
)

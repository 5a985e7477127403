"""JSON API: resumable uploads (cloud.google.com/storage/docs/performing-resumable-uploads).

The server persists received bytes in multiples of 256 KiB and responds with 308 and the persisted
range. The request with the last byte commits the object.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode

from aioflux.testing.gcs_server._checksums import Digest, merge_declared, read_checksum_headers
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._json_insert import attributes_for, name_for
from aioflux.testing.gcs_server._messages import Request, Response, slice_pieces
from aioflux.testing.gcs_server._preconditions import from_query, read_integer
from aioflux.testing.gcs_server._records import ResumableUpload, check_object_name
from aioflux.testing.gcs_server._resources import (
    object_resource,
    read_checksum_fields,
    resource_response,
)
from aioflux.testing.gcs_server._routes import Route

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Buffer
    from aioflux.testing.gcs_server._state import State

STEP_BYTES = 256 << 10
_MAX_FINISHED = 1024
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18}|\*)|\*)/(\d{1,18}|\*)")


class ContentRange(NamedTuple):
    """Parsed header `Content-Range` of an upload."""

    start: int | None
    """Position in the object of the first byte of the body. None means that there is no body."""
    end: int | None
    """One past the position of the last byte. None means that the range ends with the body."""
    size: int | None
    """Size of the whole object. None means that the size is unknown."""


def parse_content_range(header: str | None) -> ContentRange:
    """Parse a `Content-Range`. Without the header, the body is the whole object."""
    if header is None:
        return ContentRange(0, None, None)
    match = _CONTENT_RANGE.fullmatch(header.strip())
    if match is None:
        raise invalid(f"Failed to parse Content-Range header: {header}")
    first, last, total = match.groups()
    start = None if first is None else int(first)
    end = None if last in (None, "*") else int(last) + 1
    size = None if total == "*" else int(total)
    known = [number for number in (start, end, size) if number is not None]
    if known != sorted(known):
        raise invalid(f"Failed to parse Content-Range header: {header}")
    return ContentRange(start, end, size)


def start_upload(state: State, request: Request) -> Response:
    """Start an upload. Preconditions are checked now, and again when the object is complete."""
    resource = request.json()
    bucket, name = request.params["bucket"], name_for(request, resource)
    check_object_name(name)
    preconditions = from_query(request.query)
    preconditions.check(state.find(bucket, name))
    content_type = request.headers.get("x-upload-content-type")
    upload = ResumableUpload(
        upload_id=secrets.token_urlsafe(48),
        bucket=bucket,
        name=name,
        attributes=attributes_for(request, resource, content_type),
        declared=merge_declared(
            read_checksum_fields(resource), read_checksum_headers(request.headers)
        ),
        preconditions=preconditions,
        started_us=state.now(),
        size=read_integer(request.headers, "x-upload-content-length"),
    )
    upload.digest = Digest(with_md5=state.needs_md5(upload.declared))
    state.journal.put_resumable(upload)
    state.resumable_uploads[upload.upload_id] = upload
    query = urlencode({"uploadType": "resumable", "name": name, "upload_id": upload.upload_id})
    path = f"/upload/storage/v1/b/{quote(bucket, safe='')}/o?{query}"
    headers = (("Location", request.base_url + path), ("X-GUploader-UploadID", upload.upload_id))
    return Response(headers=headers)


def continue_upload(state: State, request: Request) -> Response:
    """Persist the bytes of a request, or report the persisted range if there is no body.

    If the upload is finished already, return its object.
    """
    upload = _find_upload(state, request)
    if upload.resource is not None:
        return resource_response(request, dict(upload.resource))
    content_range = parse_content_range(request.headers.get("content-range"))
    length = request.size
    if "content-range" not in request.headers:
        content_range = ContentRange(0, length, length)
    _check_range(upload, content_range, length)
    if content_range.size is not None:
        upload.size = content_range.size
    if content_range.start is not None:
        receive(state, upload, content_range.start, request.pieces)
    if upload.size is None or upload.received < upload.size:
        if content_range.start is not None:
            state.journal.put_resumable(upload)
        return _incomplete(upload)
    upload.declared = merge_declared(upload.declared, read_checksum_headers(request.headers))
    return _finish(state, request, upload)


def cancel_upload(state: State, request: Request) -> Response:
    upload = _find_upload(state, request)
    _drop(state, upload)
    return Response(status=499)


def receive(state: State, upload: ResumableUpload, start: int, pieces: Sequence[Buffer]) -> None:
    """Persist the bytes of a request, except bytes that are already persisted.

    The first byte has the position `start` in the object. Bytes after the last multiple of 256 KiB
    are dropped, unless the object is complete. If bytes before `start` are missing, raise APIError
    (503).
    """
    if start > upload.received:
        message = (
            "Invalid request. According to the Content-Range header, the upload offset is "
            f"{start} byte(s), which exceeds already uploaded size of {upload.received} byte(s)."
        )
        raise APIError(503, "backendError", message)
    end = start + sum(map(len, pieces))
    if end != upload.size:
        end -= end % STEP_BYTES
    if end <= upload.received:
        return
    new = slice_pieces(pieces, upload.received - start, end - start)
    for piece in new:
        upload.digest.update(piece)
    upload.pieces.append(state.blobs.put(new))
    upload.received = end


def _check_range(upload: ResumableUpload, sent: ContentRange, length: int) -> None:
    """Raise APIError (400) if a Content-Range contradicts the body or an earlier request."""
    if sent.start is None and length:
        raise invalid("A request without a range of bytes has a body.")
    if sent.start is not None and sent.end not in (None, sent.start + length):
        raise invalid(f"Content-Range does not fit the Content-Length of {length} byte(s).")
    if sent.size not in (None, upload.size) and upload.size is not None:
        message = f"The size of the object was {upload.size} byte(s), and now is {sent.size}."
        raise invalid(message)
    size = upload.size if sent.size is None else sent.size
    end = upload.received if sent.start is None else sent.start + length
    if size is not None and end > size:
        raise invalid(f"More than {size} byte(s) were sent.")
    if sent.start is not None and end != size and length < STEP_BYTES:
        message = (
            "Invalid request. The number of bytes uploaded is required to be equal or greater "
            f"than {STEP_BYTES}, except for the final request (it's recommended to be the exact "
            f"multiple of {STEP_BYTES}). The received request contained {length} bytes, which "
            "does not meet this requirement."
        )
        raise invalid(message)


def _incomplete(upload: ResumableUpload) -> Response:
    """Build the 308 with the persisted range. Without persisted bytes, `Range` is missing."""
    persisted = (("Range", f"bytes=0-{upload.received - 1}"),) if upload.received else ()
    headers = (*persisted, ("X-GUploader-UploadID", upload.upload_id))
    return Response(status=308, headers=headers)


def _finish(state: State, request: Request, upload: ResumableUpload) -> Response:
    """Commit the object. A wrong checksum deletes the upload, a failed precondition does not."""
    crc32c, md5 = upload.digest.crc32c, upload.digest.md5
    try:
        upload.declared.check(crc32c=crc32c, md5=md5)
    except APIError:
        _drop(state, upload)
        raise
    record = state.commit(
        upload.bucket,
        upload.name,
        state.blobs.concat(upload.pieces),
        crc32c=crc32c,
        md5=md5,
        attributes=upload.attributes,
        preconditions=upload.preconditions,
    )
    upload.resource = object_resource(record, request.base_url)
    pieces, upload.pieces = upload.pieces, []
    state.journal.put_resumable(upload)
    for blob in pieces:
        blob.discard()
    _drop_oldest(state)
    return resource_response(request, dict(upload.resource))


def _find_upload(state: State, request: Request) -> ResumableUpload:
    upload = state.resumable_uploads.get(request.query["upload_id"])
    if upload is None or upload.bucket != request.params["bucket"]:
        raise APIError(404, "notFound", "No such upload.", code="NoSuchUpload")
    return upload


def _drop(state: State, upload: ResumableUpload) -> None:
    state.journal.drop_resumable(upload)
    del state.resumable_uploads[upload.upload_id]
    for blob in upload.pieces:
        blob.discard()


def _drop_oldest(state: State) -> None:
    """Delete the oldest finished uploads, so that their number stays bounded."""
    uploads = state.resumable_uploads
    finished = [key for key, upload in uploads.items() if upload.resource is not None]
    for key in finished[:-_MAX_FINISHED]:
        state.journal.drop_resumable(uploads[key])
        del uploads[key]


_UPLOADS = "/upload/storage/v1/b/{bucket}/o"
_INSERT = "storage.objects.insert"
_SESSION = {"uploadType": "resumable", "upload_id": None}
_BARE_SESSION = {"upload_id": None}
ROUTES = (
    Route("POST", _UPLOADS, _INSERT, start_upload, query={"uploadType": "resumable"}),
    *(
        Route(method, _UPLOADS, _INSERT, handler, query=query)
        for query in (_SESSION, _BARE_SESSION)
        for method, handler in (
            ("PUT", continue_upload),
            ("POST", continue_upload),
            ("DELETE", cancel_upload),
        )
    ),
)

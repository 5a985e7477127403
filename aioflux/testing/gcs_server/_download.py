"""Downloads: headers, ranges, conditional requests and decompressive transcoding.

Source of transcoding: cloud.google.com/storage/docs/transcoding. GCS sends a decompressed object
without a Content-Length; here it has one. Its checksums are those of the stored bytes, as on GCS.
"""

from __future__ import annotations

import gzip
import re
import zlib
from email.utils import formatdate
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import Request, Response
from aioflux.testing.gcs_server._preconditions import check_http_conditions, has_http_conditions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.testing.gcs_server._records import ObjectRecord

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_RANGE = re.compile(r"bytes=(\d{0,4000})-(\d{0,4000})", re.ASCII | re.IGNORECASE)
_GZIP = re.compile(r"\s*gzip\s*(?!.*;\s*q=0(\.0*)?\s*(;|$))(;|$)")


def media_response(request: Request, record: ObjectRecord) -> Response:
    """Build the response with an object's bytes or the requested range; else 304, 412 or 416."""
    is_json = request.match.url.is_json
    if not record.prepared:
        record.prepared.extend(_media_blocks(record))
    block = record.prepared[0 if is_json else 1]
    headers = request.headers
    if has_http_conditions(headers):
        etag = record.etag if is_json else record.xml_etag
        check_http_conditions(headers, etag, record.updated_us)
    if record.attributes.content_encoding == "gzip" and not may_stay_compressed(headers, record):
        return _decompressed(record, block)
    found = parse_range(headers.get("range"), record.size)
    if found is None:
        return Response(block=block, body=record.blob.views(0, record.size))
    start, end = found
    content_range = ("Content-Range", f"bytes {start}-{end - 1}/{record.size}")
    body = record.blob.views(start, end)
    return Response(status=206, headers=(content_range,), block=block, body=body)


def hash_headers(record: ObjectRecord) -> list[tuple[str, str]]:
    """Return the response headers by which clients check an XML write."""
    return [
        ("ETag", record.xml_etag),
        ("x-goog-generation", str(record.generation)),
        ("x-goog-metageneration", str(record.metageneration)),
        *record.hash_headers(),
    ]


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Resolve a Range header against an object's size.

    Args:
        header: Value of the header; None if it was not sent.
        size: Size of the object in bytes.

    Returns:
        The range `[start, end)`, clipped to the object, or None for the whole object: no header,
        or one that HTTP ignores (malformed, or of several ranges).

    Raises:
        APIError: 416, no byte of the object is in the range.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        start, end = max(size - int(last), 0), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= end:
        message = "The requested range cannot be satisfied."
        content_range = ("Content-Range", f"bytes */{size}")
        raise APIError(416, "requestedRangeNotSatisfiable", message, headers=(content_range,))
    return start, end


def may_stay_compressed(headers: Mapping[str, str], record: ObjectRecord) -> bool:
    """Return whether an object whose Content-Encoding is gzip is sent as it is stored."""
    if "no-transform" in (record.attributes.cache_control or ""):
        return True
    accepted = headers.get("accept-encoding", "").lower().split(",")
    return any(_GZIP.match(coding) for coding in accepted)


def _decompressed(record: ObjectRecord, block: bytes) -> Response:
    """Build the response with the decompressed object, whole: GCS ignores a range here.

    Bytes that are not gzip, whatever their Content-Encoding, are sent as they are.
    """
    stored = record.blob.view(0, record.size)
    try:
        body = gzip.decompress(stored)
    except (OSError, EOFError, zlib.error):
        return Response(block=block, body=stored)
    lines = block.splitlines(keepends=True)
    kept = (
        line for line in lines if not line.startswith((b"Content-Encoding:", b"Accept-Ranges:"))
    )
    headers = (
        ("Vary", "Accept-Encoding"),
        ("Warning", '214 UploadServer "gunzipped"'),
        ("x-guploader-response-body-transformations", "gunzipped"),
    )
    return Response(block=b"".join(kept), headers=headers, body=body)


def _media_blocks(record: ObjectRecord) -> tuple[bytes, bytes]:
    """Encode the headers of a download, once for the JSON and once for the XML API.

    Metadata whose name or value no header can have is left out: clients would reject the response.
    """
    attributes = record.attributes
    optional = {
        "Content-Encoding": attributes.content_encoding,
        "Content-Disposition": attributes.content_disposition,
        "Content-Language": attributes.content_language,
        "Cache-Control": attributes.cache_control,
    }
    headers = [
        ("Content-Type", attributes.content_type or "application/octet-stream"),
        *((name, value) for name, value in optional.items() if value is not None),
        *(
            (f"x-goog-meta-{name}", value)
            for name, value in attributes.metadata.items()
            if _TOKEN.fullmatch(name) and not _CONTROL.search(value)
        ),
        ("Last-Modified", formatdate(record.updated_us / 1e6, usegmt=True)),
        ("Accept-Ranges", "bytes"),
        ("x-goog-stored-content-encoding", attributes.content_encoding or "identity"),
        ("x-goog-stored-content-length", str(record.size)),
        ("x-goog-storage-class", attributes.storage_class),
    ]
    if record.component_count is not None:
        headers.append(("x-goog-component-count", str(record.component_count)))
    common = headers + hash_headers(record)[1:]
    text = "".join(f"{name}: {value}\r\n" for name, value in common)
    etags = (record.etag, record.xml_etag)
    json_block, xml_block = (f"{text}ETag: {etag}\r\n".encode() for etag in etags)
    return json_block, xml_block

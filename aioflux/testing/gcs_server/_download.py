"""Downloads: headers, ranges, conditional requests and decompressive transcoding.

Transcoding decompresses gzip objects for clients that do not accept gzip
(cloud.google.com/storage/docs/transcoding). The headers have the checksums of the stored bytes, as
on GCS. Unlike GCS, this server sends `Content-Length` with decompressed objects.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping
from email.utils import formatdate
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import Request, Response
from aioflux.testing.gcs_server._preconditions import check_http_conditions, has_http_conditions

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import ObjectRecord

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_RANGE = re.compile(r"bytes=(\d{0,4000})-(\d{0,4000})", re.ASCII | re.IGNORECASE)
_GZIP = re.compile(r"\s*gzip\s*(?!.*;\s*q=0(\.0*)?\s*(;|$))(;|$)")


def media_response(request: Request, record: ObjectRecord) -> Response:
    """Build the response with an object or a range of it.

    Raises:
        APIError: 304 or 412, a condition does not hold; 416, the range has no byte of the object.
    """
    is_json = request.match.url.is_json
    if not record.media_headers:
        record.media_headers.extend(_media_blocks(record))
    block = record.media_headers[0 if is_json else 1]
    headers = request.headers
    if has_http_conditions(headers):
        etag = record.etag if is_json else record.xml_etag
        check_http_conditions(headers, etag, record.updated_us)
    if record.attributes.content_encoding == "gzip" and not may_stay_compressed(headers, record):
        return _decompressed_response(record, block)
    byte_range = parse_range(headers.get("range"), record.size)
    if byte_range is None:
        return Response(block=block, body=record.blob.views(0, record.size))
    start, end = byte_range
    content_range = ("Content-Range", f"bytes {start}-{end - 1}/{record.size}")
    body = record.blob.views(start, end)
    return Response(status=206, headers=(content_range,), block=block, body=body)


def hash_headers(record: ObjectRecord) -> list[tuple[str, str]]:
    """Return the response headers of a write in the XML API: ETag, generation and checksums."""
    return [
        ("ETag", record.xml_etag),
        ("x-goog-generation", str(record.generation)),
        ("x-goog-metageneration", str(record.metageneration)),
        *record.hash_headers(),
    ]


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Parse a `Range` header.

    Args:
        header: Value of the header, None if the request has none.
        size: Size of the object in bytes.

    Returns:
        The range `[start, end)` within the object. None means the whole object: the header is
        missing, is malformed, or has several ranges.

    Raises:
        APIError: 416, the range has no byte of the object.
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
    """Return whether to send a gzip object without decompressing it."""
    if "no-transform" in (record.attributes.cache_control or ""):
        return True
    accepted = headers.get("accept-encoding", "").lower().split(",")
    return any(_GZIP.match(coding) for coding in accepted)


def _decompressed_response(record: ObjectRecord, block: bytes) -> Response:
    """Build the response with the whole decompressed object; like GCS, ignore a range.

    Bytes that are not in gzip format are sent unchanged.
    """
    stored = record.blob.view(0, record.size)
    try:
        body = gzip.decompress(stored)
    except (OSError, EOFError, zlib.error):
        return Response(block=block, body=stored)
    removed = (b"Content-Encoding:", b"Accept-Ranges:")
    lines = (line for line in block.splitlines(keepends=True) if not line.startswith(removed))
    headers = (
        ("Vary", "Accept-Encoding"),
        ("Warning", '214 UploadServer "gunzipped"'),
        ("x-guploader-response-body-transformations", "gunzipped"),
    )
    return Response(block=b"".join(lines), headers=headers, body=body)


def _media_blocks(record: ObjectRecord) -> tuple[bytes, bytes]:
    """Encode the headers of a download for the JSON API and for the XML API.

    Metadata that is not valid in a header is omitted, because clients would reject the response.
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

"""Objects as response headers and as the answer to a download."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import formatdate
from functools import lru_cache
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._conditional import check_conditions, has_conditions
from aioflux.testing.gcs_server._messages import Request, Response
from aioflux.testing.gcs_server._ranges import parse_range
from aioflux.testing.gcs_server._transcode import may_stay_compressed, transcoded

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._records import ObjectRecord

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def timestamp(microseconds: int) -> str:
    """Write a time as the JSON API does: RFC 3339 with milliseconds."""
    seconds, fraction = divmod(microseconds, 1_000_000)
    return f"{_second(seconds)}.{fraction // 1000:03}Z"


@lru_cache(maxsize=4096)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat()


def hash_headers(record: ObjectRecord) -> list[tuple[str, str]]:
    """Write what an XML client checks after a write."""
    headers = [
        ("ETag", xml_etag(record)),
        ("x-goog-generation", str(record.generation)),
        ("x-goog-metageneration", str(record.metageneration)),
        ("x-goog-hash", f"crc32c={record.crc32c_base64}"),
    ]
    if record.md5_base64:
        headers.append(("x-goog-hash", f"md5={record.md5_base64}"))
    return headers


def xml_etag(record: ObjectRecord) -> str:
    """Write the ETag of the XML API: the MD5 in hex, or the JSON one where there is none."""
    return f'"{record.md5.hex() if record.md5 else record.etag}"'


def media_response(request: Request, record: ObjectRecord) -> Response:
    """Answer with an object's bytes, or the range of them that is asked for.

    Both APIs read through here: conditional requests (`If-Match` and its kin), ranges and
    decompressive transcoding are those of HTTP and alike in both.

    Raises:
        APIError: 304, 412 or 416.
    """
    is_json = request.match.url.is_json
    if not record.prepared:
        record.prepared.extend(_media_blocks(record))
    block = record.prepared[0 if is_json else 1]
    headers = request.headers
    if has_conditions(headers):
        check_conditions(headers, record.etag if is_json else xml_etag(record), record.updated_us)
    if record.attributes.content_encoding == "gzip" and not may_stay_compressed(headers, record):
        return transcoded(record, block)
    extent = parse_range(headers.get("range"), record.size)
    if extent is None:
        return Response(block=block, body=record.blob.views(0, record.size))
    start, end = extent
    content_range = ("Content-Range", f"bytes {start}-{end - 1}/{record.size}")
    body = record.blob.views(start, end)
    return Response(status=206, headers=(content_range,), block=block, body=body)


def _media_blocks(record: ObjectRecord) -> tuple[bytes, bytes]:
    """Encode the headers of a download, once for the JSON and once for the XML API.

    Metadata whose name or value no header can have is left out: clients refuse the whole answer.
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
    etags = (record.etag, xml_etag(record))
    json_block, xml_block = (f"{text}ETag: {etag}\r\n".encode() for etag in etags)
    return json_block, xml_block

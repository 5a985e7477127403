"""Requests and responses of the XML multipart API of GCS and S3. No I/O.

Sources: cloud.google.com/storage/docs/multipart-uploads and
docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_plus

from aioflux._services.xml_reader import read_xml
from aioflux._values.checksums import combine_crc32c
from aioflux._values.meta import OpenUpload

if TYPE_CHECKING:
    from aioflux._services.base import UploadedPart


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


def combined_crc32c(parts: Sequence[UploadedPart]) -> int | None:
    """Return the crc32c of the concatenation of parts; None if a part has no known crc32c."""
    checksum = 0
    for part in parts:
        if part.crc32c is None:
            return None
        checksum = combine_crc32c(checksum, part.crc32c, part.size)
    return checksum

"""The XML multipart protocol of GCS and S3: targets, bodies and responses. No I/O.

Source: cloud.google.com/storage/docs/multipart-uploads;
docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_plus
from xml.sax.saxutils import escape

from aioflux._values.checksums import combine_crc32c
from aioflux._values.meta import OpenUpload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._services.base import UploadedPart

__all__ = [
    "combined_crc32c",
    "complete_body",
    "list_uploads_target",
    "local_name",
    "parse_error",
    "parse_fields",
    "parse_uploads",
    "parse_xml",
    "part_target",
    "texts_of",
    "upload_target",
]


def part_target(path: bytes, upload_id: str, number: int) -> bytes:
    """Return the target of a request for one part."""
    return b"%b?partNumber=%d&uploadId=%b" % (path, number, quote(upload_id, safe="").encode())


def upload_target(path: bytes, upload_id: str) -> bytes:
    """Return the target of a request that completes or aborts an upload."""
    return b"%b?uploadId=%b" % (path, quote(upload_id, safe="").encode())


def list_uploads_target(
    bucket_path: bytes, *, prefix: str, key_marker: str, id_marker: str, is_encoded: bool = False
) -> bytes:
    """Return the target of a request that lists open uploads.

    Args:
        bucket_path: Path of the bucket.
        prefix: Prefix of keys.
        key_marker: Key of the last upload of the previous page.
        id_marker: Its id.
        is_encoded: Request percent-encoded keys, since XML cannot hold all of them.
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
    """Return the body of a request that completes an upload: all parts, by number."""
    rows = "".join(
        f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag></Part>"
        for part in parts
    )
    return f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()


def parse_xml(data: bytes | bytearray | memoryview | str) -> ET.Element:
    """Parse a response.

    Raises:
        ValueError: It is not XML.
    """
    try:
        # Of the service; expat rejects entity bombs since 2.4.1. Some begin with a byte order mark.
        text = data if isinstance(data, str) else bytes(data).removeprefix(b"\xef\xbb\xbf")
        return ET.fromstring(text)  # noqa: S314
    except ET.ParseError as exc:
        raise ValueError(f"the response is not XML: {exc}") from exc


def local_name(element: ET.Element) -> str:
    """Return the name of an element, without its namespace."""
    return element.tag.rpartition("}")[2]


def texts_of(element: ET.Element) -> dict[str, str]:
    """Return the texts directly below an element, by name."""
    return {local_name(child): child.text or "" for child in element}


def parse_fields(data: bytes | bytearray | memoryview) -> dict[str, str]:
    """Return the fields directly below the root of an XML response, without namespaces.

    Raises:
        ValueError: The body is not XML.
    """
    return texts_of(parse_xml(data))


def parse_error(data: bytes | bytearray | memoryview) -> tuple[str, str]:
    """Return (code, message) of an XML error body; empty strings if it is malformed."""
    try:
        fields = parse_fields(data)
    except ValueError:
        return "", ""
    return fields.get("Code", ""), fields.get("Details") or fields.get("Message", "")


def parse_uploads(
    data: bytes | bytearray | memoryview, *, is_encoded: bool = False
) -> tuple[list[OpenUpload], str, str]:
    """Return the uploads of one page, with whole keys, and the two markers of the next page.

    Args:
        data: The page.
        is_encoded: Percent-encoded keys were requested.

    Raises:
        ValueError: The body is not such a page.
    """
    root = parse_xml(data)
    is_encoded = is_encoded and any(
        local_name(child) == "EncodingType" and child.text == "url" for child in root
    )
    if local_name(root) != "ListMultipartUploadsResult":
        raise ValueError(f"the response is <{local_name(root)}>, not a page of uploads")
    uploads: list[OpenUpload] = []
    for child in root:
        if local_name(child) == "Upload":
            fields = texts_of(child)
            time = datetime.fromisoformat(fields["Initiated"])
            uploads.append(
                OpenUpload(
                    key=unquote_plus(fields["Key"]) if is_encoded else fields["Key"],
                    upload_id=fields["UploadId"],
                    initiated=time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC),
                )
            )
    fields = texts_of(root)
    if fields.get("IsTruncated", "").lower() != "true":
        return uploads, "", ""
    marker = fields.get("NextKeyMarker", "")
    if is_encoded:
        marker = unquote_plus(marker)
    if not marker and uploads:
        marker = uploads[-1].key  # SeaweedFS does not return it
    if not marker:
        raise ValueError("the response is truncated, and has no marker of the next page")
    return uploads, marker, fields.get("NextUploadIdMarker", "")


def combined_crc32c(parts: Sequence[UploadedPart]) -> int | None:
    """Return the crc32c of the concatenation of parts; None if one has none."""
    whole = 0
    for part in parts:
        if part.crc32c is None:
            return None
        whole = combine_crc32c(whole, part.crc32c, part.size)
    return whole

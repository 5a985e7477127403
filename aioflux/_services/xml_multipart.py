"""The XML multipart protocol that GCS and S3 share: targets, bodies and answers. No I/O.

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
    "initiate_target",
    "list_uploads_target",
    "parse_error",
    "parse_fields",
    "parse_uploads",
    "part_target",
    "upload_target",
]


def initiate_target(path: bytes) -> bytes:
    """Return the request target that begins an upload."""
    return path + b"?uploads"


def part_target(path: bytes, upload_id: str, number: int) -> bytes:
    """Return the request target of one part."""
    return b"%b?partNumber=%d&uploadId=%b" % (path, number, quote(upload_id, safe="").encode())


def upload_target(path: bytes, upload_id: str) -> bytes:
    """Return the request target of an upload as a whole: to complete, abort or list it."""
    return b"%b?uploadId=%b" % (path, quote(upload_id, safe="").encode())


def list_uploads_target(
    bucket_path: bytes, *, prefix: str, key_marker: str, id_marker: str, is_encoded: bool = False
) -> bytes:
    """Return the request target that lists open uploads.

    Args:
        bucket_path: Path of the bucket.
        prefix: What keys begin with.
        key_marker: Key of the last upload of the page before.
        id_marker: Its id.
        is_encoded: Keys are to come percent-encoded, since XML cannot hold all of them.
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
    """Return the body that completes an upload: every part, by number."""
    rows = "".join(
        f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag></Part>"
        for part in parts
    )
    return f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()


def _parse(data: bytes | bytearray | memoryview) -> ET.Element:
    try:
        # Answers of the service that was asked, over TLS; expat refuses entity bombs since 2.4.1.
        return ET.fromstring(bytes(data))  # noqa: S314
    except ET.ParseError as exc:
        raise ValueError(f"the service's answer is not XML: {exc}") from exc


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def parse_fields(data: bytes | bytearray | memoryview) -> dict[str, str]:
    """Return the fields directly below the root of an XML answer, without namespaces.

    Raises:
        ValueError: The body is not XML.
    """
    return {_local(child.tag): child.text or "" for child in _parse(data)}


def parse_error(data: bytes | bytearray | memoryview) -> tuple[str, str]:
    """Return (code, message) of an XML error body; empty strings where it is none."""
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
        is_encoded: Its keys were asked for percent-encoded.

    Raises:
        ValueError: The body is no such page.
    """
    root = _parse(data)
    is_encoded = is_encoded and any(
        _local(child.tag) == "EncodingType" and child.text == "url" for child in root
    )
    if _local(root.tag) != "ListMultipartUploadsResult":
        raise ValueError(f"the service's answer is <{_local(root.tag)}>, not a page of uploads")
    uploads: list[OpenUpload] = []
    for child in root:
        if _local(child.tag) == "Upload":
            fields = {_local(part.tag): part.text or "" for part in child}
            begun = datetime.fromisoformat(fields["Initiated"])
            uploads.append(
                OpenUpload(
                    key=unquote_plus(fields["Key"]) if is_encoded else fields["Key"],
                    upload_id=fields["UploadId"],
                    initiated=begun.astimezone(UTC) if begun.tzinfo else begun.replace(tzinfo=UTC),
                )
            )
    fields = {_local(child.tag): child.text or "" for child in root}
    if fields.get("IsTruncated", "").lower() != "true":
        return uploads, "", ""
    marker = fields.get("NextKeyMarker", "")
    if is_encoded:
        marker = unquote_plus(marker)
    if not marker and uploads:
        marker = uploads[-1].key  # SeaweedFS does not tell it
    if not marker:
        raise ValueError("the service's answer is cut off, and does not tell where it goes on")
    return uploads, marker, fields.get("NextUploadIdMarker", "")


def combined_crc32c(parts: Sequence[UploadedPart]) -> int | None:
    """Return the crc32c of parts one after the other; None where one has none."""
    whole = 0
    for part in parts:
        if part.crc32c is None:
            return None
        whole = combine_crc32c(whole, part.crc32c, part.size)
    return whole

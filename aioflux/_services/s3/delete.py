"""Deletes of many objects with one request of S3 (DeleteObjects).

Source: docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from aioflux._services.http import DELETE_SECONDS
from aioflux._services.status import malformed_response
from aioflux._services.xml_multipart import local_name, parse_xml, texts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aioflux._services.s3.sender import S3Sender
    from aioflux._services.s3.wire import Pin

__all__ = ["can_be_xml", "delete_body", "delete_many", "digest_header", "parse_deletions"]

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


async def delete_many(
    sender: S3Sender, rows: Sequence[tuple[str, Pin]], *, uri: str
) -> Mapping[str, tuple[str, str]]:
    """Delete names, which XML can hold; return code and message of each that was not deleted."""
    action = "delete objects of"
    body = delete_body(rows)
    response = await sender.send(
        b"POST",
        b"?delete",
        action,
        "",
        headers=[(b"Content-Type", b"application/xml"), digest_header(body)],
        body=body,
        head_seconds=DELETE_SECONDS,
    )
    try:
        return parse_deletions(response.body)
    except ValueError as exc:
        raise malformed_response(action, uri, f"the response cannot be read ({exc})") from exc


def delete_body(objects: Iterable[tuple[str, Pin]]) -> bytes:
    """Return the body of the request; in the quiet mode the response has only the failures."""
    rows: list[str] = []
    for name, pin in objects:
        tag = f"<ETag>{escape(pin.etag)}</ETag>" if pin.etag else ""
        # Line ends and tabs would otherwise be normalized.
        key = escape(name, {"\r": "&#13;", "\n": "&#10;", "\t": "&#9;"})
        rows.append(f"<Object><Key>{key}</Key>{tag}</Object>")
    return f"<Delete><Quiet>true</Quiet>{''.join(rows)}</Delete>".encode()


def digest_header(body: bytes) -> tuple[bytes, bytes]:
    """Return the MD5 header, which S3 requires; all servers accept it."""
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return b"Content-MD5", base64.b64encode(digest)


def can_be_xml(name: str) -> bool:
    """Return whether XML can hold a name: no control characters, nor two others."""
    return _NOT_XML.search(name) is None


def parse_deletions(data: bytes | bytearray | memoryview) -> dict[str, tuple[str, str]]:
    """Return code and message of each name that was not deleted.

    Raises:
        ValueError: The body is not a response to this request.
    """
    root = parse_xml(data)
    if local_name(root) != "DeleteResult":
        raise ValueError(f"it is <{local_name(root)}>")
    failed: dict[str, tuple[str, str]] = {}
    for child in root:
        if local_name(child) == "Error":
            fields = texts_of(child)
            failed[fields.get("Key", "")] = fields.get("Code", ""), fields.get("Message", "")
    return failed

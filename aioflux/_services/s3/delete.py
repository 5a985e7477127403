"""Deletes of many S3 objects by one DeleteObjects request.

Source: docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from aioflux._services.http import DELETE_SECONDS
from aioflux._services.sender import MAX_PAGE_BYTES
from aioflux._services.status import malformed_response
from aioflux._services.xml_reader import read_xml

if TYPE_CHECKING:
    from aioflux._services.s3.sender import S3Sender
    from aioflux._services.s3.wire import Pin

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


async def delete_many(
    sender: S3Sender, rows: Sequence[tuple[str, Pin]], *, uri: str
) -> Mapping[str, tuple[str, str]]:
    """Delete objects, and return the error code and message of each one that was not deleted.

    The result is keyed by full name. `rows` has the full name and the pin of each object;
    `fits_xml` must be true for each name.
    """
    action = "delete objects of"
    body = delete_body(rows)
    response = await sender.send(
        b"POST",
        b"?delete",
        action,
        "",
        headers=[(b"Content-Type", b"application/xml"), digest_header(body)],
        body=body,
        max_body_bytes=MAX_PAGE_BYTES,
        head_seconds=DELETE_SECONDS,
    )
    try:
        return parse_deletions(response.body)
    except ValueError as exc:
        raise malformed_response(action, uri, exc) from exc


def delete_body(objects: Iterable[tuple[str, Pin]]) -> bytes:
    """Return the body of the request, in quiet mode: the response contains only the failures."""
    from xml.sax.saxutils import escape  # takes 8 ms to import

    rows: list[str] = []
    for name, pin in objects:
        tag = f"<ETag>{escape(pin.etag)}</ETag>" if pin.etag else ""
        # XML parsers may change line ends and tabs that are not escaped.
        key = escape(name, {"\r": "&#13;", "\n": "&#10;", "\t": "&#9;"})
        rows.append(f"<Object><Key>{key}</Key>{tag}</Object>")
    return f"<Delete><Quiet>true</Quiet>{''.join(rows)}</Delete>".encode()


def digest_header(body: bytes) -> tuple[bytes, bytes]:
    """Return the MD5 header. S3 requires a checksum of the body, and all servers accept MD5."""
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return b"Content-MD5", base64.b64encode(digest)


def fits_xml(name: str) -> bool:
    """Return whether XML 1.0 can represent a name.

    It cannot represent U+FFFE, U+FFFF, and characters below U+0020 except tab, line feed and
    carriage return.
    """
    return _NOT_XML.search(name) is None


def parse_deletions(data: bytes | bytearray | memoryview) -> dict[str, tuple[str, str]]:
    """Return the error code and message of each object that was not deleted, by full name.

    Raises:
        ValueError: The body is not a response of DeleteObjects.
    """
    failed: dict[str, tuple[str, str]] = {}

    def add(error: Mapping[str, str]) -> None:
        failed[error.get("Key", "")] = error.get("Code", ""), error.get("Message", "")

    root, _ = read_xml(data, {"Error": add, "Deleted": lambda _: None})
    if root != "DeleteResult":
        raise ValueError(f"the root element is <{root}>")
    return failed

"""Writes of S3 that need more than one PUT: copies, deletes of many objects, preconditions.

Ceph radosgw 18.2 and DigitalOcean Spaces accept `If-Match` only without quotes around the ETag.
Some gateways to other storage ignore preconditions of writes.
Source: docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from aioflux._services.base import UploadedPart
from aioflux._services.http import DELETE_SECONDS
from aioflux._services.responses import malformed_response
from aioflux._services.s3.wire import quote_name
from aioflux._services.sender import MAX_PAGE_BYTES
from aioflux._services.xml_reader import read_xml
from aioflux.errors import StorageError, UnsupportedError

if TYPE_CHECKING:
    from aioflux._services.base import Precondition, Service, WriteRequest
    from aioflux._services.s3.sender import S3Sender
    from aioflux._services.s3.wire import Pin
    from aioflux._values.meta import ObjectMeta

MAX_COPY_BYTES = 5 * 1024**3
"""Largest object that one CopyObject request copies
(docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html)."""

_PART_BYTES: Final = 512 * 1024**2
_MAX_IN_FLIGHT: Final = 8
"""Largest number of concurrent requests of one multipart copy."""


def copy_headers(bucket: str, name: str, pin: Pin) -> list[tuple[bytes, bytes]]:
    """Return the headers that name the source of a copy."""
    source = b"/" + quote(bucket, safe="").encode() + quote_name(name)
    if pin.version:
        source += b"?versionId=" + quote(pin.version, safe="").encode()
    headers = [(b"x-amz-copy-source", source)]
    if pin.etag:
        headers.append((b"x-amz-copy-source-if-match", pin.quoted))
    return headers


def plan_copy(size: int, part_bytes: int = _PART_BYTES) -> list[tuple[int, int]]:
    """Cut `[0, size)` into the ranges of the parts."""
    return [(start, min(start + part_bytes, size)) for start in range(0, size, part_bytes)]


async def copy_by_parts(
    service: Service,
    put_part_copy: Callable[..., Awaitable[str]],
    request: WriteRequest,
    size: int,
    source_headers: Sequence[tuple[bytes, bytes]],
) -> ObjectMeta:
    """Copy an object of `size` bytes by a multipart upload; abort the upload on failure."""
    key = request.key
    upload_id = await service.initiate_upload(request)
    slots = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def copy_part(number: int, start: int, end: int) -> UploadedPart:
        headers = [*source_headers, (b"x-amz-copy-source-range", b"bytes=%d-%d" % (start, end - 1))]
        async with slots:
            etag = await put_part_copy(key, upload_id, number, headers)
        return UploadedPart(number, etag, end - start)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(copy_part(number, start, end))
                for number, (start, end) in enumerate(plan_copy(size), 1)
            ]
        parts = [task.result() for task in tasks]
        return await service.complete_upload(request, upload_id, parts)
    except BaseException as exc:
        failure = exc.exceptions[0] if isinstance(exc, BaseExceptionGroup) else exc
        try:
            await asyncio.shield(service.abort_upload(key, upload_id))
        except StorageError as abort_error:
            failure.add_note(
                f"the upload could not be aborted ({abort_error}); `Store.clean` aborts it later"
            )
        if failure is exc:
            raise
        raise failure from None


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


unquoted_endpoints: set[str] = set()
"""Endpoints that accept `If-Match` only without quotes around the ETag."""

_warned: set[str] = set()
"""Servers, by endpoint and bucket, for which `reject_ignored_condition` issued a warning."""


def reject_ignored_condition(
    precondition: Precondition, *, uri: str, server: str, is_required: bool, warns: bool
) -> None:
    """Raise for a write whose precondition the server ignores, if `is_required`.

    Otherwise issue a warning, once for each server (endpoint and bucket), if `warns`.
    """
    if precondition.if_absent:
        header, effect = "If-None-Match", 'mode="create" would replace an object that exists'
    else:
        header, effect = "If-Match", "if_generation_match would replace an object that changed"
    if is_required:
        raise UnsupportedError(
            f"could not write {uri}: {server} does not compare {header} when it writes, so that "
            f"{effect}; use a server that compares it, or, if an object never has two writers at "
            "the same time, allow the write with S3Access(require_conditions=False)",
            uri=uri,
        )
    if warns and server not in _warned:
        _warned.add(server)
        warnings.warn(
            f"{server} does not compare {header} when it writes: aioflux reads the metadata "
            "before each conditional write, and two writers of one object at the same time both "
            "succeed (S3Access.require_conditions is False)",
            RuntimeWarning,
            stacklevel=2,
        )

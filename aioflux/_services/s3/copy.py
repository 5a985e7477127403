"""Copies on S3: headers that name the source, and multipart copies of large objects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from aioflux._services.base import UploadedPart
from aioflux._services.s3.wire import quote_name
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from aioflux._services.base import WriteRequest
    from aioflux._services.s3.service import S3Service
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
    service: S3Service,
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
            etag = await service.put_part_copy(key, upload_id, number, headers)
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

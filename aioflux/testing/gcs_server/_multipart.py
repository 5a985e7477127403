"""XML multipart uploads as changes of the state; it knows nothing of HTTP.

Source: cloud.google.com/storage/docs/multipart-uploads. An upload takes no precondition, never
expires, and its completion replaces whatever object has the name.
"""

from __future__ import annotations

import secrets
from itertools import pairwise
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._checksums import Declared, combine_crc32c, hash_pieces
from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._names import check_object_name
from aioflux.testing.gcs_server._records import Attributes, MultipartUpload, ObjectRecord, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.testing.gcs_server._messages import Buffer
    from aioflux.testing.gcs_server._state import State

MAX_PARTS = 10_000
MIN_PART_BYTES = 5 * 1024**2
MAX_PART_BYTES = 5 * 1024**3


def begin(state: State, bucket: str, name: str, attributes: Attributes) -> MultipartUpload:
    """Begin an upload; its id sorts by the time at which it began.

    Raises:
        APIError: 404 or 400.
    """
    state.bucket(bucket)
    check_object_name(name)
    upload = MultipartUpload(
        upload_id=f"{state.next_generation():014x}-{secrets.token_urlsafe(24)}",
        bucket=bucket,
        name=name,
        attributes=attributes,
        started_us=state.now(),
    )
    state.journal.put_multipart(upload)
    state.multipart_uploads[upload.upload_id] = upload
    return upload


def find(state: State, bucket: str, name: str, upload_id: str) -> MultipartUpload:
    """Return an open upload of an object.

    Raises:
        APIError: 404.
    """
    state.bucket(bucket)
    upload = state.multipart_uploads.get(upload_id)
    if upload is None or (upload.bucket, upload.name) != (bucket, name):
        message = "The requested upload was not found."
        raise APIError(404, "notFound", message, code="NoSuchUpload")
    return upload


def put_part(
    state: State,
    upload: MultipartUpload,
    number: int,
    pieces: Sequence[Buffer],
    declared: Declared,
) -> Part:
    """Store a part; one sent again replaces the first.

    Raises:
        APIError: 400: its number, its size or a checksum.
    """
    if not 1 <= number <= MAX_PARTS:
        raise _refused(
            "InvalidArgument", f"Part number must be an integer between 1 and {MAX_PARTS}."
        )
    if sum(map(len, pieces)) > MAX_PART_BYTES:
        raise _refused("EntityTooLarge", f"A part may have {MAX_PART_BYTES} bytes at most.")
    crc32c, md5 = hash_pieces(pieces, with_md5=state.needs_md5(declared))
    declared.check(crc32c=crc32c, md5=md5)
    blob = state.blobs.put(pieces)
    part = Part(number=number, blob=blob, md5=md5, crc32c=crc32c, updated_us=state.now())
    state.journal.put_part(upload, part)
    old = upload.parts.get(number)
    upload.parts[number] = part
    if old is not None:
        old.blob.discard()
    return part


def complete(
    state: State, upload: MultipartUpload, listed: Sequence[tuple[int, str]]
) -> ObjectRecord:
    """Make the object of the parts that are listed; the upload is then gone, with the others.

    Args:
        state: Where the upload is.
        upload: The upload.
        listed: Number and ETag of each part.

    Raises:
        APIError: 400: the list, or the size of a part; the upload stays open.
    """
    parts = _judge(upload, listed)
    record = state.commit(
        upload.bucket,
        upload.name,
        state.blobs.concat([part.blob for part in parts]),
        crc32c=combine_crc32c((part.crc32c, part.blob.size) for part in parts),
        md5=None,
        attributes=upload.attributes,
    )
    state.drop_multipart(upload)
    return record


def _judge(upload: MultipartUpload, listed: Sequence[tuple[int, str]]) -> list[Part]:
    """Return the listed parts, if an object can be made of them."""
    if not listed:
        message = "You must specify at least one part."
        raise _refused("MalformedXML", message)
    numbers = [number for number, _ in listed]
    if any(left >= right for left, right in pairwise(numbers)):
        message = "The list of parts was not in ascending order."
        raise _refused("InvalidPartOrder", message)
    parts = []
    for number, etag in listed:
        part = upload.parts.get(number)
        if part is None or part.etag.strip('"') != etag.strip().strip('"'):
            message = f"Part {number} was not found, or its ETag did not match."
            raise _refused("InvalidPart", message)
        parts.append(part)
    small = next((part for part in parts[:-1] if part.blob.size < MIN_PART_BYTES), None)
    if small is not None:
        message = (
            f"Part {small.number} has {small.blob.size} bytes; all but the last need "
            f"{MIN_PART_BYTES}."
        )
        raise _refused("EntityTooSmall", message)
    return parts


def _refused(code: str, message: str) -> APIError:
    return APIError(400, "invalid", message, code=code)

"""JSON resources and errors of Google Cloud Storage. No I/O.

Apart from `wire`, because reads and writes of bytes need no msgspec, which takes 5 ms to import.
Source: cloud.google.com/storage/docs/json_api/v1/objects.
"""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

import msgspec

from aioflux._services.headers import decode_crc32c
from aioflux._values.listing import MAX_SIZE_BYTES
from aioflux._values.meta import ObjectMeta

T = TypeVar("T")

_PERMISSIONS = "storage#testIamPermissionsResponse"


class ObjectResource(msgspec.Struct, rename="camel"):
    """JSON resource of an object, with the fields that `ObjectMeta` has."""

    name: str
    size: str = "0"
    etag: str = ""
    generation: str = ""
    crc32c: str = ""
    updated: datetime | None = None
    content_type: str = ""
    content_encoding: str = ""
    storage_class: str = ""
    metadata: dict[str, str] = {}


class _Permissions(msgspec.Struct):
    """Response of `buckets.testIamPermissions`."""

    kind: str = ""
    permissions: list[str] = []


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class ErrorBody(msgspec.Struct):
    """Body of a JSON error response."""

    error: _ErrorDetail = msgspec.field(default_factory=_ErrorDetail)


def decode_json(decoder: msgspec.json.Decoder[T], data: bytes | bytearray | memoryview) -> T:
    """Decode JSON of a server.

    Raises:
        ValueError: The data is malformed, or nested too deeply.
    """
    try:
        return decoder.decode(data)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


_resource_decoder = msgspec.json.Decoder(ObjectResource)
_error_decoder = msgspec.json.Decoder(ErrorBody)
_permissions_decoder = msgspec.json.Decoder(_Permissions)


def decode_resource(data: bytes | bytearray | memoryview) -> ObjectResource:
    """Parse an object resource.

    Raises:
        ValueError: The resource is malformed.
    """
    return decode_json(_resource_decoder, data)


def decode_permissions(data: bytes | bytearray | memoryview) -> list[str]:
    """Parse the granted permissions; an empty list if the response has none.

    Raises:
        ValueError: The response is not a list of permissions.
    """
    response = decode_json(_permissions_decoder, data)
    if response.kind != _PERMISSIONS:
        raise ValueError(f"kind is {response.kind!r}")
    return response.permissions


def decode_error(data: bytes | bytearray | memoryview) -> str:
    """Return the message in a JSON error body; empty if the body is malformed."""
    try:
        return decode_json(_error_decoder, data).error.message
    except ValueError:
        return ""


def meta_from_resource(resource: ObjectResource, *, key: str, uri: str) -> ObjectMeta:
    """Build the metadata of an object from its JSON resource.

    Raises:
        ValueError: The size or the crc32c is malformed.
    """
    size = int(resource.size)
    if not 0 <= size <= MAX_SIZE_BYTES:
        raise ValueError(
            f"the size of the object is {size}, and not from 0 to {MAX_SIZE_BYTES} bytes"
        )
    return ObjectMeta(
        key=key,
        uri=uri,
        size=size,
        etag=resource.etag,
        generation=resource.generation,
        crc32c=decode_crc32c(resource.crc32c),
        updated=resource.updated,
        content_type=resource.content_type,
        content_encoding=resource.content_encoding,
        storage_class=resource.storage_class,
        metadata=resource.metadata,
    )

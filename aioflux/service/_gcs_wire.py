"""How Google Cloud Storage writes things: JSON resources, `x-goog-` headers, base64 checksums.

Sources: cloud.google.com/storage/docs/json_api/v1/objects and
cloud.google.com/storage/docs/xml-api/reference-headers.
"""

from __future__ import annotations

import binascii
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from aioflux._meta import ObjectMeta

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.service._base import Precondition

__all__ = [
    "LIST_FIELDS",
    "ErrorBody",
    "ListPage",
    "ObjectResource",
    "decode_crc32c",
    "decode_error",
    "decode_page",
    "decode_resource",
    "encode_crc32c",
    "hash_crc32c",
    "meta_from_headers",
    "meta_from_resource",
    "parse_http_date",
    "precondition_headers",
    "precondition_params",
    "quote_key",
]

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ITEM = "name,size,etag,generation,crc32c,updated,contentType,contentEncoding,storageClass,metadata"
LIST_FIELDS = f"items({_ITEM}),prefixes,nextPageToken"
"""The `fields=` mask of a listing: only what ObjectMeta holds."""


class ObjectResource(msgspec.Struct, rename="camel"):
    """The fields of a JSON object resource that become an ObjectMeta."""

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


class ListPage(msgspec.Struct, rename="camel"):
    """One page of `objects.list`."""

    items: list[ObjectResource] = []
    prefixes: list[str] = []
    next_page_token: str = ""


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class ErrorBody(msgspec.Struct):
    """The body of a JSON error."""

    error: _ErrorDetail = msgspec.field(default_factory=_ErrorDetail)


_page_decoder = msgspec.json.Decoder(ListPage)
_resource_decoder = msgspec.json.Decoder(ObjectResource)
_error_decoder = msgspec.json.Decoder(ErrorBody)


def decode_page(data: bytes | bytearray | memoryview) -> ListPage:
    """Parse a page of a listing."""
    return _page_decoder.decode(data)


def decode_resource(data: bytes | bytearray | memoryview) -> ObjectResource:
    """Parse an object resource."""
    return _resource_decoder.decode(data)


def decode_error(data: bytes | bytearray | memoryview) -> str:
    """Return the message of a JSON error body, or the empty string where it is none."""
    try:
        return _error_decoder.decode(data).error.message
    except msgspec.DecodeError:
        return ""


def quote_key(key: str) -> str:
    """Percent-encode a key for one segment of a JSON path; slashes too."""
    return quote(key, safe="")


def encode_crc32c(value: int) -> str:
    """Write a crc32c as base64 of 4 big-endian bytes."""
    return binascii.b2a_base64(value.to_bytes(4, "big"), newline=False).decode()


def decode_crc32c(text: str | bytes) -> int | None:
    """Read a base64 crc32c; None for an empty text."""
    return int.from_bytes(binascii.a2b_base64(text), "big") if text else None


def hash_crc32c(header: bytes | None) -> int | None:
    """Return the crc32c in an `x-goog-hash` header (`crc32c=...,md5=...`), or None."""
    if not header:
        return None
    at = header.find(b"crc32c=")
    return None if at < 0 else decode_crc32c(header[at + 7 : at + 15])


def meta_from_resource(resource: ObjectResource, *, key: str, uri: str) -> ObjectMeta:
    """Build the metadata of an object from its JSON resource."""
    return ObjectMeta(
        key=key,
        uri=uri,
        size=int(resource.size),
        etag=resource.etag,
        generation=resource.generation,
        crc32c=decode_crc32c(resource.crc32c),
        updated=resource.updated,
        content_type=resource.content_type,
        content_encoding=resource.content_encoding,
        storage_class=resource.storage_class,
        metadata=resource.metadata,
    )


def meta_from_headers(
    headers: Mapping[bytes, bytes], *, key: str, uri: str, size: int
) -> ObjectMeta:
    """Build the metadata of an object from the headers of an XML API answer."""

    def text(name: bytes) -> str:
        return (headers.get(name) or b"").decode("latin-1")

    changed = text(b"last-modified")
    return ObjectMeta(
        key=key,
        uri=uri,
        size=size,
        etag=text(b"etag").strip('"'),
        generation=text(b"x-goog-generation"),
        crc32c=hash_crc32c(headers.get(b"x-goog-hash")),
        updated=parse_http_date(changed) if changed else None,
        content_type=text(b"content-type"),
        content_encoding=text(b"x-goog-stored-content-encoding").replace("identity", ""),
        storage_class=text(b"x-goog-storage-class"),
    )


def parse_http_date(text: str) -> datetime | None:
    """Read the fixed form of an HTTP date (RFC 9110, 5.6.7), or None where it is another.

    A fraction of the cost of `email.utils.parsedate_to_datetime`, which takes every form of mail.
    """
    try:
        month = _MONTHS.index(text[8:11]) + 1
        day, year, clock = int(text[5:7]), int(text[12:16]), text[17:25]
        hour, minute, second = int(clock[:2]), int(clock[3:5]), int(clock[6:8])
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None


def precondition_headers(precondition: Precondition) -> list[tuple[bytes, bytes]]:
    """Write a precondition as headers of the XML API."""
    expected = "0" if precondition.if_absent else precondition.if_generation_match
    return [] if expected is None else [(b"x-goog-if-generation-match", expected.encode())]


def precondition_params(precondition: Precondition) -> Mapping[str, str]:
    """Write a precondition as query parameters of the JSON API."""
    expected = "0" if precondition.if_absent else precondition.if_generation_match
    return {} if expected is None else {"ifGenerationMatch": expected}

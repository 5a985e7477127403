"""Encodings of S3: `x-amz-` headers, checksums, generations. No I/O.

A generation is `<entity tag>/<size>` in the results of `head`, `put`, listings and reads. Reads are
pinned by If-Match; the size shows whether a read is of the whole object, the only one for which S3
returns a checksum. `version:<id>` reads a version.
Source: docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from aioflux._services import headers as _headers
from aioflux._services.headers import DEFAULT_TYPE, decode_crc32c, encode_crc32c

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux._services.base import Precondition
    from aioflux._values.meta import ObjectMeta

__all__ = [
    "Pin",
    "check_name",
    "etag_of",
    "full_crc32c",
    "generation_of",
    "hash_headers",
    "is_same_generation",
    "meta_from_headers",
    "object_headers",
    "parse_pin",
    "precondition_headers",
    "quote_name",
    "read_headers",
    "require_size",
    "upload_headers",
    "version_query",
]

_USER_PREFIX = b"x-amz-meta-"
_USER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_~.-][A-Za-z0-9_.~/-]{0,1023}")
_DOTS = frozenset({".", ".."})
_MAX_NAME_BYTES = 1024
_VERSION = "version:"
_GENERATION = re.compile(r"([!#-~]+)/([0-9]{1,18})")
_ETAG = re.compile(r"[!#-~]+")
_MAX_USER_BYTES = 2048
"""Names and values of the user's own metadata, together
(docs.aws.amazon.com/AmazonS3/latest/userguide/UsingMetadata.html)."""


class Pin(NamedTuple):
    """A generation, parsed: the content that a request is pinned to."""

    etag: str = ""
    """Entity tag without quotes; empty for any."""
    size: int | None = None
    """Size of the object, in bytes."""
    version: str = ""
    """Id of a version; empty for the current one."""

    @property
    def quoted(self) -> bytes:
        """The entity tag in quotes, for headers; empty if there is none."""
        return f'"{self.etag}"'.encode() if self.etag else b""


_ANY = Pin()


def generation_of(etag: str, size: int) -> str:
    """Return the generation of an object; empty without an entity tag."""
    return f"{etag}/{size}" if etag else ""


def parse_pin(generation: str) -> Pin:
    """Parse a generation, or a bare entity tag.

    Raises:
        ValueError: A request cannot hold it.
    """
    if not generation:
        return _ANY
    if generation.startswith(_VERSION):
        return Pin(version=generation.removeprefix(_VERSION))
    found = _GENERATION.fullmatch(generation)
    if found is not None:
        return Pin(found[1], int(found[2]))
    etag = generation.strip('"')
    if _ETAG.fullmatch(etag) is None:
        raise ValueError(f"{generation!r} is not a generation of S3; pass ObjectMeta.generation")
    return Pin(etag)


def require_size(pin: Pin, size: int) -> None:
    """Raise ValueError if an object has another size than the pin, whatever its entity tag is."""
    if pin.size is not None and size != pin.size:
        raise ValueError(f"the object has {size} bytes, not {pin.size}")


def is_same_generation(one: str, other: str) -> bool:
    """Return whether two generations, with or without size, are of the same content."""
    return bool(one) and parse_pin(one).etag == parse_pin(other).etag != ""


def read_headers(pin: Pin, byte_range: bytes = b"") -> list[tuple[bytes, bytes]]:
    """Return the headers of a read."""
    headers = [(b"x-amz-checksum-mode", b"ENABLED")]
    if pin.etag:
        headers.append((b"If-Match", pin.quoted))
    if byte_range:
        headers.append((b"Range", byte_range))
    return headers


def version_query(pin: Pin) -> bytes:
    """Return the query of a request for a version; empty for the current one."""
    return b"versionId=" + quote(pin.version, safe="").encode() if pin.version else b""


def etag_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the entity tag of a response, without quotes; empty if it has none."""
    return headers.get(b"etag", b"").decode("latin-1").strip('"')


def check_name(name: str) -> None:
    """Raise ValueError for a name that no object of S3 can have."""
    size = len(name.encode())  # raises for lone surrogates
    if not 1 <= size <= _MAX_NAME_BYTES:
        why = f"it has {size} bytes of UTF-8, not 1 to {_MAX_NAME_BYTES}"
    elif name in _DOTS:
        why = "in a url it would mean the bucket"
    else:
        return
    raise ValueError(f"{name!r} is not a valid object name: {why}")


def quote_name(name: str) -> bytes:
    """Return a slash and the name of an object, percent-encoded as it is signed.

    Raises:
        ValueError: No object can have the name.
    """
    if _PLAIN_NAME.fullmatch(name) is None or name in _DOTS:
        check_name(name)
        name = quote(name, safe="/")
    return b"/" + name.encode()


def precondition_headers(
    precondition: Precondition, *, is_quoted: bool = True
) -> list[tuple[bytes, bytes]]:
    """Return a precondition as headers.

    Args:
        precondition: The precondition.
        is_quoted: The entity tag has quotes (RFC 9110, 8.8.3).

    Raises:
        ValueError: It is not a generation of this service, or is a version, which writes do not
            compare.
    """
    if precondition.if_absent:
        return [(b"If-None-Match", b"*")]
    generation = precondition.if_generation_match
    if generation is None:
        return []
    pin = parse_pin(generation)
    if not pin.etag:
        raise ValueError(
            f"{generation!r} cannot be a condition on S3, which compares entity tags; pass "
            "ObjectMeta.generation"
        )
    return [(b"If-Match", pin.quoted if is_quoted else pin.etag.encode())]


def object_headers(
    content_type: str, metadata: Mapping[str, str] | None
) -> list[tuple[bytes, bytes]]:
    """Return content type and metadata as headers.

    Raises:
        ValueError: A header cannot hold it.
    """
    headers = [(b"Content-Type", (content_type or DEFAULT_TYPE).encode())]
    num_bytes = 0
    for name, value in (metadata or {}).items():
        if _USER_NAME.fullmatch(name) is None:
            raise ValueError(
                f"metadata cannot have the name {name!r}: it is sent as a header, whose name is "
                "ASCII letters, digits and -_.!#$%&'*+^`|~"
            )
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise ValueError(
                f"metadata {name!r} cannot have the value {value!r}: S3 keeps printable ASCII "
                "without space around it; encode it, as with urllib.parse.quote"
            )
        num_bytes += len(name) + len(value)
        headers.append((_USER_PREFIX + name.encode(), value.encode()))
    if num_bytes > _MAX_USER_BYTES:
        raise ValueError(f"metadata of {num_bytes} bytes is more than the {_MAX_USER_BYTES} of S3")
    return headers


def hash_headers(crc32c: int | None) -> list[tuple[bytes, bytes]]:
    """Return the header by which the service checks the bytes that it receives."""
    if crc32c is None:
        return []
    return [(b"x-amz-checksum-crc32c", encode_crc32c(crc32c).encode())]


def upload_headers(*, has_checksums: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers for one crc32c of a multipart upload, of the whole object."""
    if not has_checksums:
        return []
    return [(b"x-amz-checksum-algorithm", b"CRC32C"), (b"x-amz-checksum-type", b"FULL_OBJECT")]


def full_crc32c(checksum: bytes | None, kind: bytes | None = None) -> int | None:
    """Decode the crc32c of a whole object; None for one of the checksums of its parts.

    Raises:
        ValueError: It is malformed.
    """
    if not checksum or kind == b"COMPOSITE" or b"-" in checksum:
        return None
    return decode_crc32c(checksum)


def meta_from_headers(
    headers: Mapping[bytes, bytes], *, key: str, uri: str, size: int, crc32c: int | None
) -> ObjectMeta:
    """Build the metadata of an object from the headers of a response to a read or a HEAD."""
    coding = headers.get(b"content-encoding", b"").decode("latin-1")
    return _headers.meta_from_headers(
        headers,
        key=key,
        uri=uri,
        size=size,
        generation=generation_of(etag_of(headers), size),
        user_prefix=_USER_PREFIX,
        class_header=b"x-amz-storage-class",
        crc32c=crc32c,
        # SDKs write it for an upload in chunks; it is not an encoding of the object.
        content_encoding=coding.replace("aws-chunked", "").strip(" ,"),
    )

"""Encodings of S3: object names, generations, and headers. No I/O.

The generation of an object is `<ETag>/<size>`. `If-Match` pins a read to the ETag. The size shows
whether a range is the whole object: S3 returns a checksum for a whole object only. A user may also
pass `version:<id>`, to read a version.
Source: docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from aioflux._services import headers as _headers
from aioflux._services.headers import DEFAULT_TYPE, decode_crc32c, encode_crc32c

if TYPE_CHECKING:
    from aioflux._services.base import Precondition
    from aioflux._values.meta import ObjectMeta

_USER_PREFIX = b"x-amz-meta-"
_USER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_~.-][A-Za-z0-9_.~/-]{0,1023}")
_DOTS = frozenset({".", ".."})
_MAX_NAME_BYTES = 1024
_VERSION = "version:"
_GENERATION = re.compile(r"([!#-~]+)/([0-9]{1,18})")
is_etag = re.compile(r"[!#-~]+").fullmatch
_MAX_USER_BYTES = 2048
"""Largest sum of the names and values of user metadata, in bytes
(docs.aws.amazon.com/AmazonS3/latest/userguide/UsingMetadata.html)."""


class Pin(NamedTuple):
    """A parsed generation, which a request is pinned to."""

    etag: str = ""
    """ETag without quotes; empty if any ETag matches."""
    size: int | None = None
    """Size of the object, in bytes; None if it is not known."""
    version: str = ""
    """Id of a version; empty for the current one."""

    @property
    def quoted(self) -> bytes:
        """The ETag in quotes, for headers; empty without an ETag."""
        return f'"{self.etag}"'.encode() if self.etag else b""


_ANY = Pin()


def generation_of(etag: str, size: int) -> str:
    """Return the generation of an object; empty without an ETag."""
    return f"{etag}/{size}" if etag else ""


def parse_pin(generation: str) -> Pin:
    """Parse a generation, `version:<id>`, or an ETag with or without quotes.

    The pin of an empty text matches every object.

    Raises:
        ValueError: The text has none of these forms.
    """
    if not generation:
        return _ANY
    if generation.startswith(_VERSION):
        return Pin(version=generation.removeprefix(_VERSION))
    match = _GENERATION.fullmatch(generation)
    if match is not None:
        return Pin(match[1], int(match[2]))
    etag = generation.strip('"')
    if not is_etag(etag):
        raise ValueError(f"{generation!r} is not a generation of S3; pass ObjectMeta.generation")
    return Pin(etag)


def require_size(pin: Pin, size: int) -> None:
    """Raise ValueError if the size of an object differs from the size in the pin."""
    if pin.size is not None and size != pin.size:
        raise ValueError(f"the object has {size} bytes, not {pin.size}")


def is_same_generation(one: str, other: str) -> bool:
    """Return whether two generations have the same ETag; the sizes are not compared."""
    return bool(one) and parse_pin(one).etag == parse_pin(other).etag != ""


def read_headers(pin: Pin, byte_range: bytes = b"") -> list[tuple[bytes, bytes]]:
    """Return the headers of a read; an empty `byte_range` reads the whole object."""
    headers = [(b"x-amz-checksum-mode", b"ENABLED")]
    if pin.etag:
        headers.append((b"If-Match", pin.quoted))
    if byte_range:
        headers.append((b"Range", byte_range))
    return headers


def version_query(pin: Pin) -> bytes:
    """Return the query that selects the version of a pin; empty without a version."""
    return b"versionId=" + quote(pin.version, safe="").encode() if pin.version else b""


def etag_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the ETag of a response, without quotes; empty if it has none."""
    return headers.get(b"etag", b"").decode("latin-1").strip('"')


def check_name(name: str) -> None:
    """Raise ValueError for a name that no object of S3 can have."""
    size = len(name.encode())  # raises for lone surrogates
    if not 1 <= size <= _MAX_NAME_BYTES:
        why = f"it has {size} bytes of UTF-8, not 1 to {_MAX_NAME_BYTES}"
    elif name in _DOTS:
        why = "HTTP clients remove it from the path of a url"
    else:
        return
    raise ValueError(f"{name!r} is not a valid object name: {why}")


def quote_name(name: str) -> bytes:
    """Return a slash and the name of an object, percent-encoded as the signature requires.

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
    """Return a precondition as headers, with quotes around the ETag (RFC 9110) if `is_quoted`.

    Raises:
        ValueError: `if_generation_match` is not a generation of S3, or it is a version, which S3
            does not compare in writes.
    """
    if precondition.if_absent:
        return [(b"If-None-Match", b"*")]
    generation = precondition.if_generation_match
    if generation is None:
        return []
    pin = parse_pin(generation)
    if not pin.etag:
        raise ValueError(
            f"{generation!r} cannot be a condition of a write: S3 compares ETags; pass "
            "ObjectMeta.generation"
        )
    return [(b"If-Match", pin.quoted if is_quoted else pin.etag.encode())]


def object_headers(
    content_type: str, metadata: Mapping[str, str] | None
) -> list[tuple[bytes, bytes]]:
    """Return content type and metadata as headers.

    Raises:
        ValueError: A header cannot represent the metadata.
    """
    headers = [(b"Content-Type", (content_type or DEFAULT_TYPE).encode())]
    num_bytes = 0
    for name, value in (metadata or {}).items():
        if _USER_NAME.fullmatch(name) is None:
            raise ValueError(
                f"metadata cannot have the name {name!r}: it is sent as a header, so use ASCII "
                "letters, digits and -_.!#$%&'*+^`|~"
            )
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise ValueError(
                f"metadata {name!r} cannot have the value {value!r}: S3 stores printable ASCII "
                "without space at either end; encode the value, as with urllib.parse.quote"
            )
        num_bytes += len(name) + len(value)
        headers.append((_USER_PREFIX + name.encode(), value.encode()))
    if num_bytes > _MAX_USER_BYTES:
        raise ValueError(f"metadata has {num_bytes} bytes, but S3 stores at most {_MAX_USER_BYTES}")
    return headers


def hash_headers(crc32c: int | None) -> list[tuple[bytes, bytes]]:
    """Return the header with the crc32c of the body, which the service compares."""
    if crc32c is None:
        return []
    return [(b"x-amz-checksum-crc32c", encode_crc32c(crc32c).encode())]


def upload_headers(*, has_checksums: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers that ask for a crc32c of the whole object of a new multipart upload.

    There are none if the server does not support checksums.
    """
    if not has_checksums:
        return []
    return [(b"x-amz-checksum-algorithm", b"CRC32C"), (b"x-amz-checksum-type", b"FULL_OBJECT")]


def full_crc32c(checksum: bytes | None, kind: bytes | None = None) -> int | None:
    """Decode the crc32c of a whole object.

    Returns None if there is none, or if it is a checksum of the checksums of parts.

    Raises:
        ValueError: The crc32c is malformed.
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
        # SDKs send `aws-chunked` with a chunked body; it is not an encoding of the object.
        content_encoding=coding.replace("aws-chunked", "").strip(" ,"),
    )

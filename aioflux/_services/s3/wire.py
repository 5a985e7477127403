"""How S3 writes things: `x-amz-` headers, checksums, generations, errors. Pure.

A generation is `<entity tag>/<size>`, as `head`, `put`, listings and reads all tell it: reads are
pinned by If-Match, and the size in it tells whether a read is of the whole object, for which alone
S3 tells a checksum. `version:<id>` is taken for a version, where one is read.
Source: docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html.
"""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote
from xml.sax.saxutils import escape

from aioflux._services.headers import (
    DEFAULT_TYPE,
    decode_crc32c,
    encode_crc32c,
    parse_http_date,
)
from aioflux._values.meta import ObjectMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioflux._services.base import Precondition

__all__ = [
    "MAX_COPY_BYTES",
    "Pin",
    "can_be_xml",
    "check_name",
    "copy_headers",
    "delete_body",
    "digest_header",
    "etag_of",
    "full_crc32c",
    "generation_of",
    "hash_headers",
    "is_same_generation",
    "meta_from_headers",
    "object_headers",
    "parse_deletions",
    "parse_pin",
    "precondition_headers",
    "quote_name",
    "read_headers",
    "require_size",
    "upload_headers",
    "version_query",
]

MAX_COPY_BYTES = 5 * 1024**3
"""Largest object that one request copies
(docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html)."""
_USER_PREFIX = b"x-amz-meta-"
_USER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_~.-][A-Za-z0-9_.~/-]{0,1023}")
_DOTS = frozenset({".", ".."})
_MAX_NAME_BYTES = 1024
_VERSION = "version:"
_GENERATION = re.compile(r"([!#-~]+)/([0-9]{1,18})")
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_ETAG = re.compile(r"[!#-~]+")
_MAX_USER_BYTES = 2048
"""Names and values of the user's own metadata, together
(docs.aws.amazon.com/AmazonS3/latest/userguide/UsingMetadata.html)."""


class Pin(NamedTuple):
    """The content that a request is for, as a generation tells it."""

    etag: str = ""
    """Entity tag without quotes; empty for any."""
    size: int | None = None
    """Size of the object, in bytes."""
    version: str = ""
    """Id of a version; empty for the one there is."""

    @property
    def quoted(self) -> bytes:
        """The entity tag as a header has it; empty where there is none."""
        return f'"{self.etag}"'.encode() if self.etag else b""


_ANY = Pin()


def generation_of(etag: str, size: int) -> str:
    """Write the generation of an object; empty where the service told no entity tag."""
    return f"{etag}/{size}" if etag else ""


def parse_pin(generation: str) -> Pin:
    """Read a generation; a bare entity tag is one, too.

    Raises:
        ValueError: It could not stand in a request.
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
        raise ValueError(f"{generation!r} is no generation of S3; pass ObjectMeta.generation")
    return Pin(etag)


def require_size(pin: Pin, size: int) -> None:
    """Check that an object has the size that a pin says.

    Raises:
        ValueError: It has not, whatever its entity tag is.
    """
    if pin.size is not None and size != pin.size:
        raise ValueError(f"{size} bytes are there, not {pin.size}")


def is_same_generation(one: str, other: str) -> bool:
    """Tell whether two generations are of one content, told with its size or without."""
    return bool(one) and parse_pin(one).etag == parse_pin(other).etag != ""


def read_headers(pin: Pin, byte_range: bytes = b"") -> list[tuple[bytes, bytes]]:
    """Write the headers of a read."""
    headers = [(b"x-amz-checksum-mode", b"ENABLED")]
    if pin.etag:
        headers.append((b"If-Match", pin.quoted))
    if byte_range:
        headers.append((b"Range", byte_range))
    return headers


def version_query(pin: Pin) -> bytes:
    """Write the query of a request for a version; empty for the one there is."""
    return b"versionId=" + quote(pin.version, safe="").encode() if pin.version else b""


def etag_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the entity tag of an answer, without quotes; empty where it tells none."""
    return headers.get(b"etag", b"").decode("latin-1").strip('"')


def check_name(name: str) -> None:
    """Refuse a name that no object of S3 can have.

    Raises:
        ValueError: It is one.
    """
    size = len(name.encode())  # refuses what is no valid Unicode
    if not 1 <= size <= _MAX_NAME_BYTES:
        why = f"it has {size} bytes of UTF-8, not 1 to {_MAX_NAME_BYTES}"
    elif name in _DOTS:
        why = "in a url it would mean the bucket"
    else:
        return
    raise ValueError(f"{name!r} is no name for an object: {why}")


def quote_name(name: str) -> bytes:
    """Percent-encode the name of an object for a path, as it is signed, with a slash before it.

    Raises:
        ValueError: No object can have it.
    """
    if _PLAIN_NAME.fullmatch(name) is None or name in _DOTS:
        check_name(name)
        name = quote(name, safe="/")
    return b"/" + name.encode()


def precondition_headers(
    precondition: Precondition, *, is_quoted: bool = True
) -> list[tuple[bytes, bytes]]:
    """Write a precondition as headers.

    Args:
        precondition: The precondition.
        is_quoted: The entity tag has its quotes (RFC 9110, 8.8.3).

    Raises:
        ValueError: It is no generation of this service, or a version, which writes do not know.
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
    """Write what a new object is told to be as headers.

    Raises:
        ValueError: No header can carry it.
    """
    headers = [(b"Content-Type", (content_type or DEFAULT_TYPE).encode())]
    num_bytes = 0
    for name, value in (metadata or {}).items():
        if _USER_NAME.fullmatch(name) is None:
            raise ValueError(
                f"metadata cannot have the name {name!r}: it travels as a header, whose name is "
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
    """Write the crc32c that the service compares with what it receives, and keeps."""
    if crc32c is None:
        return []
    return [(b"x-amz-checksum-crc32c", encode_crc32c(crc32c).encode())]


def digest_header(body: bytes) -> tuple[bytes, bytes]:
    """Write the MD5 that a request to delete many must have; every server knows it."""
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    return b"Content-MD5", base64.b64encode(digest)


def upload_headers(*, has_checksums: bool) -> list[tuple[bytes, bytes]]:
    """Write that a multipart upload is to have one crc32c, of the whole object."""
    if not has_checksums:
        return []
    return [(b"x-amz-checksum-algorithm", b"CRC32C"), (b"x-amz-checksum-type", b"FULL_OBJECT")]


def copy_headers(bucket: str, name: str, pin: Pin) -> list[tuple[bytes, bytes]]:
    """Write the source of a copy as headers."""
    source = b"/" + quote(bucket, safe="").encode() + quote_name(name)
    if pin.version:
        source += b"?versionId=" + quote(pin.version, safe="").encode()
    headers = [(b"x-amz-copy-source", source)]
    if pin.etag:
        headers.append((b"x-amz-copy-source-if-match", pin.quoted))
    return headers


def full_crc32c(checksum: str | bytes | None, kind: str | bytes | None = None) -> int | None:
    """Read a crc32c if it is one of a whole object's bytes, and not of the checksums of its parts.

    Raises:
        ValueError: It is damaged.
    """
    if not checksum or kind in {"COMPOSITE", b"COMPOSITE"}:
        return None
    text = checksum.decode("latin-1") if isinstance(checksum, bytes) else checksum
    return None if "-" in text else decode_crc32c(text)


def meta_from_headers(
    headers: Mapping[bytes, bytes], *, key: str, uri: str, size: int, crc32c: int | None
) -> ObjectMeta:
    """Build the metadata of an object from the headers of an answer to a read or a HEAD.

    Args:
        headers: The headers, names in lower case.
        key: Name of the object.
        uri: Its whole uri.
        size: Its size, in bytes.
        crc32c: Its checksum, where it is known.
    """
    get = headers.get
    changed = get(b"last-modified", b"").decode("latin-1")
    etag = etag_of(headers)
    coding = get(b"content-encoding", b"").decode("latin-1")
    cut = len(_USER_PREFIX)
    return ObjectMeta(
        key=key,
        uri=uri,
        size=size,
        etag=etag,
        generation=generation_of(etag, size),
        crc32c=crc32c,
        updated=parse_http_date(changed) if changed else None,
        content_type=get(b"content-type", b"").decode("latin-1"),
        # What SDKs write of an upload in pieces is no coding of the object.
        content_encoding=coding.replace("aws-chunked", "").strip(" ,"),
        storage_class=get(b"x-amz-storage-class", b"").decode("latin-1"),
        metadata={
            name[cut:].decode("ascii"): value.decode("utf-8", "replace")
            for name, value in headers.items()
            if name.startswith(_USER_PREFIX)
        },
    )


def delete_body(objects: Iterable[tuple[str, Pin]]) -> bytes:
    """Write which objects one request deletes; its answer tells those that it could not."""
    rows: list[str] = []
    for name, pin in objects:
        tag = f"<ETag>{escape(pin.etag)}</ETag>" if pin.etag else ""
        rows.append(f"<Object><Key>{_xml_text(name)}</Key>{tag}</Object>")
    return f"<Delete><Quiet>true</Quiet>{''.join(rows)}</Delete>".encode()


def can_be_xml(name: str) -> bool:
    """Tell whether XML can hold a name: not the control characters, and two others."""
    return _NOT_XML.search(name) is None


def parse_deletions(data: bytes | bytearray | memoryview) -> dict[str, tuple[str, str]]:
    """Return code and words of each name that could not be deleted.

    Raises:
        ValueError: The body is no such answer.
    """
    try:
        root = ET.fromstring(bytes(data))  # noqa: S314  see `_multipart._parse`
    except ET.ParseError as exc:
        raise ValueError(f"it is not XML: {exc}") from exc
    if root.tag.rpartition("}")[2] != "DeleteResult":
        raise ValueError(f"it is <{root.tag.rpartition('}')[2]}>")
    failed: dict[str, tuple[str, str]] = {}
    for child in root:
        if child.tag.rpartition("}")[2] == "Error":
            told = {each.tag.rpartition("}")[2]: each.text or "" for each in child}
            failed[told.get("Key", "")] = told.get("Code", ""), told.get("Message", "")
    return failed


def _xml_text(text: str) -> str:
    """Write a text for XML; line ends and tabs as they would otherwise be changed."""
    return escape(text, {"\r": "&#13;", "\n": "&#10;", "\t": "&#9;"})

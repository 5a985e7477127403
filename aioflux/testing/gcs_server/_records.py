"""Records of buckets, objects and unfinished uploads, and the names that they may have."""

from __future__ import annotations

import re
from binascii import b2a_base64
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioflux.testing.gcs_server._checksums import Declared, Digest, encode_crc32c
from aioflux.testing.gcs_server._errors import APIError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioflux.testing.gcs_server._blobs import Blob
    from aioflux.testing.gcs_server._preconditions import Preconditions

T = TypeVar("T")
_FEW = 64
_MAX_NAME_BYTES = 1024
_FORBIDDEN = frozenset("\r\n\0")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?")


def check_object_name(name: str) -> None:
    """Reject a name that no object can have; NUL, too.

    Source: cloud.google.com/storage/docs/objects#naming.
    """
    size = len(name.encode())
    if not 1 <= size <= _MAX_NAME_BYTES:
        message = f"The name of an object has 1 to {_MAX_NAME_BYTES} bytes, not {size}."
        code = "KeyTooLongError" if size else "InvalidObjectName"
        raise APIError(400, "invalid", message, code=code)
    if name in (".", "..") or not _FORBIDDEN.isdisjoint(name):
        message = f"Disallowed object name: {name!r}"
        raise APIError(400, "invalid", message, code="InvalidObjectName")


def check_bucket_name(name: str) -> None:
    """Reject a name that GCS does not allow (cloud.google.com/storage/docs/buckets#naming)."""
    labels = name.split(".")
    longest = 63 if len(labels) == 1 else 222
    if not 3 <= len(name) <= longest or not all(map(_LABEL.fullmatch, labels)):
        raise APIError(400, "invalid", f"Invalid bucket name: '{name}'", code="InvalidBucketName")


class SortedNames(Generic[T]):
    """A dictionary that sorts its names on demand.

    Strings compare by code point, which is the order of their UTF-8 bytes. Added and removed names
    are sorted in by the next `ordered`: filling a bucket with a million objects costs one sort.
    """

    def __init__(self) -> None:
        self._items: dict[str, T] = {}
        self._ordered: list[str] = []
        self._added: dict[str, None] = {}  # in order of arrival, which sorts fast
        self._removed: set[str] = set()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, name: str) -> T | None:
        """Return the value of a name, or None."""
        return self._items.get(name)

    def get_all(self, names: Iterable[str]) -> list[T]:
        """Return the values of names that are present."""
        return list(map(self._items.__getitem__, names))

    def put(self, name: str, value: T) -> None:
        """Set the value of a name."""
        if name not in self._items:
            if name in self._removed:
                self._removed.discard(name)
            else:
                self._added[name] = None
        self._items[name] = value

    def remove(self, name: str) -> None:
        """Remove a name that is present."""
        del self._items[name]
        if name in self._added:
            del self._added[name]
        else:
            self._removed.add(name)

    def ordered(self) -> list[str]:
        """Return all names in order. The list is shared: do not change it."""
        if len(self._removed) > _FEW:
            self._ordered = [name for name in self._ordered if name not in self._removed]
        else:
            for name in self._removed:
                del self._ordered[bisect_left(self._ordered, name)]
        if len(self._added) > _FEW:
            self._ordered.extend(self._added)
            self._ordered.sort()
        else:
            for name in self._added:
                insort(self._ordered, name)
        self._added.clear()
        self._removed.clear()
        return self._ordered


class Hashed:
    """Base of records of bytes with a crc32c and perhaps an MD5."""

    __slots__ = ()
    crc32c: int
    md5: bytes | None

    @property
    def crc32c_base64(self) -> str:
        """The checksum as GCS writes it: big-endian, base64."""
        return encode_crc32c(self.crc32c)

    @property
    def md5_base64(self) -> str | None:
        """The MD5 as GCS writes it, if there is one."""
        return None if self.md5 is None else b2a_base64(self.md5, newline=False).decode()

    def hash_headers(self) -> list[tuple[str, str]]:
        """Return the checksums as headers."""
        headers = [("x-goog-hash", f"crc32c={self.crc32c_base64}")]
        if self.md5 is not None:
            headers.append(("x-goog-hash", f"md5={self.md5_base64}"))
        return headers


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributes:
    """Metadata that a writer sets. `patch` replaces some."""

    content_type: str | None = None
    content_encoding: str | None = None
    content_disposition: str | None = None
    content_language: str | None = None
    cache_control: str | None = None
    storage_class: str = "STANDARD"
    custom_time: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectRecord(Hashed):
    """One generation of an object with one state of its metadata; changed by replacement."""

    bucket: str
    name: str
    generation: int
    metageneration: int = 1
    blob: Blob
    size: int
    crc32c: int
    md5: bytes | None
    """None for composed objects and those made of parts."""
    attributes: Attributes
    time_created_us: int
    updated_us: int
    component_count: int | None = None
    """Number of sources of a composed object; None for others."""
    prepared: list[bytes] = field(default_factory=list, init=False, repr=False)
    """Header lines of downloads, encoded once; not part of the state."""
    described: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)
    """The item of the latest listing, encoded, by its `fields`; not part of the state."""

    @property
    def etag(self) -> str:
        """The ETag of the JSON API, which encodes generation and metageneration as on GCS."""
        low, high = _LOW[self.generation & 0x3FFF], _varint(self.generation >> 14)
        raw = b"\x08" + low + high + b"\x10" + _varint(self.metageneration)
        return b2a_base64(raw, newline=False).decode()

    @property
    def xml_etag(self) -> str:
        """The ETag of the XML API, quoted: the MD5 in hex, or the JSON one if there is none."""
        return f'"{self.md5.hex() if self.md5 else self.etag}"'


@dataclass(slots=True, eq=False)
class Bucket:
    """A bucket and its live objects."""

    name: str
    time_created_us: int
    generation: int
    metageneration: int = 1
    location: str = "US"
    storage_class: str = "STANDARD"
    labels: dict[str, str] = field(default_factory=dict)
    objects: SortedNames[ObjectRecord] = field(default_factory=SortedNames)


@dataclass(kw_only=True, slots=True, eq=False)
class Part(Hashed):
    """One part of a multipart upload."""

    number: int
    blob: Blob
    md5: bytes | None
    crc32c: int
    updated_us: int

    @property
    def etag(self) -> str:
        """The ETag, quoted: the MD5 in hex, as on GCS, if there is one."""
        name = f"{self.crc32c:08x}-{self.blob.size:x}" if self.md5 is None else self.md5.hex()
        return f'"{name}"'


@dataclass(kw_only=True, slots=True, eq=False)
class MultipartUpload:
    """An open XML multipart upload."""

    upload_id: str
    bucket: str
    name: str
    attributes: Attributes
    started_us: int
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True, eq=False)
class ResumableUpload:
    """A JSON resumable upload; kept after it is final, for status queries."""

    upload_id: str
    bucket: str
    name: str
    attributes: Attributes
    declared: Declared
    preconditions: Preconditions
    started_us: int
    size: int | None = None
    """Size of the whole object in bytes, once the writer has declared it."""
    pieces: list[Blob] = field(default_factory=list)
    received: int = 0
    """Bytes persisted so far."""
    digest: Digest = field(default_factory=Digest)
    """Checksums of what has been persisted so far."""
    resource: Mapping[str, Any] | None = None
    """The finished object, as the writer received it."""


@lru_cache(maxsize=1024)
def _varint(number: int) -> bytes:
    """Encode a number as protobuf does."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


# Generations count microseconds: their low 14 bits differ and the others seldom do.
_LOW = tuple(bytes((low & 0x7F | 0x80, low >> 7 | 0x80)) for low in range(1 << 14))

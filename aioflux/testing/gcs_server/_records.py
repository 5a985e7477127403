"""Records of buckets, objects and unfinished uploads, and checks of their names."""

from __future__ import annotations

import re
from binascii import b2a_base64
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioflux.testing.gcs_server._checksums import DeclaredChecksums, Digest, encode_crc32c
from aioflux.testing.gcs_server._errors import APIError

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._blobs import Blob
    from aioflux.testing.gcs_server._preconditions import Preconditions

T = TypeVar("T")
_MAX_INSERTS = 64  # for more names, sorting the list again is faster than single insertions
_MAX_NAME_BYTES = 1024
_FORBIDDEN = frozenset("\r\n\0")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?")


def check_object_name(name: str) -> None:
    """Reject a name with NUL, or one that GCS rejects (cloud.google.com/storage/docs/objects)."""
    size = len(name.encode())
    if not 1 <= size <= _MAX_NAME_BYTES:
        message = f"The name of an object must have 1 to {_MAX_NAME_BYTES} bytes, not {size}."
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
    """Dictionary that returns its names in the order of their UTF-8 bytes.

    Only `ordered` sorts: a million calls of `put` cost one sort. Python compares strings by code
    point, which gives the same order as comparing their UTF-8 bytes.
    """

    def __init__(self) -> None:
        self._items: dict[str, T] = {}
        self._ordered: list[str] = []
        # In the order of `put`: sorting is fast if clients write the names in order.
        self._added: dict[str, None] = {}
        self._removed: set[str] = set()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, name: str) -> T | None:
        return self._items.get(name)

    def get_all(self, names: Iterable[str]) -> list[T]:
        """Return the values of names, which must exist."""
        return list(map(self._items.__getitem__, names))

    def put(self, name: str, value: T) -> None:
        if name not in self._items:
            if name in self._removed:
                self._removed.discard(name)
            else:
                self._added[name] = None
        self._items[name] = value

    def remove(self, name: str) -> None:
        """Remove a name, which must exist."""
        del self._items[name]
        if name in self._added:
            del self._added[name]
        else:
            self._removed.add(name)

    def ordered(self) -> list[str]:
        """Return all names in order. The caller must not change the list."""
        if len(self._removed) > _MAX_INSERTS:
            self._ordered = [name for name in self._ordered if name not in self._removed]
        else:
            for name in self._removed:
                del self._ordered[bisect_left(self._ordered, name)]
        if len(self._added) > _MAX_INSERTS:
            self._ordered.extend(self._added)
            self._ordered.sort()
        else:
            for name in self._added:
                insort(self._ordered, name)
        self._added.clear()
        self._removed.clear()
        return self._ordered


class HasChecksums:
    """Base class of records with a crc32c and an optional MD5."""

    __slots__ = ()
    crc32c: int
    md5: bytes | None

    @property
    def crc32c_base64(self) -> str:
        """Crc32c as in the APIs of GCS: big-endian, in base64."""
        return encode_crc32c(self.crc32c)

    @property
    def md5_base64(self) -> str | None:
        """MD5 as in the APIs of GCS: in base64. None if there is no MD5."""
        return None if self.md5 is None else b2a_base64(self.md5, newline=False).decode()

    def hash_headers(self) -> list[tuple[str, str]]:
        """Return the checksums as `x-goog-hash` headers."""
        headers = [("x-goog-hash", f"crc32c={self.crc32c_base64}")]
        if self.md5 is not None:
            headers.append(("x-goog-hash", f"md5={self.md5_base64}"))
        return headers


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributes:
    """Metadata of an object that clients set."""

    content_type: str | None = None
    content_encoding: str | None = None
    content_disposition: str | None = None
    content_language: str | None = None
    cache_control: str | None = None
    storage_class: str = "STANDARD"
    custom_time: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectRecord(HasChecksums):
    """Object with one generation and one metageneration. A change makes a new record."""

    bucket: str
    name: str
    generation: int
    metageneration: int = 1
    blob: Blob
    size: int
    crc32c: int
    md5: bytes | None
    """MD5 of the bytes. None for composed objects, for objects of multipart uploads, and if the
    server computes no MD5."""
    attributes: Attributes
    time_created_us: int
    updated_us: int
    component_count: int | None = None
    """Number of components of a composed object. None for other objects."""
    media_headers: list[bytes] = field(default_factory=list, init=False, repr=False)
    """Cached header lines of downloads: for the JSON API and for the XML API."""
    listing_items: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)
    """Cached encoded item of the last listing, by the names of the selected fields."""

    @property
    def etag(self) -> str:
        """ETag of the JSON API, which encodes generation and metageneration as on GCS."""
        low, high = _LOW_BITS[self.generation & 0x3FFF], _varint(self.generation >> 14)
        raw = b"\x08" + low + high + b"\x10" + _varint(self.metageneration)
        return b2a_base64(raw, newline=False).decode()

    @property
    def xml_etag(self) -> str:
        """ETag of the XML API in quotes: the MD5 in hex, or else the ETag of the JSON API."""
        return f'"{self.md5.hex() if self.md5 else self.etag}"'


@dataclass(slots=True, eq=False)
class Bucket:
    """Bucket and the current generations of its objects."""

    name: str
    time_created_us: int
    generation: int
    metageneration: int = 1
    location: str = "US"
    storage_class: str = "STANDARD"
    labels: dict[str, str] = field(default_factory=dict)
    objects: SortedNames[ObjectRecord] = field(default_factory=SortedNames)


@dataclass(kw_only=True, slots=True, eq=False)
class Part(HasChecksums):
    """One part of a multipart upload."""

    number: int
    blob: Blob
    md5: bytes | None
    crc32c: int
    updated_us: int

    @property
    def etag(self) -> str:
        """ETag in quotes: the MD5 in hex as on GCS, or crc32c and size if there is no MD5."""
        text = f"{self.crc32c:08x}-{self.blob.size:x}" if self.md5 is None else self.md5.hex()
        return f'"{text}"'


@dataclass(kw_only=True, slots=True, eq=False)
class MultipartUpload:
    """Open multipart upload of the XML API."""

    upload_id: str
    bucket: str
    name: str
    attributes: Attributes
    started_us: int
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True, eq=False)
class ResumableUpload:
    """Resumable upload of the JSON API. It is kept after its completion for status requests."""

    upload_id: str
    bucket: str
    name: str
    attributes: Attributes
    declared: DeclaredChecksums
    preconditions: Preconditions
    started_us: int
    size: int | None = None
    """Size of the whole object in bytes. None until the client has sent this number."""
    pieces: list[Blob] = field(default_factory=list)
    received: int = 0
    """Number of bytes persisted so far."""
    digest: Digest = field(default_factory=Digest)
    """Checksums of the bytes persisted so far."""
    resource: Mapping[str, Any] | None = None
    """Resource of the completed object, as in the response. None before the completion."""


@lru_cache(maxsize=1024)
def _varint(number: int) -> bytes:
    """Encode a number as a varint of Protocol Buffers."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


# Varints of the low 14 bits of a generation. A generation is a time in microseconds, so the higher
# bits are often equal: `_varint` caches them.
_LOW_BITS = tuple(bytes((low & 0x7F | 0x80, low >> 7 | 0x80)) for low in range(1 << 14))

"""What the server knows of buckets, objects and unfinished uploads."""

from __future__ import annotations

from binascii import b2a_base64
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server._checksums import Declared, Digest
from aioflux.testing.gcs_server._names import SortedNames

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.testing.gcs_server._blobs import Blob
    from aioflux.testing.gcs_server._preconditions import Preconditions


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributes:
    """What a writer says of an object, apart from its bytes. `patch` replaces some."""

    content_type: str | None = None
    content_encoding: str | None = None
    content_disposition: str | None = None
    content_language: str | None = None
    cache_control: str | None = None
    storage_class: str = "STANDARD"
    custom_time: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectRecord:
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
    """How many objects a composed object was made of; None for others."""
    prepared: list[bytes] = field(default_factory=list, init=False, repr=False)
    """Header lines that the HTTP layer derives once; not part of the state."""
    described: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)
    """What the latest listing said of it, by the fields that it asked for; likewise derived."""

    @property
    def etag(self) -> str:
        """Name of this generation and metageneration, in the form that GCS uses."""
        low, high = _LOW[self.generation & 0x3FFF], _varint(self.generation >> 14)
        raw = b"\x08" + low + high + b"\x10" + _varint(self.metageneration)
        return b2a_base64(raw, newline=False).decode()

    @property
    def crc32c_base64(self) -> str:
        """The checksum as GCS writes it: big-endian, base64."""
        return b2a_base64(self.crc32c.to_bytes(4, "big"), newline=False).decode()

    @property
    def md5_base64(self) -> str | None:
        """The MD5 as GCS writes it, if there is one."""
        return None if self.md5 is None else b2a_base64(self.md5, newline=False).decode()


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
class Part:
    """One part of a multipart upload."""

    number: int
    blob: Blob
    md5: bytes | None
    crc32c: int
    updated_us: int

    @property
    def etag(self) -> str:
        """Name of these bytes, quoted: the MD5 in hex, as on GCS, where there is one."""
        name = f"{self.crc32c:08x}-{self.blob.size:x}" if self.md5 is None else self.md5.hex()
        return f'"{name}"'

    @property
    def crc32c_base64(self) -> str:
        """The checksum as GCS writes it: big-endian, base64."""
        return b2a_base64(self.crc32c.to_bytes(4, "big"), newline=False).decode()

    @property
    def md5_base64(self) -> str | None:
        """The MD5 as GCS writes it, if there is one."""
        return None if self.md5 is None else b2a_base64(self.md5, newline=False).decode()


@dataclass(kw_only=True, slots=True, eq=False)
class MultipartUpload:
    """An XML multipart upload that has not been completed."""

    upload_id: str
    bucket: str
    name: str
    attributes: Attributes
    started_us: int
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True, eq=False)
class ResumableUpload:
    """A JSON resumable upload; kept after it is final, so that a status query still answers."""

    upload_id: str
    bucket: str
    name: str
    attributes: Attributes
    declared: Declared
    preconditions: Preconditions
    started_us: int
    size: int | None = None
    """Size of the whole object in bytes, once the writer has said it."""
    pieces: list[Blob] = field(default_factory=list)
    received: int = 0
    """Bytes persisted so far."""
    digest: Digest = field(default_factory=Digest)
    """Checksums of what has been persisted so far."""
    resource: Mapping[str, Any] | None = None
    """The finished object, as it was described to the writer."""


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

"""Metadata of objects and open uploads, and results of `delete_many` and `clean`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from datetime import datetime

    from aioflux.errors import StorageError


DEFAULT_TYPE: Final = "application/octet-stream"
"""Content type of objects that are written without a content type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectMeta:
    """Metadata of one object, as the service returned it."""

    key: str
    """Name of the object, relative to the prefix of the store."""
    uri: str
    """Uri of the object."""
    size: int
    """Size of the stored bytes, in bytes."""
    etag: str = ""
    """Entity tag, without quotes; empty if the service returned none."""
    generation: str = ""
    """Identifier of this content, to which reads and deletes can be pinned; empty if the service
    has none. On Google Cloud Storage it is the generation, on S3 `<entity tag>/<size>`, or
    `version:<id>` for a noncurrent version, and elsewhere the entity tag. It changes when the
    content changes; on S3 it may stay the same if equal bytes are written again."""
    crc32c: int | None = None
    """CRC32C (Castagnoli) of the stored bytes; None if the service returned none."""
    updated: datetime | None = None
    """Time of the last write, on Azure also of the last change of attributes, as an aware datetime
    in UTC; None if not known."""
    content_type: str = ""
    """Media type; empty if the service returned none."""
    content_encoding: str = ""
    """Content-Encoding, such as `gzip`, or empty. Reads return the stored bytes, which may be
    compressed."""
    content_disposition: str = ""
    """Content-Disposition, such as `attachment; filename="a.csv"`; empty if the service returned
    none. Listings of S3 return none."""
    cache_control: str = ""
    """Cache-Control, such as `max-age=3600`; empty if the service returned none. Listings of S3
    return none, and neither do reads of Google Cloud Storage: the header of their responses may be
    a default of the service."""
    storage_class: str = ""
    """Storage class, by its name in the service; empty if the service returned none."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """User metadata."""
    is_latest: bool = True
    """False for a noncurrent generation from `list(versions=True)`, or from `head` on Google Cloud
    Storage. `head` of a version of S3 does not know it, and returns True."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectAttributes:
    """Attributes that a write gives to an object. An empty text means the service's default."""

    content_type: str = ""
    """Media type; `application/octet-stream` by default."""
    content_encoding: str = ""
    """Encoding of the bytes that are written, such as `gzip`. They are stored and read as they are:
    nothing is compressed or decompressed."""
    content_disposition: str = ""
    """Presentation of the object in browsers, such as `attachment; filename="a.csv"`."""
    cache_control: str = ""
    """Rules for caches of the object, such as `max-age=3600`."""
    storage_class: str = ""
    """Storage class, by its name in the service, such as `NEARLINE` or `STANDARD_IA`, and on Azure
    the access tier, such as `Cool`; by default that of the bucket or account."""
    metadata: Mapping[str, str] | None = None
    """User metadata. Names are stored in lower case, as most services return them."""


DEFAULT_ATTRIBUTES: Final = ObjectAttributes()
ATTRIBUTE_NAMES: Final = tuple(ObjectAttributes.__dataclass_fields__)


def portable_attributes(meta: ObjectMeta) -> dict[str, Any]:
    """Return the attributes of an object that a copy in another service can have."""
    return {name: getattr(meta, name) for name in ATTRIBUTE_NAMES if name != "storage_class"}


def attributes_of(meta: ObjectMeta) -> ObjectAttributes:
    """Return the attributes of an object, for a copy in the same service."""
    return ObjectAttributes(**portable_attributes(meta), storage_class=meta.storage_class)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteResult:
    """Result of `Store.delete_many`. Each key is in one of the three fields."""

    deleted: tuple[str, ...]
    """Keys of the objects that were deleted."""
    missing: tuple[str, ...] = ()
    """Keys that no object had, which is not an error."""
    errors: Mapping[str, StorageError] = field(default_factory=dict)
    """Errors by key, for objects that could not be deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenUpload:
    """A multipart upload that was neither completed nor aborted, and whose parts are billed."""

    key: str
    """Key of the object, relative to the prefix of the store. On `file://`, the name of a temporary
    file, because the key is not stored."""
    upload_id: str
    """Id of the upload, assigned by the service."""
    initiated: datetime
    """Time at which the upload was initiated, as an aware datetime in UTC. On `file://`, time of
    the last write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanResult:
    """Result of `Store.clean`: removed uploads and objects, or with `dry_run` those to remove."""

    aborted: tuple[OpenUpload, ...]
    """Uploads that were aborted, sorted by key and id."""
    removed: tuple[str, ...]
    """Keys of temporary objects that were deleted, sorted."""
    errors: Mapping[str, StorageError] = field(default_factory=dict)
    """Errors by key, for uploads and objects that could not be removed."""

"""What is known about an object or an open upload, and the outcome of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from aioflux.errors import StorageError

__all__ = ["CleanResult", "DeleteResult", "ObjectMeta", "OpenUpload"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectMeta:
    """Metadata of one object, as the service told it."""

    key: str
    """Name of the object, below the prefix that the store was opened with."""
    uri: str
    """Whole uri of the object."""
    size: int
    """Stored size, in bytes."""
    etag: str = ""
    """Entity tag as the service gave it, quotes removed."""
    generation: str = ""
    """Identity of this content, which reads are pinned to: the generation on GCS, the entity tag
    (on S3 `<entity tag>/<size>`) elsewhere; empty where a service has none."""
    crc32c: int | None = None
    """CRC32C (Castagnoli) of the stored bytes, or None where the service gave none."""
    updated: datetime | None = None
    """Time of the last change, aware, in UTC."""
    content_type: str = ""
    """Media type."""
    content_encoding: str = ""
    """`gzip` where the stored bytes are compressed, else empty. aioflux hands out stored bytes."""
    storage_class: str = ""
    """Storage class in the service's own words."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The user's own metadata."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteResult:
    """What became of each key of a `delete_many`; nothing is lost in silence."""

    deleted: tuple[str, ...]
    """Keys that were deleted."""
    missing: tuple[str, ...] = ()
    """Keys that named no object; not an error, since the aim is reached."""
    errors: Mapping[str, StorageError] = field(default_factory=dict)
    """Keys that could not be deleted, with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenUpload:
    """A multipart upload that was begun and neither completed nor aborted: its parts are billed."""

    key: str
    """Name that the object would have, below the store's prefix. On `file://`, where nobody knows
    it any more, the name under which its bytes are kept."""
    upload_id: str
    """The service's name for the upload."""
    initiated: datetime
    """Time at which it was begun, aware, in UTC; on `file://`, of the last write to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanResult:
    """What a `clean` found and dealt with; in a dry run, what it would deal with."""

    aborted: tuple[OpenUpload, ...]
    """Uploads that were aborted, by key and id."""
    removed: tuple[str, ...]
    """Keys of left-over objects that were deleted, sorted."""
    errors: Mapping[str, StorageError] = field(default_factory=dict)
    """Keys that could not be dealt with, with the reason."""

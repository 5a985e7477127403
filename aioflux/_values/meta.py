"""Metadata of objects and open uploads, and outcomes of batches."""

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
    """Metadata of one object, as the service returned it."""

    key: str
    """Name of the object, below the prefix that the store was opened with."""
    uri: str
    """Whole uri of the object."""
    size: int
    """Stored size, in bytes."""
    etag: str = ""
    """Entity tag, without quotes."""
    generation: str = ""
    """Identity of this content, which reads are pinned to: the generation on GCS, the entity tag
    (on S3 `<entity tag>/<size>`) elsewhere; empty if a service has none."""
    crc32c: int | None = None
    """CRC32C (Castagnoli) of the stored bytes, or None if the service returned none."""
    updated: datetime | None = None
    """Time of the last change, aware, in UTC."""
    content_type: str = ""
    """Media type."""
    content_encoding: str = ""
    """`gzip` if the stored bytes are compressed, else empty. aioflux returns the stored bytes."""
    storage_class: str = ""
    """Storage class, as the service names it."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The user's own metadata."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteResult:
    """Outcomes of all keys of a `delete_many`."""

    deleted: tuple[str, ...]
    """Keys that were deleted."""
    missing: tuple[str, ...] = ()
    """Keys that no object had; not an error."""
    errors: Mapping[str, StorageError] = field(default_factory=dict)
    """Keys that could not be deleted, with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenUpload:
    """A multipart upload that was neither completed nor aborted: its parts are billed."""

    key: str
    """Name that the object would have, below the store's prefix. On `file://`, which does not keep
    it, the name of the file that holds its bytes."""
    upload_id: str
    """The service's id of the upload."""
    initiated: datetime
    """Time of its initiation, aware, in UTC; on `file://`, of the last write to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanResult:
    """Uploads and objects that a `clean` removed; in a dry run, that it would remove."""

    aborted: tuple[OpenUpload, ...]
    """Uploads that were aborted, by key and id."""
    removed: tuple[str, ...]
    """Keys of temporary objects that were deleted, sorted."""
    errors: Mapping[str, StorageError] = field(default_factory=dict)
    """Keys that could not be removed, with the reason."""

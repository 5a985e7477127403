"""Buckets and objects as resources of the JSON API, written and read.

Objects are written by a table of fields rather than by one function: a listing with a `fields`
mask then computes only the fields that it sends, which are most of its cost.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from aioflux.testing.gcs_server._checksums import Declared, declare
from aioflux.testing.gcs_server._errors import invalid
from aioflux.testing.gcs_server._messages import timestamp
from aioflux.testing.gcs_server._records import Attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from aioflux.testing.gcs_server._records import Bucket, ObjectRecord

    Field: TypeAlias = Callable[[ObjectRecord, str], Any]

_UNSAFE = frozenset("\r\n\0")  # these would end a header line of a download
_TEXTS = {
    "contentType": "content_type",
    "contentEncoding": "content_encoding",
    "contentDisposition": "content_disposition",
    "contentLanguage": "content_language",
    "cacheControl": "cache_control",
    "customTime": "custom_time",
}


def bucket_resource(bucket: Bucket, base_url: str) -> dict[str, Any]:
    """Describe a bucket."""
    resource: dict[str, Any] = {
        "kind": "storage#bucket",
        "id": bucket.name,
        "selfLink": f"{base_url}/storage/v1/b/{quote(bucket.name, safe='')}",
        "name": bucket.name,
        "projectNumber": "0",
        "generation": str(bucket.generation),
        "metageneration": str(bucket.metageneration),
        "location": bucket.location,
        "locationType": "multi-region" if bucket.location in {"US", "EU", "ASIA"} else "region",
        "storageClass": bucket.storage_class,
        "etag": base64.b64encode(b"\x08%d" % bucket.metageneration).decode(),
        "timeCreated": timestamp(bucket.time_created_us),
        "updated": timestamp(bucket.time_created_us),
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}},
    }
    if bucket.labels:
        resource["labels"] = dict(bucket.labels)
    return resource


def object_resource(record: ObjectRecord, base_url: str) -> dict[str, Any]:
    """Describe an object; fields without a value are left out."""
    return describe(record, base_url, OBJECT_FIELDS.items())


def describe(
    record: ObjectRecord, base_url: str, fields: Iterable[tuple[str, Field]]
) -> dict[str, Any]:
    """Describe an object by some of `OBJECT_FIELDS`."""
    return {name: value for name, field in fields if (value := field(record, base_url)) is not None}


def from_resource(resource: Mapping[str, Any]) -> Attributes:
    """Read the attributes of a new object; fields that a writer cannot set are ignored.

    Raises:
        APIError: 400, a value has the wrong type.
    """
    given = patch_attributes(Attributes(), resource)
    storage_class = _header_text(resource, "storageClass") or "STANDARD"
    return replace(given, storage_class=storage_class)


def patch_attributes(attributes: Attributes, changes: Mapping[str, Any]) -> Attributes:
    """Return attributes with some replaced: null removes one, the others stay.

    Raises:
        APIError: 400, a value has the wrong type.
    """
    texts = {
        field: _header_text(changes, name) for name, field in _TEXTS.items() if name in changes
    }
    metadata = attributes.metadata
    if "metadata" in changes:
        metadata = _patch_metadata(metadata, changes["metadata"])
    return replace(attributes, metadata=metadata, **texts)  # type: ignore[arg-type]


def declared_in_resource(resource: Mapping[str, Any]) -> Declared:
    """Read the checksums that a writer sends with the metadata.

    Raises:
        APIError: 400, a value is no checksum.
    """
    return declare(crc32c=_header_text(resource, "crc32c"), md5=_header_text(resource, "md5Hash"))


def check_text(name: str, value: str | None) -> str | None:
    """Return a value that will be a header of downloads.

    Raises:
        APIError: 400, it holds a line break or NUL.
    """
    if value is not None and not _UNSAFE.isdisjoint(value):
        raise invalid(f"Invalid value for: {name} holds a line break or NUL")
    return value


def _patch_metadata(old: Mapping[str, str], changes: Any) -> Mapping[str, str]:
    if changes is None:
        return {}
    if not isinstance(changes, dict):
        raise invalid("Invalid value for: metadata is not an object")
    merged = {**old, **changes}
    if any(value is not None and not isinstance(value, str) for value in merged.values()):
        raise invalid("Invalid value for: metadata holds a value that is not a string")
    for name, value in changes.items():
        check_text("metadata", name)
        check_text("metadata", value)
    return {name: value for name, value in merged.items() if value is not None}


def read_text(resource: Mapping[str, Any], name: str) -> str | None:
    """Read a field of text; null, like nothing, is None.

    Raises:
        APIError: 400, it is something else.
    """
    value = resource.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"Invalid value for: {name} is not a string")
    return value


def _header_text(resource: Mapping[str, Any], name: str) -> str | None:
    return check_text(name, read_text(resource, name) or None)


def _path(record: ObjectRecord) -> str:
    return f"storage/v1/b/{quote(record.bucket, safe='')}/o/{quote(record.name, safe='')}"


def _media_link(record: ObjectRecord, base_url: str) -> str:
    return f"{base_url}/download/{_path(record)}?generation={record.generation}&alt=media"


OBJECT_FIELDS: dict[str, Field] = {
    "kind": lambda record, base_url: "storage#object",
    "id": lambda record, base_url: f"{record.bucket}/{record.name}/{record.generation}",
    "selfLink": lambda record, base_url: f"{base_url}/{_path(record)}",
    "mediaLink": _media_link,
    "name": lambda record, base_url: record.name,
    "bucket": lambda record, base_url: record.bucket,
    "generation": lambda record, base_url: str(record.generation),
    "metageneration": lambda record, base_url: str(record.metageneration),
    "contentType": lambda record, base_url: record.attributes.content_type,
    "contentEncoding": lambda record, base_url: record.attributes.content_encoding,
    "contentDisposition": lambda record, base_url: record.attributes.content_disposition,
    "contentLanguage": lambda record, base_url: record.attributes.content_language,
    "cacheControl": lambda record, base_url: record.attributes.cache_control,
    "customTime": lambda record, base_url: record.attributes.custom_time,
    "storageClass": lambda record, base_url: record.attributes.storage_class,
    "metadata": lambda record, base_url: record.attributes.metadata or None,
    "size": lambda record, base_url: str(record.size),
    "md5Hash": lambda record, base_url: record.md5_base64,
    "crc32c": lambda record, base_url: record.crc32c_base64,
    "componentCount": lambda record, base_url: record.component_count,
    "etag": lambda record, base_url: record.etag,
    "timeCreated": lambda record, base_url: timestamp(record.time_created_us),
    "updated": lambda record, base_url: timestamp(record.updated_us),
    "timeStorageClassUpdated": lambda record, base_url: timestamp(record.time_created_us),
    "timeFinalized": lambda record, base_url: timestamp(record.time_created_us),
}
"""Value of each field of an object; None leaves it out."""

"""Buckets and objects as resources of the JSON API.

Objects are described by a table of fields rather than by one function: a listing with a `fields`
mask then computes only what it sends, which is most of its cost.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from aioflux.testing.gcs_server._render import timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aioflux.testing.gcs_server._records import Bucket, ObjectRecord

    Field: TypeAlias = Callable[[ObjectRecord, str], Any]


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
    """Describe an object; fields that it has no value for are left out."""
    return describe(record, base_url, OBJECT_FIELDS.items())


def describe(
    record: ObjectRecord, base_url: str, fields: Iterable[tuple[str, Field]]
) -> dict[str, Any]:
    """Describe an object by some of `OBJECT_FIELDS`."""
    return {name: value for name, field in fields if (value := field(record, base_url)) is not None}


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
"""How each field of an object is written; None leaves it out."""

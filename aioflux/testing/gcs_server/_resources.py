"""Resources of the JSON API: buckets and objects as JSON, and the selection of fields."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from aioflux.testing.gcs_server._checksums import DeclaredChecksums, decode_checksums
from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._messages import Request, Response, json_response, timestamp
from aioflux.testing.gcs_server._records import Attributes

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Headers
    from aioflux.testing.gcs_server._records import Bucket, ObjectRecord

    Field: TypeAlias = Callable[[ObjectRecord, str], Any]

Mask: TypeAlias = "Mapping[str, Mask | None]"
"""Selected fields by name, each with the mask of its subfields. None selects all subfields."""

_TOKEN = re.compile(r"[^,()/]+|[,()/]")
_MAX_DEPTH = 32

_LINE_BREAKS = frozenset("\r\n\0")  # not allowed in a header line of a download
_TEXT_FIELDS = {
    "contentType": "content_type",
    "contentEncoding": "content_encoding",
    "contentDisposition": "content_disposition",
    "contentLanguage": "content_language",
    "cacheControl": "cache_control",
    "customTime": "custom_time",
}


def bucket_resource(bucket: Bucket, base_url: str) -> dict[str, Any]:
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
    """Return the resource of an object, without fields that have no value."""
    return describe(record, base_url, OBJECT_FIELDS.items())


def describe(
    record: ObjectRecord, base_url: str, fields: Iterable[tuple[str, Field]]
) -> dict[str, Any]:
    """Return the resource of an object with some of `OBJECT_FIELDS`."""
    return {name: value for name, field in fields if (value := field(record, base_url)) is not None}


def attributes_from_resource(resource: Mapping[str, Any]) -> Attributes:
    """Return the attributes of a new object. Fields that a client cannot set are ignored."""
    attributes = patch_attributes(Attributes(), resource)
    storage_class = _header_text(resource, "storageClass") or "STANDARD"
    return replace(attributes, storage_class=storage_class)


def patch_attributes(attributes: Attributes, changes: Mapping[str, Any]) -> Attributes:
    """Return attributes with some of them replaced. The value null removes an attribute."""
    texts = {
        field: _header_text(changes, name)
        for name, field in _TEXT_FIELDS.items()
        if name in changes
    }
    metadata = attributes.metadata
    if "metadata" in changes:
        metadata = _patch_metadata(metadata, changes["metadata"])
    return replace(attributes, metadata=metadata, **texts)  # type: ignore[arg-type]


def read_checksum_fields(resource: Mapping[str, Any]) -> DeclaredChecksums:
    """Return the checksums in the resource of a new object."""
    return decode_checksums(
        crc32c=_header_text(resource, "crc32c"), md5=_header_text(resource, "md5Hash")
    )


def check_text(name: str, value: str | None) -> str | None:
    """Return a value that may be a header of a download; APIError (400) for a line break or NUL."""
    if value is not None and not _LINE_BREAKS.isdisjoint(value):
        raise invalid(f"Invalid value for: {name} has a line break or NUL")
    return value


def _patch_metadata(old: Mapping[str, str], changes: Any) -> Mapping[str, str]:
    if changes is None:
        return {}
    if not isinstance(changes, dict):
        raise invalid("Invalid value for: metadata is not an object")
    merged = {**old, **changes}
    if any(value is not None and not isinstance(value, str) for value in merged.values()):
        raise invalid("Invalid value for: metadata has a value that is not a string")
    for name, value in changes.items():
        check_text("metadata", name)
        check_text("metadata", value)
    return {name: value for name, value in merged.items() if value is not None}


def read_text(resource: Mapping[str, Any], name: str) -> str | None:
    """Return a text, or None if it is null or missing; APIError (400) if it is of another type."""
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
"""Functions that return the value of a field, by field name. None omits the field."""


@lru_cache(maxsize=256)
def parse_fields(text: str) -> Mask:
    """Parse the query parameter `fields`. Raise APIError (400) if it is malformed."""
    tokens = [token.strip() for token in _TOKEN.findall(text)]
    tokens.reverse()
    mask = _parse_list(tokens, 0)
    if tokens:
        raise _invalid_selection(text)
    return mask


def select(value: Any, mask: Mask | None) -> Any:
    """Return the parts of a JSON value that a mask selects."""
    if mask is None:
        return value
    if isinstance(value, list):
        return [select(item, mask) for item in value]
    if not isinstance(value, dict):
        return value
    selects_all = "*" in mask
    return {
        name: select(subvalue, mask.get(name, mask.get("*")))
        for name, subvalue in value.items()
        if selects_all or name in mask
    }


def resource_response(
    request: Request, value: dict[str, Any], *, headers: Headers = ()
) -> Response:
    """Build a response with the fields of a resource that the query parameter `fields` selects."""
    fields = request.query.get("fields")
    return json_response(select(value, parse_fields(fields)) if fields else value, headers=headers)


def _parse_list(tokens: list[str], depth: int) -> Mask:
    """Parse `item,item,...` and remove its tokens from `tokens`, which are in reverse order."""
    mask: dict[str, Mask | None] = {}
    while True:
        name, submask = _parse_item(tokens, depth)
        mask[name] = _union(mask[name], submask) if name in mask else submask
        if not tokens or tokens[-1] != ",":
            return mask
        tokens.pop()


def _parse_item(tokens: list[str], depth: int) -> tuple[str, Mask | None]:
    """Parse `name`, `name/item` or `name(list)`."""
    if not tokens or tokens[-1] in ",()/" or depth > _MAX_DEPTH:
        raise _invalid_selection("".join(reversed(tokens)))
    name = tokens.pop()
    next_symbol = tokens[-1] if tokens else ""
    if next_symbol == "/":
        tokens.pop()
        subname, submask = _parse_item(tokens, depth + 1)
        return name, {subname: submask}
    if next_symbol == "(":
        tokens.pop()
        mask = _parse_list(tokens, depth + 1)
        if not tokens or tokens.pop() != ")":
            raise _invalid_selection(name)
        return name, mask
    return name, None


def _union(first: Mask | None, second: Mask | None) -> Mask | None:
    """Return a mask that selects the fields of both masks."""
    if first is None or second is None:
        return None
    merged = dict(first)
    for name, submask in second.items():
        merged[name] = _union(merged[name], submask) if name in merged else submask
    return merged


def _invalid_selection(text: str) -> APIError:
    return APIError(400, "invalidParameter", f"Invalid field selection {text}")

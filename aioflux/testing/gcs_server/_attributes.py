"""What JSON requests say of an object apart from its bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioflux.testing.gcs_server._checksums import Declared, declare
from aioflux.testing.gcs_server._errors import invalid
from aioflux.testing.gcs_server._records import Attributes

if TYPE_CHECKING:
    from collections.abc import Mapping

_UNSAFE = frozenset("\r\n\0")  # these would end a line of the headers of a download
_TEXTS = {
    "contentType": "content_type",
    "contentEncoding": "content_encoding",
    "contentDisposition": "content_disposition",
    "contentLanguage": "content_language",
    "cacheControl": "cache_control",
    "customTime": "custom_time",
}


def from_resource(resource: Mapping[str, Any]) -> Attributes:
    """Read the attributes of a new object; what a writer cannot set is ignored.

    Raises:
        APIError: 400, a value has the wrong type.
    """
    given = patched(Attributes(), resource)
    storage_class = _text(resource, "storageClass") or "STANDARD"
    return replace(given, storage_class=storage_class)


def patched(attributes: Attributes, changes: Mapping[str, Any]) -> Attributes:
    """Return attributes with some replaced, as `patch` does: null removes, the rest stays.

    Raises:
        APIError: 400, a value has the wrong type.
    """
    texts = {field: _text(changes, name) for name, field in _TEXTS.items() if name in changes}
    metadata = attributes.metadata
    if "metadata" in changes:
        metadata = _patched_metadata(metadata, changes["metadata"])
    return replace(attributes, metadata=metadata, **texts)  # type: ignore[arg-type]


def declared_in_resource(resource: Mapping[str, Any]) -> Declared:
    """Read the checksums that a writer sends along with the metadata.

    Raises:
        APIError: 400, a value is no checksum.
    """
    return declare(crc32c=_text(resource, "crc32c"), md5=_text(resource, "md5Hash"))


def check_text(name: str, value: str | None) -> str | None:
    """Return a value that will be a header of each download.

    Raises:
        APIError: 400, it holds a line break or NUL.
    """
    if value is not None and not _UNSAFE.isdisjoint(value):
        raise invalid(f"Invalid value for: {name} holds a line break or NUL")
    return value


def _patched_metadata(old: Mapping[str, str], changes: Any) -> Mapping[str, str]:
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


def _text(resource: Mapping[str, Any], name: str) -> str | None:
    value = resource.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"Invalid value for: {name} is not a string")
    return check_text(name, value or None)

"""XML API: XML documents, and query parameters."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.sax.saxutils import escape

from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._preconditions import read_integer

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Request

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_MAX_PAGE = 1000
_SUBRESOURCES = frozenset(["acl", "compose", "encryption", "retention", "tagging"])
_OBJECT_SUBRESOURCES = _SUBRESOURCES | {"attributes", "legal-hold", "restore", "select", "torrent"}
_BUCKET_SUBRESOURCES = _SUBRESOURCES | {
    "accelerate",
    "analytics",
    "autoclass",
    "billing",
    "cors",
    "defaultObjectAcl",
    "delete",
    "intelligent-tiering",
    "inventory",
    "lifecycle",
    "location",
    "logging",
    "metrics",
    "notification",
    "notificationConfig",
    "object-lock",
    "ownershipControls",
    "policy",
    "policyStatus",
    "publicAccessBlock",
    "replication",
    "requestPayment",
    "rpo",
    "storageClass",
    "uploads",
    "versioning",
    "website",
}
_UPLOAD_PARAMETERS = frozenset({"partNumber", "uploadId", "uploads"})


def element(name: str, value: object) -> str:
    """Encode an element that contains text. None is encoded as nothing."""
    if value is None:
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"<{name}>{escape(text)}</{name}>"


def elements(**values: object) -> str:
    """Encode one element per keyword, except for values that are None."""
    return "".join(element(name, value) for name, value in values.items())


def common_prefixes(prefixes: Iterable[str], encode: Callable[[str], str]) -> list[str]:
    return [
        f"<CommonPrefixes>{elements(Prefix=encode(prefix))}</CommonPrefixes>" for prefix in prefixes
    ]


def encoder(query: Mapping[str, str]) -> Callable[[str], str]:
    """Return the function that encodes the names in a listing, as `encoding-type` requests."""
    match query.get("encoding-type"):
        case None:
            return str
        case "url":
            return quote
        case other:
            raise invalid(f"Invalid encoding-type: {other}")


def document(name: str, *content: str) -> str:
    """Encode a root element in the namespace that S3 clients expect."""
    return f'<{name} xmlns="{_NAMESPACE}">{"".join(content)}</{name}>'


def read_page_size(query: Mapping[str, str], name: str) -> int:
    """Return the page size in a query: by default 1,000, which is also the maximum."""
    value = read_integer(query, name)
    if value is not None and value < 0:
        raise invalid(f"{name} must not be negative.")
    return _MAX_PAGE if value is None else min(value, _MAX_PAGE)


def parse(body: bytes, root: str) -> ET.Element:
    """Parse a document, and remove its namespaces.

    Raises:
        APIError: 400 if the body is not XML, or has another root.
    """
    try:
        tree = ET.fromstring(body)  # noqa: S314 - expat bounds entity expansion since 2.4.1
    except ET.ParseError as exc:
        raise malformed(f"The body is not XML: {exc}") from exc
    for element in tree.iter():
        element.tag = element.tag.rpartition("}")[2]
    if tree.tag != root:
        raise malformed(f"The root element must be {root}.")
    return tree


def malformed(message: str) -> APIError:
    """Build the error (400) for a body that is not the expected XML document."""
    return APIError(400, "invalid", message, code="MalformedXML")


def check_object_query(request: Request) -> None:
    """Reject a request for a subresource of an object: `PUT ?acl` must not overwrite the object.

    Upload parameters that do not fit the method are rejected too.
    """
    if not request.query:
        return
    _check_query(request, _OBJECT_SUBRESOURCES)
    misplaced = sorted(_UPLOAD_PARAMETERS & request.query.keys())
    if misplaced:
        raise invalid(f"Invalid or incomplete upload parameters: {', '.join(misplaced)}")


def check_bucket_query(request: Request) -> None:
    """Reject a request for a subresource of a bucket that the server does not implement."""
    if request.query:
        _check_query(request, _BUCKET_SUBRESOURCES)


def _check_query(request: Request, subresources: frozenset[str]) -> None:
    unsupported = sorted(subresources & request.query.keys())
    if unsupported:
        raise APIError(501, "notImplemented", f"Not implemented here: {', '.join(unsupported)}")

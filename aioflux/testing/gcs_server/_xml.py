"""XML documents, page sizes and subresources of the XML API."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.sax.saxutils import escape

from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._preconditions import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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


def node(name: str, value: object) -> str:
    """Write an element that holds text; None writes nothing."""
    if value is None:
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"<{name}>{escape(text)}</{name}>"


def nodes(**values: object) -> str:
    """Write elements by name, without those that are None."""
    return "".join(node(name, value) for name, value in values.items())


def common_prefixes(prefixes: Iterable[str], encode: Callable[[str], str]) -> list[str]:
    """Write the common prefixes of a listing."""
    return [f"<CommonPrefixes>{nodes(Prefix=encode(each))}</CommonPrefixes>" for each in prefixes]


def encoder(query: Mapping[str, str]) -> Callable[[str], str]:
    """Return the encoding of names in a listing: percent-encoding or none, by the query."""
    match query.get("encoding-type"):
        case None:
            return str
        case "url":
            return quote
        case other:
            raise invalid(f"Invalid encoding-type: {other}")


def document(name: str, *content: str) -> str:
    """Write a root element in the namespace that S3 clients expect."""
    return f'<{name} xmlns="{_NAMESPACE}">{"".join(content)}</{name}>'


def limit(query: Mapping[str, str], name: str) -> int:
    """Read the size of a page: 1,000 by default and at most."""
    value = integer(query, name)
    if value is not None and value < 0:
        raise invalid(f"{name} must not be negative.")
    return _MAX_PAGE if value is None else min(value, _MAX_PAGE)


def parse(body: bytes, root: str) -> ET.Element:
    """Read a document, with or without a namespace; tags lose theirs. Another root is a 400."""
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
    """Build the 400 for a body that is not the expected document."""
    return APIError(400, "invalid", message, code="MalformedXML")


def check_object_query(request: Request) -> None:
    """Reject a request for a subresource of an object: `PUT ?acl` must not overwrite the object.

    Misplaced or incomplete parameters of an upload are a 400, the rest is a 501.
    """
    if not request.query:
        return
    _check_query(request, _OBJECT_SUBRESOURCES)
    misplaced = sorted(_UPLOAD_PARAMETERS & request.query.keys())
    if misplaced:
        raise invalid(f"Not for this method, or not without others: {', '.join(misplaced)}")


def check_bucket_query(request: Request) -> None:
    """Reject a request for a subresource of a bucket that the server does not have."""
    if request.query:
        _check_query(request, _BUCKET_SUBRESOURCES)


def _check_query(request: Request, subresources: frozenset[str]) -> None:
    found = sorted(subresources & request.query.keys())
    if found:
        raise APIError(501, "notImplemented", f"Not implemented here: {', '.join(found)}")

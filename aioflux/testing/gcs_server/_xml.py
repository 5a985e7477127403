"""XML documents in the form of the XML API, and the numbers in its queries."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.sax.saxutils import escape

from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._preconditions import integer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_PAGE = 1000


def node(name: str, value: object) -> str:
    """Write an element that holds text; None writes nothing."""
    return "" if value is None else f"<{name}>{escape(_text(value))}</{name}>"


def nodes(**values: object) -> str:
    """Write elements by name, without those that are None."""
    return "".join(node(name, value) for name, value in values.items())


def encoder(query: Mapping[str, str]) -> Callable[[str], str]:
    """Return how names are written: percent-encoded where the caller asks for it.

    Raises:
        APIError: 400, it asks for another encoding.
    """
    match query.get("encoding-type"):
        case None:
            return str
        case "url":
            return quote
        case other:
            raise APIError(400, "invalid", f"Invalid encoding-type: {other}")


def document(name: str, *content: str) -> str:
    """Write a root element in the namespace by which S3 clients find its content."""
    return f'<{name} xmlns="{_NAMESPACE}">{"".join(content)}</{name}>'


def limit(query: Mapping[str, str], name: str) -> int:
    """Read the size of a page: 1,000 by default and at most.

    Raises:
        APIError: 400, it is no number or below 0.
    """
    value = integer(query, name)
    if value is not None and value < 0:
        raise APIError(400, "invalid", f"{name} must not be negative.")
    return _PAGE if value is None else min(value, _PAGE)


def parse(body: bytes, root: str) -> ET.Element:
    """Read a document, with or without a namespace; tags lose theirs.

    Raises:
        APIError: 400, it is no XML or has another root.
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
    """Build the 400 for a body that is not the document that was expected."""
    return APIError(400, "invalid", message, code="MalformedXML")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

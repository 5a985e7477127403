"""One page of List Blobs, parsed into columns, and the order of pages.

There are three orders. Ours is that of UTF-8. Emulators sort a flat namespace by UTF-16, which
differs for characters beyond U+FFFF and others above U+D7FF. A hierarchical namespace is sorted by
segment, so that "a/b" comes before "a-b". A page shows both: nothing before the first directory or
high character is out of order, whatever follows (`may_be_unsorted`).
Source: learn.microsoft.com/rest/api/storageservices/list-blobs.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aioflux._services.headers import parse_http_date
from aioflux._services.xml_multipart import parse_xml
from aioflux._values.columns import TimeColumn
from aioflux._values.listing import MAX_SIZE_BYTES, Kind, Listing

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

__all__ = ["ListedBlob", "ListedPage", "in_range", "listing_of", "may_be_unsorted", "parse_page"]

_FIRST_DOUBTFUL = "\ud7ff"


@dataclass(frozen=True, slots=True)
class ListedBlob:
    """One blob of a listing."""

    name: str
    """Whole name."""
    size: int
    """Bytes."""
    etag: str
    """ETag; empty if nothing is committed."""
    changed: str
    """Time of the last change, as an HTTP date."""
    kind: Kind
    """Content type, content encoding, access tier, the user's metadata."""


@dataclass(slots=True)
class ListedPage:
    """One page."""

    blobs: list[ListedBlob] = field(default_factory=list)
    """Blobs, in the order of the service."""
    prefixes: list[str] = field(default_factory=list)
    """Common prefixes, if the request has a delimiter."""
    next_marker: str = ""
    """Marker of the next page; empty at the end."""
    has_directories: bool = False
    """The namespace is a hierarchical one."""


def parse_page(data: bytes | bytearray | memoryview) -> ListedPage:
    """Parse a page without its directories and their markers.

    Raises:
        ValueError: It is malformed. An empty document would end the listing without an error.
    """
    root = parse_xml(data)
    blobs = root.find("Blobs")
    if root.tag != "EnumerationResults" or blobs is None:
        raise ValueError(f"the response is <{root.tag}>, not a page of blobs")
    page = ListedPage(next_marker=root.findtext("NextMarker") or "")
    for each in blobs:
        if each.tag == "BlobPrefix":
            page.prefixes.append(_name(each))
        elif each.tag == "Blob":
            _add(page, each)
    return page


def _name(element: ET.Element) -> str:
    name = element.find("Name")
    if name is None or not name.text:
        raise ValueError("a blob of the page has no name")
    # Names that XML cannot hold are percent-encoded, which an attribute shows.
    return unquote(name.text) if name.get("Encoded") == "true" else name.text


def _add(page: ListedPage, element: ET.Element) -> None:
    properties = {child.tag: child.text or "" for child in element.iterfind("Properties/*")}
    # Only listings return names in their original case.
    user = {child.tag.lower(): child.text or "" for child in element.iterfind("Metadata/*")}
    is_marker = user.get("hdi_isfolder", "").lower() == "true"
    if properties.get("ResourceType") == "directory" or is_marker:
        page.has_directories = True
        return
    kind = (
        properties.get("Content-Type", ""),
        properties.get("Content-Encoding", ""),
        properties.get("AccessTier", ""),
        tuple(sorted(user.items())),
    )
    size = int(properties.get("Content-Length") or 0)
    if not 0 <= size <= MAX_SIZE_BYTES:
        raise ValueError(f"a size is {size}")
    etag = properties.get("Etag", "").strip('"')
    blob = ListedBlob(_name(element), size, etag, properties.get("Last-Modified", ""), kind)
    page.blobs.append(blob)


def may_be_unsorted(page: ListedPage) -> bool:
    """Return whether names of the next pages may sort before the end of a page.

    True for a page with prefixes, since a hierarchical namespace has "a/" before "a-b".
    """
    if not page.next_marker:
        return False
    return (
        page.has_directories
        or bool(page.prefixes)
        or any(max(blob.name) > _FIRST_DOUBTFUL for blob in page.blobs)
    )


def in_range(page: ListedPage, *, prefix: str, start: str, end: str) -> ListedPage:
    """Return the part of a page within `[start, end)`, sorted; past the end, it is the last page.

    Raises:
        ValueError: A name is not below the prefix.
    """
    blobs = sorted(page.blobs, key=lambda blob: blob.name)
    prefixes = sorted(set(page.prefixes))
    for name in (*(blob.name for blob in blobs[:1] + blobs[-1:]), *prefixes[:1], *prefixes[-1:]):
        if not name.startswith(prefix):
            raise ValueError(f"{name!r} is not below {prefix!r}")
    is_past = bool(end) and any(names and names[-1] >= end for names in _names(blobs, prefixes))
    return ListedPage(
        [blob for blob in blobs if start <= blob.name and (not end or blob.name < end)],
        [each for each in prefixes if start <= each and (not end or each < end)],
        "" if is_past else page.next_marker,
        page.has_directories,
    )


def _names(blobs: list[ListedBlob], prefixes: list[str]) -> tuple[list[str], list[str]]:
    return [blob.name for blob in blobs[-1:]], prefixes


def listing_of(blobs: list[ListedBlob], *, prefix: str, root: str) -> Listing:
    """Return blobs as columns."""
    listing = Listing()
    cut = len(prefix)
    updated = TimeColumn()
    updated.add_times([parse_http_date(blob.changed) if blob.changed else None for blob in blobs])
    etags = [blob.etag for blob in blobs]
    listing.extend_columns(
        root,
        keys=[blob.name[cut:] for blob in blobs],
        sizes=[blob.size for blob in blobs],
        etags=etags,
        generations=etags,
        crc32c=array("q", [-1]) * len(blobs),
        updated=updated,
        kinds=[blob.kind for blob in blobs],
    )
    return listing

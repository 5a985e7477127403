"""One page of List Blobs, parsed into columns, and the order that pages come in.

Three orders are met. Ours is that of UTF-8. A flat namespace is sorted by UTF-16 in emulators,
which differs where characters beyond U+FFFF meet others above U+D7FF. A hierarchical namespace is
sorted by segment, so that "a/b" comes before "a-b". Both are told by a page: nothing before the
first directory or high character is out of order, whatever follows (`may_be_unsorted`).
Source: learn.microsoft.com/rest/api/storageservices/list-blobs.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aioflux._services.azure.wire import parse_xml
from aioflux._services.headers import parse_http_date
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
    """ETag; empty where nothing is committed."""
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
    """Beginnings of names, where one level was listed."""
    next_marker: str = ""
    """Where the next page begins; empty at the end."""
    has_directories: bool = False
    """The namespace is a hierarchical one."""


def parse_page(data: bytes | bytearray | memoryview) -> ListedPage:
    """Parse a page; directories, and what stands for them, are left out.

    Raises:
        ValueError: It is none. An answer that says nothing would end a listing in silence.
    """
    root = parse_xml(data)
    blobs = root.find("Blobs")
    if root.tag != "EnumerationResults" or blobs is None:
        raise ValueError(f"the service's answer is <{root.tag}>, not a page of blobs")
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
    # Names that XML cannot carry are percent-encoded, and say so.
    return unquote(name.text) if name.get("Encoded") == "true" else name.text


def _add(page: ListedPage, element: ET.Element) -> None:
    told = {child.tag: child.text or "" for child in element.iterfind("Properties/*")}
    # The service keeps the case of names in listings alone.
    user = {child.tag.lower(): child.text or "" for child in element.iterfind("Metadata/*")}
    is_marker = user.get("hdi_isfolder", "").lower() == "true"
    if told.get("ResourceType") == "directory" or is_marker:
        page.has_directories = True
        return
    kind = (
        told.get("Content-Type", ""),
        told.get("Content-Encoding", ""),
        told.get("AccessTier", ""),
        tuple(sorted(user.items())),
    )
    size = int(told.get("Content-Length") or 0)
    if not 0 <= size <= MAX_SIZE_BYTES:
        raise ValueError(f"a size is {size}")
    etag = told.get("Etag", "").strip('"')
    blob = ListedBlob(_name(element), size, etag, told.get("Last-Modified", ""), kind)
    page.blobs.append(blob)


def may_be_unsorted(page: ListedPage) -> bool:
    """Tell whether what follows a page may belong before its end.

    A level with prefixes is, since a hierarchical namespace has "a/" before "a-b".
    """
    if not page.next_marker:
        return False
    return (
        page.has_directories
        or bool(page.prefixes)
        or any(max(blob.name) > _FIRST_DOUBTFUL for blob in page.blobs)
    )


def in_range(page: ListedPage, *, prefix: str, start: str, end: str) -> ListedPage:
    """Return what of a page is within `[start, end)`, sorted; past the end nothing follows.

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
    """Return blobs as columns.

    Args:
        blobs: The blobs, sorted.
        prefix: What each name begins with; left out of keys.
        root: The uri of that.
    """
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

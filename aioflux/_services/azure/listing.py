"""One page of List Blobs, parsed into columns, and the order of its names.

Listings of this package are sorted by code point. Listings of Azure may have another order: an
emulator sorts a flat namespace by UTF-16, which differs for characters above U+D7FF. A hierarchical
namespace is sorted by path segment, so that "a/b" precedes "a-b". Names are in order up to the
first name with a character above U+D7FF, the first directory or the first common prefix:
`may_be_unsorted` searches a page for any of the three.
Source: learn.microsoft.com/rest/api/storageservices/list-blobs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aioflux._services.azure import wire
from aioflux._services.base import Page
from aioflux._services.responses import (
    EmptyPageCounter,
    malformed_page,
    parse_http_date,
    unexpected_page,
)
from aioflux._services.sender import MAX_PAGE_BYTES
from aioflux._services.xml_reader import read_xml
from aioflux._values.columns import TimeColumn
from aioflux._values.listing import MAX_SIZE_BYTES, Kind, Listing

if TYPE_CHECKING:
    from aioflux._services.azure.sender import AzureSender
    from aioflux._services.base import ListRequest

_LAST_SORTED = "\ud7ff"
_METADATA = "Metadata/"


@dataclass(frozen=True, slots=True)
class ListedBlob:
    """One blob of a listing."""

    name: str
    """Full name of the blob, in the container."""
    size: int
    """Size in bytes."""
    etag: str
    """ETag; empty for a key that has only uncommitted blocks."""
    changed: str
    """Time of the last change, as an HTTP date."""
    kind: Kind
    """Attributes; the storage class is the access tier."""


@dataclass(slots=True)
class ListedPage:
    """One page of a listing, before it is converted to columns."""

    blobs: list[ListedBlob] = field(default_factory=list)
    """Blobs, in the order of the service."""
    prefixes: list[str] = field(default_factory=list)
    """Common prefixes, if the request has a delimiter."""
    next_marker: str = ""
    """Marker of the next page; empty for the last page."""
    has_directories: bool = False
    """The response had directories, or markers of directories."""


def parse_page(data: bytes | bytearray | memoryview) -> ListedPage:
    """Parse a page; leave out directories and blobs that mark directories.

    Raises:
        ValueError: The page is malformed, or the XML document is not a listing.
    """
    page = ListedPage()
    root, fields = read_xml(
        data,
        {
            "Blobs/Blob": lambda texts: _add_blob(page, texts),
            "Blobs/BlobPrefix": lambda texts: page.prefixes.append(_name(texts)),
        },
    )
    if root != "EnumerationResults" or "Blobs" not in fields:
        raise ValueError(f"the response is <{root}>, not a page of blobs")
    page.next_marker = fields.get("NextMarker", "")
    return page


def _name(texts: Mapping[str, str]) -> str:
    name = texts.get("Name")
    if not name:
        raise ValueError("a blob of the page has no name")
    # An attribute marks percent-encoded names, which XML cannot represent otherwise.
    return unquote(name) if texts.get("Name@Encoded") == "true" else name


def _add_blob(page: ListedPage, texts: Mapping[str, str]) -> None:
    get = texts.get
    # Listings return metadata names in their original case, all other responses in lower case.
    user = {
        path.removeprefix(_METADATA).lower(): text
        for path, text in texts.items()
        if path.startswith(_METADATA)
    }
    is_marker = user.get("hdi_isfolder", "").lower() == "true"
    if get("Properties/ResourceType") == "directory" or is_marker:
        page.has_directories = True
        return
    kind = Kind(
        get("Properties/Content-Type", ""),
        get("Properties/Content-Encoding", ""),
        get("Properties/AccessTier", ""),
        tuple(sorted(user.items())),
        get("Properties/Content-Disposition", ""),
        get("Properties/Cache-Control", ""),
    )
    size = int(get("Properties/Content-Length") or 0)
    if not 0 <= size <= MAX_SIZE_BYTES:
        raise ValueError(f"the size of a blob is {size}")
    etag = get("Properties/Etag", "").strip('"')
    blob = ListedBlob(_name(texts), size, etag, get("Properties/Last-Modified", ""), kind)
    page.blobs.append(blob)


def may_be_unsorted(page: ListedPage) -> bool:
    """Return whether the next pages may have names that sort before names of this page.

    True for a page with prefixes, since a hierarchical namespace lists "a/" before "a-b".
    """
    if not page.next_marker:
        return False
    return (
        page.has_directories
        or bool(page.prefixes)
        or any(max(blob.name) > _LAST_SORTED for blob in page.blobs)
    )


def in_range(page: ListedPage, *, prefix: str, start: str, end: str) -> ListedPage:
    """Return the names of a page in `[start, end)`, sorted; no next page if it reaches `end`.

    Raises:
        ValueError: A name does not begin with the prefix.
    """
    blobs = sorted(page.blobs, key=lambda blob: blob.name)
    prefixes = sorted(set(page.prefixes))
    for name in (*(blob.name for blob in blobs[:1] + blobs[-1:]), *prefixes[:1], *prefixes[-1:]):
        if not name.startswith(prefix):
            raise ValueError(f"{name!r} is not below {prefix!r}")
    last_names = [blob.name for blob in blobs[-1:]] + prefixes[-1:]
    reaches_end = bool(end) and any(name >= end for name in last_names)
    return ListedPage(
        [blob for blob in blobs if start <= blob.name and (not end or blob.name < end)],
        [name for name in prefixes if start <= name and (not end or name < end)],
        "" if reaches_end else page.next_marker,
        page.has_directories,
    )


def listing_of(blobs: list[ListedBlob], *, prefix: str, root: str) -> Listing:
    """Return blobs as columns."""
    listing = Listing()
    num_cut = len(prefix)
    updated = TimeColumn()
    updated.add_times([parse_http_date(blob.changed) if blob.changed else None for blob in blobs])
    etags = [blob.etag for blob in blobs]
    listing.extend_columns(
        root,
        keys=[blob.name[num_cut:] for blob in blobs],
        sizes=[blob.size for blob in blobs],
        etags=etags,
        generations=etags,
        crc32c=array("q", [-1]) * len(blobs),
        updated=updated,
        kinds=[blob.kind for blob in blobs],
    )
    return listing


class AzureLister:
    """Reader of sorted pages below the prefix of a store.

    A page that may be unsorted is sorted with all following pages, as one page in memory. The
    sorted page is returned in parts, or whole if it has common prefixes.
    """

    def __init__(
        self, sender: AzureSender, path: bytes, prefix: str, *, uri: Callable[[str], str]
    ) -> None:
        """Initialize; `path` is the path of the container."""
        self._sender = sender
        self._prefix = prefix
        self._uri = uri
        self._path = path
        # The sorted page that `_cut_page` cut last, by the token of the next part.
        self._sorted: dict[str, ListedPage] = {}

    async def page(self, request: ListRequest, size: int) -> Page:
        """Read one page; see `Service.list_page`.

        The page has at most `size` objects, unless it is a sorted page with common prefixes.
        """
        prefix, delimiter = request.prefix, request.delimiter
        marker, _, offset = request.page_token.rpartition(":")
        listed = self._sorted.pop(request.page_token, None)
        if listed is None:
            listed = await self.read(prefix, delimiter=delimiter, marker=marker, size=size)
            if offset or may_be_unsorted(listed):
                listed = await self._read_all_pages(prefix, delimiter, listed, size)
        try:
            page = in_range(
                listed,
                prefix=self._prefix + prefix,
                start=request.start_offset and self._prefix + request.start_offset,
                end=request.end_offset and self._prefix + request.end_offset,
            )
        except ValueError as exc:
            raise unexpected_page(self._uri(prefix), exc) from exc
        return self._cut_page(page, marker, int(offset or 0), size)

    def _cut_page(self, page: ListedPage, marker: str, offset: int, size: int) -> Page:
        """Return a page, or a part of `size` objects if `page` was merged from several pages.

        A sorted page with common prefixes is not cut. The page token is `<marker>:` for a page of
        the service, and `<marker>:<offset>` for the objects from `offset` on in the sorted page
        that begins at `marker`.
        """
        blobs = page.blobs
        token = f"{page.next_marker}:" if page.next_marker else ""
        if not token and (offset or len(blobs) > size) and not page.prefixes:
            blobs = page.blobs[offset : offset + size]
            if offset + size < len(page.blobs):
                token = f"{marker}:{offset + size}"
                self._sorted.clear()
                self._sorted[token] = page
        num_cut = len(self._prefix)
        return Page(
            objects=listing_of(blobs, prefix=self._prefix, root=self._uri("")),
            prefixes=[name[num_cut:] for name in page.prefixes],
            next_token=token,
        )

    async def _read_all_pages(
        self, prefix: str, delimiter: str, first: ListedPage, size: int
    ) -> ListedPage:
        """Read the pages after `first`, and return `first` and these pages as one page."""
        merged = first
        empty_pages = EmptyPageCounter(self._uri(prefix))
        while marker := merged.next_marker:
            page = await self.read(prefix, delimiter=delimiter, marker=marker, size=size)
            empty_pages.count(len(page.blobs) + len(page.prefixes))
            merged = ListedPage(
                merged.blobs + page.blobs, merged.prefixes + page.prefixes, page.next_marker
            )
        return merged

    async def read(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        marker: str = "",
        size: int,
        include: str = "metadata",
    ) -> ListedPage:
        """Read one page in the order of the service."""
        query = {
            "restype": "container",
            "comp": "list",
            "include": include,
            "maxresults": str(size),
            "prefix": self._prefix + prefix,
            "delimiter": delimiter,
            "marker": marker,
        }
        query = {name: value for name, value in query.items() if value}
        target = wire.query_target(self._path, query)
        response = await self._sender.send(
            b"GET", target, "list", prefix, max_body_bytes=MAX_PAGE_BYTES
        )
        try:
            page = parse_page(response.body)
        except ValueError as exc:
            response.discard_connection()
            raise malformed_page(self._uri(prefix), exc) from exc
        if page.next_marker and page.next_marker == marker:
            raise unexpected_page(self._uri(prefix), "its next page is the same page again")
        return page

"""Listings of one container, sorted here if the service does not sort them by code point."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aioflux._services.azure import list_page as listing
from aioflux._services.azure import wire
from aioflux._services.base import Page
from aioflux._services.sender import MAX_PAGE_BYTES
from aioflux._services.status import EmptyPageCounter, malformed_page, unexpected_page

if TYPE_CHECKING:
    from aioflux._services.azure.sender import AzureSender
    from aioflux._services.base import ListRequest


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
        self._sorted: dict[str, listing.ListedPage] = {}

    async def page(self, request: ListRequest, size: int) -> Page:
        """Read one page; see `Service.list_page`.

        The page has at most `size` objects, unless it is a sorted page with common prefixes.
        """
        prefix, delimiter = request.prefix, request.delimiter
        marker, _, offset = request.page_token.rpartition(":")
        listed = self._sorted.pop(request.page_token, None)
        if listed is None:
            listed = await self.read(prefix, delimiter=delimiter, marker=marker, size=size)
            if offset or listing.may_be_unsorted(listed):
                listed = await self._read_all_pages(prefix, delimiter, listed, size)
        try:
            page = listing.in_range(
                listed,
                prefix=self._prefix + prefix,
                start=request.start_offset and self._prefix + request.start_offset,
                end=request.end_offset and self._prefix + request.end_offset,
            )
        except ValueError as exc:
            raise unexpected_page(self._uri(prefix), exc) from exc
        return self._cut_page(page, marker, int(offset or 0), size)

    def _cut_page(self, page: listing.ListedPage, marker: str, offset: int, size: int) -> Page:
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
            objects=listing.listing_of(blobs, prefix=self._prefix, root=self._uri("")),
            prefixes=[name[num_cut:] for name in page.prefixes],
            next_token=token,
        )

    async def _read_all_pages(
        self, prefix: str, delimiter: str, first: listing.ListedPage, size: int
    ) -> listing.ListedPage:
        """Read the pages after `first`, and return `first` and these pages as one page."""
        merged = first
        empty_pages = EmptyPageCounter(self._uri(prefix))
        while marker := merged.next_marker:
            page = await self.read(prefix, delimiter=delimiter, marker=marker, size=size)
            empty_pages.count(len(page.blobs) + len(page.prefixes))
            merged = listing.ListedPage(
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
    ) -> listing.ListedPage:
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
            page = listing.parse_page(response.body)
        except ValueError as exc:
            response.discard_connection()
            raise malformed_page(self._uri(prefix), exc) from exc
        if page.next_marker and page.next_marker == marker:
            raise unexpected_page(self._uri(prefix), "its next page is the same page again")
        return page

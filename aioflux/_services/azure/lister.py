"""Listings of one container: pages in the order of keys, whatever the order of the service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._services.azure import list_page as listing
from aioflux._services.azure import wire
from aioflux._services.base import Page
from aioflux._services.status import EmptyPageCounter, malformed_page, unexpected_page
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux._services.azure.sender import AzureSender
    from aioflux._services.base import ListRequest

__all__ = ["AzureLister"]


class AzureLister:
    """Reads pages below a prefix; listings that may be unsorted are sorted here, as a whole."""

    def __init__(
        self, sender: AzureSender, path: bytes, prefix: str, *, uri: Callable[[str], str]
    ) -> None:
        """Initialize; `path` is that of the container."""
        self._sender = sender
        self._prefix = prefix
        self._uri = uri
        self._path = path
        self._sorted: dict[str, listing.ListedPage] = {}

    async def page(self, request: ListRequest, size: int) -> Page:
        """Read one page of `size` objects at most; see `Service.list_page`."""
        prefix, delimiter = request.prefix, request.delimiter
        marker, _, offset = request.page_token.rpartition(":")
        found = self._sorted.pop(request.page_token, None)
        if found is None:
            found = await self.read(prefix, delimiter=delimiter, marker=marker, size=size)
            if offset or listing.may_be_unsorted(found):
                found = await self._read_all_pages(prefix, delimiter, found, size)
        whole = self._prefix + prefix
        try:
            page = listing.in_range(
                found,
                prefix=whole,
                start=request.start_offset and self._prefix + request.start_offset,
                end=request.end_offset and self._prefix + request.end_offset,
            )
        except ValueError as exc:
            raise unexpected_page(self._uri(prefix), exc) from exc
        return self._page(page, marker, int(offset or 0), size)

    def _page(self, page: listing.ListedPage, marker: str, offset: int, size: int) -> Page:
        """Cut a listing that was sorted as a whole into pages; others are one page already.

        The token of such a page is the marker where the sorting began, and an offset.
        """
        blobs = page.blobs
        token = f"{page.next_marker}:" if page.next_marker else ""
        if not token and (offset or len(blobs) > size) and not page.prefixes:
            blobs = page.blobs[offset : offset + size]
            if offset + size < len(page.blobs):
                token = f"{marker}:{offset + size}"
                self._sorted.clear()
                self._sorted[token] = page
        cut = len(self._prefix)
        return Page(
            objects=listing.listing_of(blobs, prefix=self._prefix, root=self._uri("")),
            prefixes=[name[cut:] for name in page.prefixes],
            next_token=token,
        )

    async def _read_all_pages(
        self, prefix: str, delimiter: str, first: listing.ListedPage, size: int
    ) -> listing.ListedPage:
        """Read all pages from one on, and return them as one, in memory: they may be unsorted."""
        whole = first
        empty = EmptyPageCounter(self._uri(prefix))
        while whole.next_marker:
            page = await self.read(prefix, delimiter=delimiter, marker=whole.next_marker, size=size)
            empty.count(len(page.blobs) + len(page.prefixes))
            whole = listing.ListedPage(
                whole.blobs + page.blobs, whole.prefixes + page.prefixes, page.next_marker
            )
        return whole

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
        response = await self._sender.send(b"GET", target, "list", prefix)
        try:
            page = listing.parse_page(response.body)
        except ValueError as exc:
            response.discard_connection()
            raise malformed_page(self._uri(prefix), exc) from exc
        if page.next_marker and page.next_marker == marker:
            uri = self._uri(prefix)
            raise StorageError(
                f"could not list {uri}: the next page is the same one again", uri=uri
            )
        return page

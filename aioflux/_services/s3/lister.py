"""Listings of one bucket of S3: pages in the order of keys, whatever the order of the server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aioflux._services.base import Page
from aioflux._services.s3 import list_page as listing
from aioflux._services.status import EmptyPageCounter, malformed_page, unexpected_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux._services.base import ListRequest
    from aioflux._services.s3.sender import S3Sender

__all__ = ["S3Lister"]

_UNSORTED_SERVERS: Final = (b"SeaweedFS",)
"""Servers that list what lies below a name before names that only begin with it."""
_MAX_SORTED: Final = 4
"""Listings sorted here that are kept for their next page."""


class S3Lister:
    """Reads pages below a prefix; listings of servers that do not sort are sorted here."""

    def __init__(
        self,
        sender: S3Sender,
        prefix: str,
        *,
        uri: Callable[[str], str],
        note_unsorted: Callable[[], None],
    ) -> None:
        """Initialize.

        Args:
            sender: Sends requests.
            prefix: Prefix of the store, cut off from keys.
            uri: Returns the whole uri of a key.
            note_unsorted: Called when the server turns out not to sort: each range of keys would
                need a whole listing.
        """
        self._sender = sender
        self._prefix = prefix
        self._uri = uri
        self._note_unsorted = note_unsorted
        # Listings of the server are unsorted: they are read whole, and sorted here.
        self._is_unsorted = False
        # The remainders of such listings, by the tokens of their next pages.
        self._sorted: dict[str, listing.BucketPage] = {}

    async def page(self, request: ListRequest, size: int) -> Page:
        """Read one page of `size` objects at most; see `Service.list_page`."""
        prefix, page_token = request.prefix, request.page_token
        start = request.start_offset and self._prefix + request.start_offset
        end = request.end_offset and self._prefix + request.end_offset
        request_page = partial(self._request_page, prefix, request.delimiter, size)
        page = self._sorted.pop(page_token, None)
        if page is None and not self._is_unsorted:
            page = await request_page(start, page_token)
        if page is None or self._is_unsorted or not listing.is_sorted(page):
            self._is_unsorted = True
            self._note_unsorted()
            most = 0 if request.delimiter else size
            page = await self._sorted_page(request_page, page, prefix, page_token, start, most)
        if page_token and page.next_token == page_token:
            raise unexpected_page(self._uri(prefix), "the next page is the same one again")
        listing.cut(page, start=start, end=end)
        try:
            objects = listing.listing_of(page, prefix=self._prefix, root=self._uri(""))
        except ValueError as exc:
            raise unexpected_page(self._uri(prefix), exc) from exc
        skipped = len(self._prefix)
        return Page(
            objects=objects,
            prefixes=[name[skipped:] for name in page.prefixes],
            next_token=page.next_token,
        )

    async def _request_page(
        self, prefix: str, delimiter: str, size: int, start: str, token: str
    ) -> listing.BucketPage:
        query = listing.list_query(
            prefix=self._prefix + prefix,
            start_after=listing.after(start),
            delimiter=delimiter,
            token=token,
            size=size,
        )
        response = await self._sender.send(
            b"GET",
            b"?" + query,
            "list",
            prefix,
        )
        if response.headers.get(b"server", b"").startswith(_UNSORTED_SERVERS):
            self._is_unsorted = True
        try:
            return listing.decode_page(response.body)
        except ValueError as exc:
            response.discard_connection()
            raise malformed_page(self._uri(prefix), exc) from exc

    async def _sorted_page(
        self,
        request_page: Any,
        page: listing.BucketPage | None,
        prefix: str,
        token: str,
        start: str,
        most: int,
    ) -> listing.BucketPage:
        """Return a page of a listing that the server does not sort.

        Args:
            request_page: Requests a page, by its start and its token.
            page: The sorted remainder of the listing, or a page of the server, or None.
            prefix: Prefix of the listing, for errors.
            token: Token of the page.
            start: First name of the page.
            most: Objects of a page; 0 for all.

        Raises:
            StorageError: The server returns a page again.
        """
        if page is None or not token.startswith(listing.AFTER):
            page = await request_page("", "")
            tokens: set[str] = set()
            empty = EmptyPageCounter(self._uri(prefix))
            while page.next_token:
                if page.next_token in tokens:
                    raise unexpected_page(self._uri(prefix), "the next page is one that was before")
                tokens.add(page.next_token)
                other = await request_page("", page.next_token)
                empty.count(len(other.names) + len(other.prefixes))
                page.extend(other)
                page.next_token = other.next_token
            listing.sort(page)
            if token.startswith(listing.AFTER):
                # The remainder is no longer cached.
                start = max(start, token.removeprefix(listing.AFTER) + "\0")
            listing.cut(page, start=start, end="")
        if most and len(page.names) > most:
            rest = page.split(most)
            page.next_token = listing.AFTER + page.names[-1]
            self._sorted[page.next_token] = rest
            while len(self._sorted) > _MAX_SORTED:
                del self._sorted[next(iter(self._sorted))]
        return page

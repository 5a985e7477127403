"""Listings of one bucket of S3, sorted here if the server does not sort them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aioflux._services.base import Page
from aioflux._services.s3 import list_page as listing
from aioflux._services.sender import MAX_PAGE_BYTES
from aioflux._services.status import EmptyPageCounter, malformed_page, unexpected_page

if TYPE_CHECKING:
    from aioflux._services.base import ListRequest
    from aioflux._services.s3.sender import S3Sender

_UNSORTED_SERVERS: Final = (b"SeaweedFS",)
"""Servers that list "a/b" before "a-b", by the beginning of their Server header."""
_MAX_REMAINDERS: Final = 4
"""Maximum number of sorted listings whose remaining objects are cached."""


class S3Lister:
    """Reader of sorted pages below the prefix of a store.

    If the server does not sort, the whole listing is read and sorted for its first page.
    """

    def __init__(
        self,
        sender: S3Sender,
        prefix: str,
        *,
        uri: Callable[[str], str],
        note_unsorted: Callable[[], None],
    ) -> None:
        """Initialize; `prefix` is the prefix of the store, `uri` returns the uri of a key.

        `note_unsorted` is called when the server does not sort. A listing should not be split into
        ranges then, since each range would read the whole listing.
        """
        self._sender = sender
        self._prefix = prefix
        self._uri = uri
        self._note_unsorted = note_unsorted
        self._is_unsorted = False
        # The remaining objects of sorted listings, by the token of the next page.
        self._remainders: dict[str, listing.BucketPage] = {}

    async def page(self, request: ListRequest, size: int) -> Page:
        """Read one page of at most `size` objects; see `Service.list_page`.

        With a delimiter, a listing that the server does not sort is one page of all its objects.
        """
        prefix, page_token = request.prefix, request.page_token
        start = request.start_offset and self._prefix + request.start_offset
        end = request.end_offset and self._prefix + request.end_offset
        request_page = partial(self._request_page, prefix, request.delimiter, size)
        page = self._remainders.pop(page_token, None)
        if page is None and not self._is_unsorted:
            page = await request_page(start, page_token)
        if page is None or self._is_unsorted or not listing.is_sorted(page):
            self._is_unsorted = True
            self._note_unsorted()
            limit = 0 if request.delimiter else size
            page = await self._page_of_sorted(request_page, page, prefix, page_token, start, limit)
        if page_token and page.next_token == page_token:
            raise unexpected_page(self._uri(prefix), "its next page is the same page again")
        listing.cut_to_range(page, start=start, end=end)
        try:
            objects = listing.listing_of(page, prefix=self._prefix, root=self._uri(""))
        except ValueError as exc:
            raise unexpected_page(self._uri(prefix), exc) from exc
        num_cut = len(self._prefix)
        return Page(
            objects=objects,
            prefixes=[name[num_cut:] for name in page.prefixes],
            next_token=page.next_token,
        )

    async def _request_page(
        self, prefix: str, delimiter: str, size: int, start: str, token: str
    ) -> listing.BucketPage:
        query = listing.list_query(
            prefix=self._prefix + prefix,
            start_after=listing.start_after(start),
            delimiter=delimiter,
            token=token,
            size=size,
        )
        response = await self._sender.send(
            b"GET", b"?" + query, "list", prefix, max_body_bytes=MAX_PAGE_BYTES
        )
        if response.headers.get(b"server", b"").startswith(_UNSORTED_SERVERS):
            self._is_unsorted = True
        try:
            return listing.decode_page(response.body)
        except ValueError as exc:
            response.discard_connection()
            raise malformed_page(self._uri(prefix), exc) from exc

    async def _page_of_sorted(
        self,
        request_page: Any,
        page: listing.BucketPage | None,
        prefix: str,
        token: str,
        start: str,
        limit: int,
    ) -> listing.BucketPage:
        """Return one page of a listing that the server does not sort.

        Args:
            request_page: Requests one page of the server, given its start and its token.
            page: Cached rest of the sorted listing, or None. A page of the server may be passed,
                and is ignored if `token` is not a token for a sorted listing.
            prefix: Prefix of the listing, for error messages.
            token: Token of the page to return; empty for the first page.
            start: Smallest name to return.
            limit: Largest number of objects in the page; 0 for all.

        Raises:
            StorageError: The server returns the same page token twice, or too many empty pages.
        """
        if page is None or not token.startswith(listing.SORTED_PREFIX):
            page = await request_page("", "")
            seen_tokens: set[str] = set()
            empty_pages = EmptyPageCounter(self._uri(prefix))
            while page.next_token:
                if page.next_token in seen_tokens:
                    raise unexpected_page(self._uri(prefix), "its next page is a previous page")
                seen_tokens.add(page.next_token)
                next_page = await request_page("", page.next_token)
                empty_pages.count(len(next_page.names) + len(next_page.prefixes))
                page.extend(next_page)
                page.next_token = next_page.next_token
            listing.sort(page)
            if token.startswith(listing.SORTED_PREFIX):
                # The remaining objects are no longer cached.
                start = max(start, token.removeprefix(listing.SORTED_PREFIX) + "\0")
            listing.cut_to_range(page, start=start, end="")
        if limit and len(page.names) > limit:
            remainder = page.split(limit)
            page.next_token = listing.SORTED_PREFIX + page.names[-1]
            self._remainders[page.next_token] = remainder
            while len(self._remainders) > _MAX_REMAINDERS:
                del self._remainders[next(iter(self._remainders))]
        return page

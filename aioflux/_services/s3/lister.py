"""Listings of one bucket of S3: pages in the order of keys, whatever the order of the server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aioflux._services.base import Page
from aioflux._services.lister import Lister
from aioflux._services.s3 import list_page as listing
from aioflux._services.status import EmptyPages, not_a_listing, wrong_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux._services.base import ListRequest
    from aioflux._services.s3.sender import S3Sender

__all__ = ["S3Lister"]

_UNSORTED_SERVERS: Final = (b"SeaweedFS",)
"""Servers that list what lies below a name before names that only begin with it."""
_MAX_SORTED: Final = 4
"""Listings sorted here that are kept for their next page."""


class S3Lister(Lister["S3Sender"]):
    """Reads pages below a prefix; those of servers that do not sort are sorted here."""

    def __init__(
        self,
        sender: S3Sender,
        prefix: str,
        *,
        uri: Callable[[str], str],
        note_unsorted: Callable[[], None],
    ) -> None:
        """Take what is listed.

        Args:
            sender: Asks the service.
            prefix: What all names begin with; left out of keys.
            uri: Returns the whole uri of a key.
            note_unsorted: Called where the server turns out not to sort: each range of keys would
                be read by a whole listing.
        """
        super().__init__(sender, prefix, uri=uri)
        self._note_unsorted = note_unsorted
        # Listings come out of order: they are read whole, and sorted here.
        self._is_unsorted = False
        # What is left of such listings, by the tokens of their next pages.
        self._sorted: dict[str, listing.ListPage] = {}

    async def page(self, request: ListRequest, size: int) -> Page:
        prefix, page_token = request.prefix, request.page_token
        start = request.start_offset and self._prefix + request.start_offset
        end = request.end_offset and self._prefix + request.end_offset
        ask = partial(self._ask_page, prefix, request.delimiter, size)
        page = self._sorted.pop(page_token, None)
        if page is None and not self._is_unsorted:
            page = await ask(start, page_token)
        if page is None or self._is_unsorted or not listing.is_sorted(page):
            self._is_unsorted = True
            self._note_unsorted()
            most = 0 if request.delimiter else size
            page = await self._sorted_page(ask, page, prefix, page_token, start, most)
        if page_token and page.next_token == page_token:
            raise wrong_page(self._uri(prefix), "the next page is the same one again")
        listing.cut(page, start=start, end=end)
        try:
            objects = listing.listing_of(page, prefix=self._prefix, root=self._uri(""))
        except ValueError as exc:
            raise wrong_page(self._uri(prefix), exc) from exc
        skipped = len(self._prefix)
        return Page(
            objects=objects,
            prefixes=[name[skipped:] for name in page.prefixes],
            next_token=page.next_token,
        )

    async def _ask_page(
        self, prefix: str, delimiter: str, size: int, start: str, token: str
    ) -> listing.ListPage:
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
            raise not_a_listing(self._uri(prefix), exc) from exc

    async def _sorted_page(
        self,
        ask: Any,
        page: listing.ListPage | None,
        prefix: str,
        token: str,
        start: str,
        most: int,
    ) -> listing.ListPage:
        """Return a page of a listing that the server does not sort: of all of it, sorted here.

        Args:
            ask: Asks for a page, by where it starts and its token.
            page: What has come of it: what is left of it in order, or a page of the server.
            prefix: What keys begin with; errors tell it.
            token: Token of the page.
            start: First name that is wanted.
            most: Objects of a page; 0 for all.

        Raises:
            StorageError: The server goes on where it was before.
        """
        if page is None or not token.startswith(listing.AFTER):
            page = await ask("", "")
            tokens: set[str] = set()
            empty = EmptyPages(self._uri(prefix))
            while page.next_token:
                if page.next_token in tokens:
                    raise wrong_page(self._uri(prefix), "the next page is one that was before")
                tokens.add(page.next_token)
                other = await ask("", page.next_token)
                empty.count(len(other.names) + len(other.prefixes))
                page.extend(other)
                page.next_token = other.next_token
            listing.sort(page)
            if token.startswith(listing.AFTER):
                # What was left is forgotten, for want of room.
                start = max(start, token.removeprefix(listing.AFTER) + "\0")
            listing.cut(page, start=start, end="")
        if most and len(page.names) > most:
            rest = page.split(most)
            page.next_token = listing.AFTER + page.names[-1]
            self._sorted[page.next_token] = rest
            while len(self._sorted) > _MAX_SORTED:
                del self._sorted[next(iter(self._sorted))]
        return page

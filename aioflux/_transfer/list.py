"""Listings: pages in key order, from ranges of keys that are requested in parallel.

    ListingPlan (pure) -> requests -> tasks -> pages of each range -> pages of the first range

The first page is requested alone: many listings have no other, and some callers need no other.
Once the second one is needed, pages are prefetched, unless the caller chose their size.
Pages of later ranges wait as columns, at most `_MAX_WAITING_PAGES` of them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from aioflux._concurrency.async_iteration import nested
from aioflux._services.base import ListRequest
from aioflux._transfer.glob import compile_glob, literal_prefix
from aioflux._transfer.list_plan import ListingPlan
from aioflux._transfer.temp_keys import COMPOSITE_PREFIX, TEMPORARY_PREFIX, is_temporary
from aioflux._values.listing import Listing
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from aioflux._services.base import Page
    from aioflux._transfer.list_plan import Request
    from aioflux._transfer.session import Session

__all__ = ["list_all", "list_pages", "visible"]

_MAX_IN_FLIGHT = 32
"""Requests of one listing in flight, however many the store allows: a few keep one process busy
parsing, and each wrong guess costs the service a request."""
_MAX_WAITING_PAGES = 64


def visible(objects: Listing, prefix: str) -> Listing:
    """Leave out temporary objects, unless `prefix` is within theirs."""
    names = (TEMPORARY_PREFIX, COMPOSITE_PREFIX)
    if not is_temporary(prefix):
        objects.prefixes = [each for each in objects.prefixes if not is_temporary(each)]
        if any(map(objects.keys.may_contain, names)):
            kept = [at for at, key in enumerate(objects.keys) if not is_temporary(key)]
            picked = objects.pick(kept)
            picked.prefixes = objects.prefixes
            return picked
    return objects


async def list_pages(
    session: Session,
    prefix: str,
    *,
    with_temporary: bool = False,
    delimiter: str = "",
    match_glob: str = "",
    page_size: int | None = None,
) -> AsyncGenerator[Listing, None]:
    """Yield the objects whose keys begin with `prefix`, a page at a time, sorted by key.

    Each page is one request; a page that fails is requested again from its first key, so that none
    is lost or repeated. Temporary objects are left out unless `with_temporary` is set or `prefix`
    is within theirs, so that a page may have fewer objects than the service sent.

    Args:
        session: The session.
        prefix: Beginning of all keys.
        with_temporary: Include temporary objects.
        delimiter: List one level: keys that have it behind the prefix are in `Listing.prefixes`.
        match_glob: Leave out keys that this pattern does not match.
        page_size: Most keys and prefixes of one page; None for the service's own.

    Raises:
        StorageError: A page does not begin after the one before: the listing might never end, or
            repeat a key.
    """
    request = ListRequest(prefix, delimiter=delimiter, match_glob=match_glob, page_size=page_size)
    # Pages of a chosen size are requested one after the other: such a caller needs few.
    fetcher = _PageFetcher(session, request, prefetch=page_size is None)
    try:
        while True:
            page = await fetcher.next_page()
            if page is None:
                return
            shown = page if with_temporary else visible(page, prefix)
            if shown or shown.prefixes:
                yield shown
    finally:
        await fetcher.aclose()


async def list_all(
    session: Session, prefix: str, *, delimiter: str = "", match_glob: str = ""
) -> Listing:
    """Return all objects of `list_pages`."""
    whole = Listing()
    pages = list_pages(session, prefix, delimiter=delimiter, match_glob=match_glob)
    async with nested(pages) as inner:
        async for page in inner:
            whole.extend(page)
    return whole


class _PageFetcher:
    """Requests and pages of one listing.

    Args:
        session: The session.
        request: All keys of the listing.
        prefetch: Request later pages, also of other ranges, once the second page is needed.
    """

    def __init__(self, session: Session, request: ListRequest, *, prefetch: bool) -> None:
        self._session = session
        capabilities = session.service.capabilities
        pattern = request.match_glob
        literal = literal_prefix(pattern)
        is_ours = pattern and not capabilities.match_glob
        self._filter = compile_glob(pattern) if is_ours else None
        most = capabilities.page_size
        page_size = most if request.page_size is None else min(request.page_size, most)
        self._request = replace(
            request,
            # Keys that match begin with both, one of which begins the other.
            prefix=literal if literal.startswith(request.prefix) else request.prefix,
            match_glob="" if is_ours else pattern,
            page_size=None if request.page_size is None else page_size,
        )
        is_parallel = prefetch and capabilities.list_ranges
        self._plan = ListingPlan(
            self._request.prefix,
            max_in_flight=min(session.options.max_in_flight, _MAX_IN_FLIGHT) if is_parallel else 1,
            page_size=page_size,
            delimiter=request.delimiter,
        )
        self._prefetch = prefetch
        self._is_first = True
        self._tasks: dict[asyncio.Task[Page], Request] = {}
        self._num_waiting = 0

    async def next_page(self) -> Listing | None:
        """Return the next page in order, or None at the end."""
        while True:
            for task in [task for task in self._tasks if task.done()]:
                self._add(self._tasks.pop(task), task.result())
            page = self._first_page()
            # Many callers need no second page.
            if page is None or (self._prefetch and not self._is_first):
                may_prefetch = self._num_waiting < _MAX_WAITING_PAGES
                for request in self._plan.next_requests(may_prefetch=may_prefetch):
                    self._tasks[asyncio.create_task(self._fetch(request))] = request
            if page is not None:
                self._is_first = False
                return page
            if not self._tasks:
                return None
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def _first_page(self) -> Listing | None:
        """Return the next page of the first range that is not done."""
        plan, num_done = self._plan, 0
        for each in plan.ranges:
            if each.pages or not each.is_done:
                break
            num_done += 1
        plan.forget(num_done)
        if not plan.ranges or not plan.ranges[0].pages:
            return None
        self._num_waiting -= 1
        page: Listing = plan.ranges[0].pages.popleft()
        return page

    async def _fetch(self, request: Request) -> Page:
        page = replace(
            self._request,
            start_offset=request.start,
            end_offset=request.end,
            page_token=request.token,
        )
        return await self._session.call(
            page.prefix, lambda _: self._session.service.list_page(page)
        )

    def _add(self, request: Request, page: Page) -> None:
        """Store the part of a page that belongs to its range."""
        if not self._session.service.capabilities.list_ranges:
            # A service may find that out by its first page.
            self._plan.be_sequential()
        objects, prefixes = page.objects, list(page.prefixes)
        keys = objects.keys if isinstance(objects, Listing) else [meta.key for meta in objects]
        if prefixes and prefixes[0] == request.range.last:
            # Objects may have been added below the last prefix of the page before.
            del prefixes[0]
        # For the plan a prefix is a key like the others.
        names = sorted([*keys, *prefixes]) if prefixes else keys
        try:
            start, end = self._plan.received(
                request, len(names), names.__getitem__, page.next_token
            )
        except ValueError as exc:
            uri = self._session.service.uri(self._request.prefix)
            raise StorageError(
                f"could not list {uri}: {exc}; the service, or a proxy in between, does not "
                "continue after the page",
                uri=uri,
            ) from exc
        if isinstance(names, list) and prefixes:
            mine = names[start:end]
            start, end = _within(list(keys), mine)
            first, behind = _within(prefixes, mine)
            prefixes = prefixes[first:behind]
        if not isinstance(objects, Listing):
            objects = Listing(objects[start:end])
        elif (start, end) != (0, len(objects)):
            objects = objects[start:end]
        if self._filter is not None:
            fits = self._filter.fullmatch
            objects = objects.pick(at for at, key in enumerate(objects.keys) if fits(key))
        objects.prefixes = prefixes
        if objects or objects.prefixes:
            request.range.pages.append(objects)
            self._num_waiting += 1

    async def aclose(self) -> None:
        """Cancel the requests under way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.exception()  # the first failure was raised
        self._tasks.clear()


def _within(texts: Sequence[str], among: Sequence[str]) -> tuple[int, int]:
    """Return the slice `[first, end)` of `texts` that is within the sorted `among`."""
    if not among:
        return 0, 0
    return bisect_left(texts, among[0]), bisect_right(texts, among[-1])

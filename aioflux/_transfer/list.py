"""Listings: pages in the order of keys, from ranges of keys that are requested in parallel.

    ListingPlan (pure) -> requests -> tasks -> pages of each range -> pages of the first range

The first page is requested alone: many listings have one page only, and some callers read no other.
From the second page on, the next `_WINDOW_PAGES` are prefetched, unless the caller has set the page
size. They wait in memory, as columns.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aioflux._concurrency.async_iteration import aclosing_inner
from aioflux._services.base import ListRequest
from aioflux._transfer.list_plan import ListingPlan
from aioflux._transfer.temp_keys import TEMPORARY_PREFIXES, is_temporary
from aioflux._values.glob import compile_glob, literal_prefix
from aioflux._values.listing import Listing
from aioflux.errors import StorageError, UnsupportedError

if TYPE_CHECKING:
    from aioflux._services.base import Page
    from aioflux._transfer.list_plan import Request
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

_MAX_IN_FLIGHT = 32
"""Maximum number of requests of one listing in flight, even if the store allows more: parsing their
pages keeps one process busy, and each badly placed range costs a request."""
_WINDOW_PAGES = 64
_MIN_PAGE_SIZE = 100
"""Smallest page that is requested for a limit, because temporary objects in it are left out."""


def visible(objects: Listing, prefix: str) -> Listing:
    """Return a page without temporary objects, unless the prefix of the listing is temporary."""
    if not is_temporary(prefix):
        objects.prefixes = [name for name in objects.prefixes if not is_temporary(name)]
        if any(map(objects.keys.may_contain, TEMPORARY_PREFIXES)):
            indexes = [index for index, key in enumerate(objects.keys) if not is_temporary(key)]
            picked = objects.pick(indexes)
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
    limit: int | None = None,
) -> AsyncGenerator[Listing, None]:
    """Yield pages of the objects whose keys begin with `prefix`, sorted by key.

    Each page is the response to one request; empty pages are skipped. A page that fails is
    requested again from its first key, so that no key is missing or repeated. Temporary objects are
    left out, unless `with_temporary` is set or `is_temporary(prefix)`. So a page may have fewer
    objects than the service has sent.

    Args:
        session: The session.
        prefix: Beginning of all keys.
        with_temporary: Include temporary objects.
        delimiter: List one level: keys with the delimiter after the prefix are replaced by their
            common prefixes, in `Listing.prefixes`.
        match_glob: Leave out keys that do not match this pattern.
        page_size: Maximum number of keys and prefixes in a page; None for that of the service.
        limit: Maximum number of keys and prefixes in all pages; no page is requested after it.

    Raises:
        StorageError: A page does not continue the page before it, so that the listing could repeat
            keys or never end.
    """
    prefetch = page_size is None and limit is None
    if page_size is None and limit is not None:
        filters_here = match_glob and not session.service.capabilities.match_glob
        page_size = None if filters_here else max(limit, _MIN_PAGE_SIZE)
    request = ListRequest(prefix, delimiter=delimiter, match_glob=match_glob, page_size=page_size)
    # Pages of a given size are requested one after another: such a caller reads few pages.
    fetcher = _PageFetcher(session, request, prefetch=prefetch)
    num_left = limit
    try:
        while num_left is None or num_left > 0:
            page = await fetcher.next_page()
            if page is None:
                return
            shown = page if with_temporary else visible(page, prefix)
            if num_left is not None:
                shown = _first(shown, num_left)
                num_left -= len(shown) + len(shown.prefixes)
            if shown or shown.prefixes:
                yield shown
    finally:
        await fetcher.aclose()


async def list_versions(
    session: Session, prefix: str, *, limit: int | None
) -> AsyncGenerator[Sequence[ObjectMeta], None]:
    """Yield pages with all generations of the objects whose keys begin with `prefix`.

    Pages are requested one after another, and none after `limit` objects. Temporary objects are
    left out as in `list_pages`.

    Raises:
        UnsupportedError: The service does not list noncurrent generations.
    """
    capabilities = session.service.capabilities
    if not capabilities.versions:
        uri = session.service.uri(prefix)
        raise UnsupportedError(
            f"could not list {uri}: only gs:// and s3:// list noncurrent generations", uri=uri
        )
    size = None if limit is None else min(max(limit, _MIN_PAGE_SIZE), capabilities.page_size)
    request = ListRequest(prefix, page_size=size, versions=True)
    while limit is None or limit > 0:
        page = await session.call(prefix, session.service.list_page, request)
        metas = page.objects
        if not is_temporary(prefix):
            metas = [meta for meta in metas if not is_temporary(meta.key)]
        yield metas[:limit]
        if not page.next_token:
            return
        limit = None if limit is None else limit - len(metas)
        request = replace(request, page_token=page.next_token)


async def list_all(
    session: Session,
    prefix: str,
    *,
    delimiter: str = "",
    match_glob: str = "",
    limit: int | None = None,
) -> Listing:
    """Return all objects of `list_pages`."""
    whole = Listing()
    pages = list_pages(session, prefix, delimiter=delimiter, match_glob=match_glob, limit=limit)
    async with aclosing_inner(pages) as inner:
        async for page in inner:
            whole.extend(page)
    return whole


class _PageFetcher:
    """Requests and pages of one listing.

    Args:
        session: The session.
        request: The listing as requested by the caller, without ranges and tokens.
        prefetch: Request several pages in advance, once the second page is needed.
    """

    def __init__(self, session: Session, request: ListRequest, *, prefetch: bool) -> None:
        self._session = session
        capabilities = session.service.capabilities
        pattern = request.match_glob
        literal = literal_prefix(pattern)
        filters_here = pattern and not capabilities.match_glob
        self._filter = compile_glob(pattern) if filters_here else None
        max_page_size = capabilities.page_size
        page_size = min(request.page_size or max_page_size, max_page_size)
        self._request = replace(
            request,
            # Keys that match begin with both prefixes, so the longer one is sent.
            prefix=literal if literal.startswith(request.prefix) else request.prefix,
            match_glob="" if filters_here else pattern,
            page_size=None if request.page_size is None else page_size,
        )
        is_parallel = prefetch and capabilities.list_ranges
        self._plan = ListingPlan(
            self._request.prefix,
            max_in_flight=min(session.options.max_in_flight, _MAX_IN_FLIGHT) if is_parallel else 1,
            page_size=page_size,
            delimiter=request.delimiter,
            window=_WINDOW_PAGES,
        )
        self._prefetch = prefetch
        self._is_first = True
        self._tasks: dict[asyncio.Task[Page], Request] = {}

    async def next_page(self) -> Listing | None:
        """Return the next page in order, or None at the end."""
        while True:
            for task in [task for task in self._tasks if task.done()]:
                self._add(self._tasks.pop(task), task.result())
            page = self._first_page()
            # Nothing is prefetched with the first page: many callers need no second page.
            if page is None or (self._prefetch and not self._is_first):
                for request in self._plan.next_requests():
                    self._tasks[asyncio.create_task(self._fetch(request))] = request
            if page is not None:
                self._is_first = False
                return page
            if not self._tasks:
                return None
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def _first_page(self) -> Listing | None:
        """Return the next page of the first unfinished range, or None if it has not arrived."""
        ranges = self._plan.ranges
        while ranges and ranges[0].is_done and not ranges[0].pages:
            del ranges[0]
        return ranges[0].pages.popleft() if ranges and ranges[0].pages else None

    async def _fetch(self, request: Request) -> Page:
        page = replace(
            self._request,
            start_offset=request.start,
            end_offset=request.end,
            page_token=request.token,
        )
        session = self._session
        return await session.call(page.prefix, session.service.list_page, page)

    def _add(self, request: Request, page: Page) -> None:
        """Store the keys of a page that are in the range of its request."""
        if not self._session.service.capabilities.list_ranges:
            # Some services set `list_ranges` to False after the first page, if the server proves
            # to be unable to list ranges.
            self._plan.max_in_flight = 1
        objects = page.objects if isinstance(page.objects, Listing) else Listing(page.objects)
        keys, prefixes = objects.keys, list(page.prefixes)
        if prefixes and prefixes[0] == request.range.last:
            # Listed again, since objects were added below the last prefix of the page before.
            del prefixes[0]
        # The plan treats a common prefix as a key.
        names = sorted([*keys, *prefixes]) if prefixes else keys
        try:
            start, end = self._plan.add_page(
                request, len(names), names.__getitem__, page.next_token
            )
        except ValueError as exc:
            uri = self._session.service.uri(self._request.prefix)
            raise StorageError(
                f"could not list {uri}: {exc}; the service, or a proxy in between, returned a "
                "wrong page",
                uri=uri,
            ) from exc
        if isinstance(names, list):
            names = names[start:end]
            start, end = _within(list(keys), names)
            prefixes = prefixes[slice(*_within(prefixes, names))]
        if (start, end) != (0, len(objects)):
            objects = objects[start:end]
        if self._filter is not None:
            match = self._filter.fullmatch
            objects = objects.pick(index for index, key in enumerate(objects.keys) if match(key))
        objects.prefixes = prefixes
        if objects or objects.prefixes:
            request.range.pages.append(objects)

    async def aclose(self) -> None:
        """Cancel the requests in flight."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()


def _first(page: Listing, count: int) -> Listing:
    """Return the first keys and common prefixes of a page, in their common order."""
    if len(page) + len(page.prefixes) <= count:
        return page
    last = sorted([*page.keys, *page.prefixes])[count - 1]
    first = page[: bisect_right(page.keys, last)]
    first.prefixes = page.prefixes[: bisect_right(page.prefixes, last)]
    return first


def _within(texts: Sequence[str], names: Sequence[str]) -> tuple[int, int]:
    """Return the slice of `texts` from the first to the last of `names`; both are sorted."""
    if not names:
        return 0, 0
    return bisect_left(texts, names[0]), bisect_right(texts, names[-1])

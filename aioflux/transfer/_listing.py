"""Listing: pages in key order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._errors import StorageError
from aioflux.transfer._staged import is_staged

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from aioflux._meta import ObjectMeta
    from aioflux.service._base import Page
    from aioflux.transfer._session import Session

__all__ = ["list_pages", "visible"]


def visible(objects: Sequence[ObjectMeta], prefix: str) -> Sequence[ObjectMeta]:
    """Leave out staged writes, which are nobody's objects yet, unless `prefix` asks for them."""
    if is_staged(prefix) or not any(is_staged(meta.key) for meta in objects):
        return objects
    return [meta for meta in objects if not is_staged(meta.key)]


async def list_pages(
    session: Session, prefix: str, *, with_staged: bool = False
) -> AsyncGenerator[Sequence[ObjectMeta], None]:
    """Yield the objects whose keys begin with `prefix`, a page at a time, sorted by key.

    Each page is one request; a page that fails is asked again from where it begins, so that none is
    lost or given twice. Writes that are staged below `TEMPORARY_PREFIX` are left out unless
    `with_staged` is set or `prefix` itself names them, so that a page may hold fewer objects than
    the service sent.

    Raises:
        StorageError: A page does not begin after the one before: without that the listing might
            never end, or give a key twice.
    """
    token = last = ""
    while True:

        async def attempt(_: int, token: str = token) -> Page:
            return await session.service.list_page(prefix, page_token=token)

        page = await session.call(prefix, attempt)
        last = _last_key(session, prefix, page, last, token)
        objects = page.objects if with_staged else visible(page.objects, prefix)
        if objects:
            yield objects
        token = page.next_token
        if not token:
            return


def _last_key(session: Session, prefix: str, page: Page, last: str, token: str) -> str:
    """Return the key from which the next page has to go on.

    Args:
        session: Where.
        prefix: What is listed.
        page: The page that came.
        last: Last key of the pages before it; empty before the first.
        token: Token that asked for it.
    """
    uri = session.service.uri(prefix)
    if page.objects:
        first = page.objects[0].key
        if last and first <= last:
            raise StorageError(
                f"could not list {uri}: a page begins with {first!r}, though the one before ended "
                f"with {last!r}; the service, or a proxy before it, does not go on where a page "
                "ended",
                uri=uri,
            )
        return page.objects[-1].key
    if token and page.next_token == token:
        raise StorageError(
            f"could not list {uri}: after {last!r} an empty page came that says it is its own next "
            "page; the service, or a proxy before it, does not go on where a page ended",
            uri=uri,
        )
    return last

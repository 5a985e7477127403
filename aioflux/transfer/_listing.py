"""Listing: pages in key order."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """
    token = ""
    while True:

        async def attempt(_: int, token: str = token) -> Page:
            return await session.service.list_page(prefix, page_token=token)

        page = await session.call(prefix, attempt)
        objects = page.objects if with_staged else visible(page.objects, prefix)
        if objects:
            yield objects
        token = page.next_token
        if not token:
            return

"""Listing: pages in key order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from aioflux._meta import ObjectMeta
    from aioflux.service._base import Page
    from aioflux.transfer._session import Session

__all__ = ["list_pages"]


async def list_pages(session: Session, prefix: str) -> AsyncGenerator[Sequence[ObjectMeta], None]:
    """Yield the objects whose keys begin with `prefix`, a page at a time, sorted by key.

    Each page is one request; a page that fails is asked again from where it begins, so that none is
    lost or given twice.
    """
    token = ""
    while True:

        async def attempt(_: int, token: str = token) -> Page:
            return await session.service.list_page(prefix, page_token=token)

        page = await session.call(prefix, attempt)
        if page.objects:
            yield page.objects
        token = page.next_token
        if not token:
            return

"""Making a staged upload visible under its own key, and removing what it grew in."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from aioflux._concurrency.shielded import see_through
from aioflux._services.base import Source
from aioflux._transfer.ambiguous_writes import Fate, call_or_find, find_written
from aioflux._transfer.delete import delete
from aioflux._transfer.put import unmet
from aioflux.errors import AiofluxError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from aioflux._services.base import WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = ["remove_staged", "reveal"]

_log = logging.getLogger("aioflux")

_REMOVE_SECONDS = 30.0
"""Time that removing a temporary object may take, also after the caller was cancelled."""


async def reveal(session: Session, request: WriteRequest, staged: ObjectMeta) -> ObjectMeta:
    """Make a staged object visible under its own key, if the precondition holds.

    By a compose of one source, which takes a precondition.
    """
    source = Source(key=staged.key, generation=staged.generation)
    fate = Fate()

    async def find() -> ObjectMeta | None:
        return await find_written(
            session,
            request.key,
            size=staged.size,
            crc32c=staged.crc32c,
            content_type=request.content_type,
            metadata=request.metadata,
        )

    async def attempt(_: int) -> ObjectMeta:
        try:
            return await fate.hear(session.service.compose(request, [source]))
        except PreconditionFailedError as exc:
            if fate.is_open and (meta := await find()):
                return meta
            raise unmet(exc, request.precondition) from exc

    return await call_or_find(session, request.key, attempt, fate, find, must_know=True)


async def delete_staged(session: Session, key: str) -> None:
    """Delete a staged object, if there is one; again does no harm."""
    with suppress(NotFoundError):
        await delete(session, key)


async def remove_staged(session: Session, key: str, uri: str) -> None:
    """Remove a staged object after its upload became visible as `uri`.

    The object is written, whatever becomes of this: a failure is logged and not raised. Listings
    leave the temporary object out, and `Store.clean` removes it.
    """
    try:
        await see_through(
            lambda: delete_staged(session, key), session.cleanups, seconds=_REMOVE_SECONDS
        )
    except (AiofluxError, TimeoutError) as exc:
        _log.warning(
            "%s was written, but its temporary object %s is still there, `Store.clean` removes "
            "it: %s",
            uri,
            session.service.uri(key),
            exc,
        )

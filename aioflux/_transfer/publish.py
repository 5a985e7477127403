"""Publication of an upload that was written under a temporary key."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from aioflux._services.base import Source
from aioflux._transfer.ambiguous_writes import find_written, send_write
from aioflux._transfer.delete import delete
from aioflux.errors import AiofluxError, NotFoundError

if TYPE_CHECKING:
    from aioflux._services.base import WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = ["delete_temporary", "publish", "remove_temporary"]

_log = logging.getLogger("aioflux")


async def publish(session: Session, request: WriteRequest, temporary: ObjectMeta) -> ObjectMeta:
    """Publish a temporary object under the key of `request`, if the precondition holds.

    By a compose of one source, which takes a precondition.
    """
    source = Source(key=temporary.key, generation=temporary.generation)
    return await send_write(
        session,
        request,
        lambda: session.service.compose(request, [source]),
        lambda: find_written(session, request, size=temporary.size, crc32c=temporary.crc32c),
        find_if_throttled=True,
    )


async def delete_temporary(session: Session, key: str) -> None:
    """Delete a temporary object, if there is one."""
    with suppress(NotFoundError):
        await delete(session, key)


async def remove_temporary(session: Session, key: str, uri: str) -> None:
    """Remove a temporary object that was published as `uri`.

    The object is written in any case: a failure is logged and not raised.
    """
    try:
        await session.clean_up(lambda: delete_temporary(session, key))
    except (AiofluxError, TimeoutError) as exc:
        _log.warning(
            "%s was written, but its temporary object %s is still there, `Store.clean` removes "
            "it: %s",
            uri,
            session.service.uri(key),
            exc,
        )

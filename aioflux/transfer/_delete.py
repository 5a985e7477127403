"""Deleting objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._errors import NotFoundError, PreconditionFailedError, StorageError
from aioflux._meta import DeleteResult
from aioflux.transfer._fanout import bounded_map
from aioflux.transfer._lost import Fate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioflux.service._base import Source
    from aioflux.transfer._session import Session

__all__ = ["delete", "delete_many"]


async def delete(session: Session, key: str, *, generation: str = "") -> None:
    """Delete an object; never one that was written since.

    A name is looked up first and that generation deleted, where the service has generations and a
    request may be sent again: a repeated delete of whatever has the name could remove what somebody
    wrote after the first, whose answer was lost. Metadata of a listing saves the look.

    Args:
        session: Where.
        key: Name of the object.
        generation: Delete this generation and no other; empty for the one there is.

    Raises:
        NotFoundError: No object has this key, and no attempt whose answer was lost can have deleted
            it.
        PreconditionFailedError: The object has another generation, and no attempt whose answer was
            lost can have deleted that one; by name, three times in a row.
    """
    is_pinned = generation or not session.service.capabilities.generations
    if is_pinned or session.retry.max_attempts == 1:
        await _delete_once(session, key, generation)
        return
    for is_last in (False, False, True):
        meta = await session.call(key, lambda _: session.service.head(key))
        try:
            await _delete_once(session, key, meta.generation)
        except (NotFoundError, PreconditionFailedError):
            if is_last:
                raise
        else:
            return


async def _delete_once(session: Session, key: str, generation: str) -> None:
    fate = Fate()

    async def attempt(_: int) -> None:
        try:
            await fate.hear(session.service.delete(key, generation=generation))
        except (NotFoundError, PreconditionFailedError):
            # Gone, or replaced since: that generation is deleted.
            if not fate.is_open:
                raise

    await session.call(key, attempt)


async def delete_many(
    session: Session, sources: Iterable[Source], *, max_in_flight: int
) -> DeleteResult:
    """Delete each source, and tell what became of it; one that fails does not keep the others."""
    deleted: list[str] = []
    missing: list[str] = []
    errors: dict[str, StorageError] = {}

    async def one(source: Source) -> None:
        try:
            await delete(session, source.key, generation=source.generation)
        except NotFoundError:
            missing.append(source.key)
        except StorageError as exc:
            errors[source.key] = exc
        else:
            deleted.append(source.key)

    async for _ in bounded_map(one, sources, max_in_flight=max_in_flight, ordered=False):
        pass
    return DeleteResult(
        deleted=tuple(sorted(deleted)), missing=tuple(sorted(missing)), errors=errors
    )

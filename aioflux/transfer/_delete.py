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
    """Delete an object; after a lost answer, never one that was written since.

    Where an answer was lost, the object is looked for. If it is gone, it was deleted. If one is
    there, that generation and no other is deleted.

    Args:
        session: Where.
        key: Name of the object.
        generation: Delete this generation and no other; empty for the one there is.

    Raises:
        NotFoundError: No object has this key, and no attempt whose answer was lost can have deleted
            it.
        PreconditionFailedError: The object has another generation, and no attempt whose answer was
            lost can have deleted that one.
    """
    fate = Fate()

    async def attempt(_: int) -> None:
        nonlocal generation
        try:
            if fate.is_open and not generation:
                generation = (await session.service.head(key)).generation
            await fate.hear(session.service.delete(key, generation=generation))
        except (NotFoundError, PreconditionFailedError):
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

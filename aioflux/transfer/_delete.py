"""Deleting objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._errors import NotFoundError, StorageError
from aioflux._meta import DeleteResult
from aioflux.transfer._fanout import bounded_map

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioflux.service._base import Source
    from aioflux.transfer._session import Session

__all__ = ["delete", "delete_many"]


async def delete(session: Session, key: str, *, generation: str = "") -> None:
    """Delete an object.

    Raises:
        NotFoundError: No object has this key, and no earlier attempt whose answer was lost can have
            deleted it.
    """

    async def attempt(number: int) -> None:
        try:
            await session.service.delete(key, generation=generation)
        except NotFoundError:
            if number == 1:
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

"""Concatenating and copying objects on the service, without their bytes passing here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._errors import NotFoundError, PreconditionFailedError
from aioflux.service._base import Precondition, Source
from aioflux.transfer._checksums import combine_crc32c
from aioflux.transfer._fanout import gather
from aioflux.transfer._upload import unmet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._meta import ObjectMeta
    from aioflux.transfer._session import Session
    from aioflux.transfer._upload import WriteRequest

__all__ = ["compose", "copy"]


async def compose(session: Session, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
    """Concatenate `sources` into one object.

    Where the destination is one of its own sources (an append), they are pinned first, so that an
    attempt which is repeated after a lost answer cannot append twice.
    """
    metas: list[ObjectMeta] = []
    if any(source.key == request.key for source in sources):
        metas = await gather(_head(session, source) for source in sources)
        sources = [Source(key=meta.key, generation=meta.generation) for meta in metas]

    async def attempt(number: int) -> ObjectMeta:
        try:
            return await session.service.compose(
                request.key,
                sources,
                precondition=request.precondition,
                content_type=request.content_type,
                metadata=request.metadata,
            )
        except (PreconditionFailedError, NotFoundError) as exc:
            if number > 1 and (meta := await _made_before(session, request.key, sources, metas)):
                return meta
            if isinstance(exc, PreconditionFailedError):
                raise unmet(exc, request.precondition) from exc
            raise

    return await session.call(request.key, attempt)


async def _head(session: Session, source: Source) -> ObjectMeta:
    return await session.call(
        source.key, lambda _: session.service.head(source.key, generation=source.generation)
    )


async def _made_before(
    session: Session, key: str, sources: Sequence[Source], metas: Sequence[ObjectMeta]
) -> ObjectMeta | None:
    """Return the object if an earlier attempt whose answer was lost made it of the sources."""
    service = session.service
    try:
        metas = metas or [
            await service.head(source.key, generation=source.generation) for source in sources
        ]
        made = await service.head(key)
    except NotFoundError:
        return None
    return made if (made.size, made.crc32c) == _concatenation(metas) else None


def _concatenation(metas: Sequence[ObjectMeta]) -> tuple[int, int | None]:
    """Return size and crc32c of objects one after the other; no crc32c where one has none."""
    checksum: int | None = 0
    for meta in metas:
        if checksum is None or meta.crc32c is None:
            checksum = None
        else:
            checksum = combine_crc32c(checksum, meta.crc32c, meta.size)
    return sum(meta.size for meta in metas), checksum


async def copy(
    session: Session, source: Source, key: str, *, precondition: Precondition
) -> ObjectMeta:
    """Copy an object within the bucket. Copying again after a lost answer gives the same object."""

    async def attempt(number: int) -> ObjectMeta:
        try:
            return await session.service.copy(source, key, precondition=precondition)
        except PreconditionFailedError as exc:
            if number > 1 and (meta := await _made_before(session, key, [source], [])):
                return meta
            raise unmet(exc, precondition) from exc

    return await session.call(key, attempt)

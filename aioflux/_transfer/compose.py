"""Concatenating and copying objects on the service, without their bytes passing here.

After a lost answer the destination is looked at first: it is not made again where it has the size
and crc32c of its sources, one after the other, and what else was asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import gather
from aioflux._services.base import Source
from aioflux._transfer.ambiguous_writes import Fate, call_or_find, checksum_of, is_as_asked
from aioflux._transfer.conditions import require
from aioflux._transfer.put import unmet, write_request
from aioflux._transfer.retry import Backoff
from aioflux._values.checksums import combine_crc32c
from aioflux.errors import NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._services.base import Precondition, WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = ["compose", "copy"]


async def compose(
    session: Session,
    request: WriteRequest,
    sources: Sequence[Source],
    *,
    metas: Sequence[ObjectMeta] = (),
) -> ObjectMeta:
    """Concatenate `sources` into one object.

    Where the destination is one of its own sources (an append), they are pinned first, so that an
    attempt which is repeated after a lost answer cannot append twice. Those that are named without
    a generation are pinned anew if they are replaced before they are read.

    Args:
        session: Where.
        request: What to make of them.
        sources: Objects, in order.
        metas: What a listing said of them; saves the looks after a lost answer.
    """
    if all(source.key != request.key for source in sources):
        return await _compose_as_told(session, request, sources, metas, Fate())
    backoff = Backoff(session.retry)
    while True:
        metas = await gather(_head(session, source) for source in sources)
        pinned = [Source(key=meta.key, generation=meta.generation) for meta in metas]
        fate = Fate()
        try:
            return await _compose_as_told(session, request, pinned, metas, fate)
        except NotFoundError:
            # A source was replaced after the look at it. If an attempt may have been carried out,
            # it may be that which replaced it: to append again would be twice.
            may_repeat = not fate.is_open and not all(source.generation for source in sources)
            if not (may_repeat and await backoff.pause()):
                raise


async def _compose_as_told(
    session: Session,
    request: WriteRequest,
    sources: Sequence[Source],
    metas: Sequence[ObjectMeta],
    fate: Fate,
) -> ObjectMeta:
    """Concatenate sources, each in the generation that it names; `fate` hears the answers."""

    async def find() -> ObjectMeta | None:
        made = await _made_before(session, request.key, sources, metas)
        as_asked = made and is_as_asked(made, request.content_type, request.metadata)
        return made if as_asked else None

    async def attempt(_: int) -> ObjectMeta:
        if fate.is_unanswered and (made := await find()):
            return made
        try:
            return await fate.hear(session.service.compose(request, sources))
        except (PreconditionFailedError, NotFoundError) as exc:
            # The lost attempt may have been carried out since the look before this one.
            if fate.is_open and (made := await find()):
                return made
            if isinstance(exc, PreconditionFailedError):
                raise unmet(exc, request.precondition) from exc
            raise

    return await call_or_find(session, request.key, attempt, fate, find)


async def copy(
    session: Session, source: Source, key: str, *, precondition: Precondition
) -> ObjectMeta:
    """Copy an object within the bucket, with its content type and metadata."""
    request = write_request(key, precondition)
    await require(session, key, precondition)
    fate = Fate()

    async def find() -> ObjectMeta | None:
        try:
            original = await session.service.head(source.key, generation=source.generation)
        except NotFoundError:
            return None
        # A copy that need not be new is sooner made again than compared byte by byte.
        may_read = bool(precondition)
        made = await _made_before(session, key, [source], [original], may_read=may_read)
        as_asked = made and is_as_asked(made, original.content_type, original.metadata)
        return made if as_asked else None

    async def attempt(_: int) -> ObjectMeta:
        if fate.is_unanswered and (made := await find()):
            return made
        try:
            return await fate.hear(
                session.service.copy(source, key, precondition=request.precondition)
            )
        except PreconditionFailedError as exc:
            if fate.is_open and (made := await find()):
                return made
            raise unmet(exc, precondition) from exc

    return await call_or_find(session, key, attempt, fate, find)


async def _head(session: Session, source: Source) -> ObjectMeta:
    return await session.call(
        source.key, lambda _: session.service.head(source.key, generation=source.generation)
    )


async def _made_before(
    session: Session,
    key: str,
    sources: Sequence[Source],
    metas: Sequence[ObjectMeta],
    *,
    may_read: bool = False,
) -> ObjectMeta | None:
    """Return the object if an attempt whose answer was lost made it of the sources.

    Args:
        session: Where.
        key: What was to be made.
        sources: Of what.
        metas: What is known of them.
        may_read: Objects without a checksum are read to compare them.
    """
    service = session.service
    try:
        metas = metas or [
            await service.head(source.key, generation=source.generation) for source in sources
        ]
        made = await service.head(key)
        size, checksum = _concatenation(metas)
        if size != made.size or any(
            (meta.key, meta.generation) == (key, made.generation) for meta in metas
        ):
            return None  # another object, or an append that changed nothing yet
        if checksum is None and may_read:
            _, checksum = _concatenation(
                [replace(meta, crc32c=await checksum_of(session, meta)) for meta in metas]
            )
            made = replace(made, crc32c=await checksum_of(session, made))
    except NotFoundError:
        return None
    # Without a checksum nothing tells the result from another object of its size.
    return made if checksum is not None and made.crc32c == checksum else None


def _concatenation(metas: Sequence[ObjectMeta]) -> tuple[int, int | None]:
    """Return size and crc32c of objects one after the other; no crc32c where one has none."""
    checksum: int | None = 0
    for meta in metas:
        if checksum is None or meta.crc32c is None:
            checksum = None
        else:
            checksum = combine_crc32c(checksum, meta.crc32c, meta.size)
    return sum(meta.size for meta in metas), checksum

"""Composes and copies of objects on the service.

After an ambiguous attempt the destination's metadata is read first. The request is not repeated if
the destination has the size and crc32c of the concatenated sources, and the requested attributes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import gather
from aioflux._services.base import Source
from aioflux._transfer.ambiguous_writes import AmbiguousWrite, checksum_of, has_attributes
from aioflux._transfer.arguments import write_request
from aioflux._transfer.conditions import require
from aioflux._transfer.retry import Backoff
from aioflux._values.checksums import combine_crc32c
from aioflux._values.meta import attributes_of
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from aioflux._services.base import Precondition, WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta


async def compose(
    session: Session,
    request: WriteRequest,
    sources: Sequence[Source],
    *,
    metas: Sequence[ObjectMeta] = (),
) -> ObjectMeta:
    """Concatenate `sources` into one object.

    If the destination is one of its own sources (an append), all sources are pinned first, so that
    a repeated attempt cannot append twice. If a source that was given without a generation is
    replaced before the compose, the sources are pinned again.

    Args:
        session: The session.
        request: The object to write.
        sources: The objects to concatenate, in order.
        metas: Metadata of the sources from a listing; saves requests after an ambiguous attempt.
    """
    if all(source.key != request.key for source in sources):
        return await _send_compose(session, request, sources, metas)
    backoff = Backoff(session.retry)
    while True:
        metas = await gather(session.head(source.key, source.generation) for source in sources)
        pinned = [Source(key=meta.key, generation=meta.generation) for meta in metas]
        try:
            return await _send_compose(session, request, pinned, metas)
        except NotFoundError as exc:
            # A source was replaced meanwhile, maybe by an ambiguous attempt of this append: another
            # attempt would then append twice.
            may_repeat = not exc.maybe_done and not all(src.generation for src in sources)
            if not (may_repeat and await backoff.pause()):
                raise


async def _send_compose(
    session: Session,
    request: WriteRequest,
    sources: Sequence[Source],
    metas: Sequence[ObjectMeta],
) -> ObjectMeta:
    """Concatenate the sources, each in its generation if it has one."""
    write = AmbiguousWrite(
        session,
        request,
        lambda: session.service.compose(request, sources),
        lambda: _find_composed(session, request, sources, metas),
    )
    return await write.run(is_costly=True)


async def copy(
    session: Session, source: Source, key: str, *, precondition: Precondition
) -> ObjectMeta:
    """Copy an object within the bucket, with its attributes."""
    request = write_request(key, precondition)
    if precondition:
        await require(session, key, precondition)

    async def find() -> ObjectMeta | None:
        try:
            original = await session.service.head(source.key, generation=source.generation)
        except NotFoundError:
            return None
        copied = replace(request, attributes=attributes_of(original))
        # An unconditional copy is cheaper to repeat than to compare byte by byte.
        may_read = bool(precondition)
        return await _find_composed(session, copied, [source], [original], may_read=may_read)

    def send() -> Awaitable[ObjectMeta]:
        return session.service.copy(source, key, precondition=precondition)

    return await AmbiguousWrite(session, request, send, find).run(is_costly=True)


async def _find_composed(
    session: Session,
    request: WriteRequest,
    sources: Sequence[Source],
    metas: Sequence[ObjectMeta],
    *,
    may_read: bool = False,
) -> ObjectMeta | None:
    """Return the object if an ambiguous attempt has composed it of the sources, or None.

    With `may_read`, objects without a checksum are read to compute it.
    """
    service, key = session.service, request.key
    try:
        metas = metas or [
            await service.head(source.key, generation=source.generation) for source in sources
        ]
        composed = await service.head(key)
        size, checksum = _concatenation(metas)
        if size != composed.size or any(
            (meta.key, meta.generation) == (key, composed.generation) for meta in metas
        ):
            return None  # another object, or the destination of an append before the append
        if checksum is None and may_read:
            _, checksum = _concatenation(
                [replace(meta, crc32c=await checksum_of(session, meta)) for meta in metas]
            )
            composed = replace(composed, crc32c=await checksum_of(session, composed))
    except NotFoundError:
        return None
    # Without a checksum the composed object looks the same as another object of its size.
    is_same = checksum is not None and composed.crc32c == checksum
    is_ours = is_same and has_attributes(composed, request.attributes)
    return composed if is_ours else None


def _concatenation(metas: Sequence[ObjectMeta]) -> tuple[int, int | None]:
    """Return size and crc32c of concatenated objects; None as crc32c if an object has none."""
    checksum: int | None = 0
    for meta in metas:
        if checksum is None or meta.crc32c is None:
            checksum = None
        else:
            checksum = combine_crc32c(checksum, meta.crc32c, meta.size)
    return sum(meta.size for meta in metas), checksum

"""Reading many objects ahead of a consumer, bounded in number and in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from aioflux._arguments import parse_key
from aioflux.transfer._download import Fetched, fetch
from aioflux.transfer._fanout import bounded_batches
from aioflux.transfer._limits import ByteBudget
from aioflux.transfer._nested import nested

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aioflux._meta import ObjectMeta
    from aioflux.transfer._fanout import Items
    from aioflux.transfer._session import Session

__all__ = ["fetch_many"]

FetchedBatch: TypeAlias = list[tuple[str, Fetched]]


async def fetch_many(
    session: Session, keys: Items[str | ObjectMeta], *, ordered: bool
) -> AsyncGenerator[FetchedBatch, None]:
    """Yield lists of `(key, what was read)`, each of those that are there at once.

    Args:
        session: Where.
        keys: Names, or metadata that pins a generation.
        ordered: In the order of `keys`; otherwise as they arrive.
    """
    # Finished objects wait here for the consumer. The budget is this iteration's own: unread
    # results must not keep other calls of the same store from going on.
    ahead = ByteBudget(session.options.max_in_flight_bytes)

    async def one(item: str | ObjectMeta) -> tuple[str, Fetched]:
        name, meta = parse_key(item)
        size = meta.size if meta else session.limits.unknown_size.num_bytes
        await ahead.acquire(size)
        try:
            fetched = await fetch(session, name, meta)
        except BaseException:
            ahead.release(size)
            raise
        ahead.charge(len(fetched.data))
        ahead.release(size)
        return name, fetched

    batches = bounded_batches(
        one, keys, max_in_flight=session.options.max_in_flight, ordered=ordered
    )
    async with nested(batches) as inner:
        async for batch in inner:
            yield batch
            ahead.release(sum(len(fetched.data) for _, fetched in batch))

"""Writes of many objects, in parallel up to a number of requests and bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aioflux._concurrency.byte_budget import ByteBudget
from aioflux._concurrency.fan_out import Intake, bounded_batches
from aioflux._transfer.arguments import parse_pair, write_request
from aioflux._transfer.write import put
from aioflux._values.listing import Listing
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from aioflux._concurrency.fan_out import Items
    from aioflux._services.base import Precondition
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta


def put_batches(
    session: Session, pairs: Items[Any], precondition: Precondition, stored: Listing | None = None
) -> AsyncGenerator[list[ObjectMeta], None]:
    """Write pairs of key and data, and yield lists of the objects that are stored.

    Each object is also added to `stored`, at once.
    """
    budget = ByteBudget(session.options.max_in_flight_bytes)

    async def put_pair(pair: tuple[str, memoryview]) -> ObjectMeta:
        key, view = pair
        try:
            meta = await session.timed(key, put(session, write_request(key, precondition), view))
        finally:
            budget.release(view.nbytes)
        if stored is not None:
            stored.extend((meta,))
        return meta

    return bounded_batches(
        put_pair,
        pairs,
        max_in_flight=session.options.max_in_flight,
        ordered=False,
        intake=Intake(budget, parse_pair, lambda pair: pair[1].nbytes),
    )


async def put_many(session: Session, pairs: Items[Any], precondition: Precondition) -> Listing:
    """Write pairs of key and data, and return what was stored, sorted by key.

    Errors say how many objects were stored.
    """
    stored = Listing()
    try:
        async with aclosing(put_batches(session, pairs, precondition, stored)) as batches:
            async for _ in batches:
                pass
    except Exception as exc:
        text = f"put_many had stored {len(stored)} objects"
        if isinstance(exc, StorageError):
            exc.message += f"; {text}"
        else:
            exc.add_note(text)
        raise
    return stored.pick(sorted(range(len(stored)), key=stored.keys.__getitem__))

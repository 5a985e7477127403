"""Reading many objects ahead of a consumer, bounded in number and in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from aioflux._concurrency.async_iteration import nested
from aioflux._concurrency.fan_out import bounded_batches
from aioflux._transfer.arguments import parse_key
from aioflux._transfer.get import (
    NoRoomError,
    fetch,
    head,
    replaced_error,
)
from aioflux._transfer.get_small import NOTHING, Fetched, first_range_bytes
from aioflux._transfer.prefetch_budget import Ahead
from aioflux._transfer.retry import Backoff
from aioflux._transfer.small_read_loop import Express
from aioflux.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from aioflux._concurrency.fan_out import Items
    from aioflux._transfer.get_small import Begun
    from aioflux._transfer.prefetch_budget import Share
    from aioflux._transfer.session import Session
    from aioflux._transfer.small_read_loop import Left
    from aioflux._values.meta import ObjectMeta

__all__ = ["MIN_BATCHES", "fetch_many", "try_many"]

MIN_BATCHES: Final = 16
"""Batches that a whole budget of results makes at least. The bytes of a batch stay in use until the
consumer asks for the next one: in a single batch they would hold up all requests until then."""

FetchedBatch: TypeAlias = list[tuple[str, Fetched]]
TriedMany: TypeAlias = list[tuple[str, Fetched] | StorageError]


def fetch_many(
    session: Session, keys: Items[str | ObjectMeta], *, ordered: bool
) -> AsyncGenerator[FetchedBatch, None]:
    """Yield lists of `(key, what was read)`, each of those that are there at once.

    Args:
        session: Where.
        keys: Names, or metadata that pins a generation.
        ordered: In the order of `keys`; otherwise as they arrive.
    """
    batches = _batches(session, keys, ordered=ordered, recover=None)
    return cast("AsyncGenerator[FetchedBatch, None]", batches)


def try_many(
    session: Session, keys: Items[str | ObjectMeta], *, ordered: bool
) -> AsyncGenerator[TriedMany, None]:
    """Yield what `fetch_many` yields, with the error in place of an object that has one."""
    return _batches(session, keys, ordered=ordered, recover=only_storage_errors)


def only_storage_errors(error: BaseException) -> StorageError | None:
    """Return an error that is of one object, and so need not end the reading of others."""
    return error if isinstance(error, StorageError) else None


async def _batches(
    session: Session,
    keys: Items[str | ObjectMeta],
    *,
    ordered: bool,
    recover: Callable[[BaseException], StorageError | None] | None,
) -> AsyncGenerator[TriedMany, None]:
    # Finished objects wait here for the consumer. The budget is this iteration's own: unread
    # results must not keep other calls of the same store from going on.
    ahead = Ahead(session.options.max_in_flight_bytes, ordered=ordered)
    full_batch_bytes = session.options.max_in_flight_bytes / MIN_BATCHES

    async def one(item: Any) -> tuple[str, Fetched] | StorageError:
        left: Left = item
        try:
            name, meta = parse_key(left.item)
            fetched = await _fetch_within(session, name, meta, left.share, left.begun)
        except BaseException:
            left.share.set(0)
            raise
        left.share.set(len(fetched.data))
        return name, fetched

    batches = bounded_batches(
        one,
        keys,
        max_in_flight=session.options.max_in_flight,
        ordered=ordered,
        new_runner=lambda shared: Express(session, ahead, shared),
        recover=recover,
        weigh=lambda each: _num_bytes(each) / full_batch_bytes,
    )
    async with nested(batches) as inner:
        async for batch in inner:
            yield batch
            ahead.given(len(batch), sum(map(_num_bytes, batch)))
            # It is dropped in all frames before the next one is asked for, which may take its room.
            del batch


def _num_bytes(result: tuple[str, Fetched] | StorageError) -> int:
    """Return the bytes that a result holds; a failed one holds none."""
    return len(result[1].data) if isinstance(result, tuple) else 0


async def _fetch_within(
    session: Session, key: str, meta: ObjectMeta | None, share: Share, begun: Begun
) -> Fetched:
    """Read one object within its share of the budget, which waits until there is room for it.

    Of one read by name, room is taken for the first range. Where there is none for the object that
    turns out to be larger, what came is dropped, and it is read again when there is.
    """
    if meta is not None:
        if not share.take(meta.size):
            await share.acquire(meta.size)
        return await fetch(session, key, meta, begun=begun)
    estimate, options = session.limits.unknown_size, session.options
    backoff: Backoff | None = None
    while True:
        if estimate.is_known and estimate.num_bytes > options.range_size_bytes:
            # One request for the size costs less than a range that is dropped.
            found = await head(session, key)
            estimate.add(found.size)
        else:
            wanted = first_range_bytes(estimate.num_bytes, options)
            if begun.first is None and not share.take(wanted):
                await share.acquire(wanted)
            try:
                # Not what the estimate has become while it waited for room.
                first_bytes = share.num_bytes
                return await fetch(
                    session, key, first_bytes=first_bytes, may_hold=share.grow, begun=begun
                )
            except NoRoomError as exc:
                found = exc.meta
                begun = NOTHING
        await share.acquire(found.size)
        try:
            return await fetch(session, key, found)
        except NotFoundError:  # replaced while it waited: begun again
            backoff = backoff or Backoff(session.retry)
            if not await backoff.pause():
                raise replaced_error(session, key, backoff.num_tries) from None

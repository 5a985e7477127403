"""Reads of many objects, prefetched up to a number of requests and bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from aioflux._concurrency.async_iteration import aclosing_inner
from aioflux._concurrency.byte_budget import PrefetchBudget
from aioflux._concurrency.fan_out import bounded_batches, gather_bounded
from aioflux._http.memory import LEAST_POOLED_BYTES
from aioflux._transfer.arguments import parse_key
from aioflux._transfer.read import (
    NO_ATTEMPT,
    ExceedsReservationError,
    Fetched,
    fetch,
    replaced_error,
)
from aioflux._transfer.retry import Backoff
from aioflux._transfer.small_read_loop import SmallReadLoop
from aioflux.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from aioflux._concurrency.byte_budget import Reservation
    from aioflux._concurrency.fan_out import Items
    from aioflux._transfer.read import PriorAttempt
    from aioflux._transfer.session import Session
    from aioflux._transfer.small_read_loop import Handover
    from aioflux._values.meta import ObjectMeta

MIN_BATCHES: Final = 16
"""Least number of batches that share the prefetch budget. The bytes of a batch stay reserved until
the consumer requests the next batch: one batch of all bytes would stop all reads until then."""

FetchedBatch: TypeAlias = list[tuple[str, Fetched]]
TriedMany: TypeAlias = list[tuple[str, Fetched] | StorageError]
TriedBatch: TypeAlias = "list[tuple[ObjectMeta, bytes] | tuple[None, StorageError]]"


def fetch_many(
    session: Session, keys: Items[str | ObjectMeta], *, ordered: bool
) -> AsyncGenerator[FetchedBatch, None]:
    """Yield lists of `(key, object)`. A list has the objects that are ready.

    Args:
        session: The session.
        keys: Keys, or metadata that pins a generation.
        ordered: Yield the objects in the order of `keys`; otherwise as they arrive.
    """
    batches = _batches(session, keys, ordered=ordered, recover=None)
    return cast("AsyncGenerator[FetchedBatch, None]", batches)


def try_many(
    session: Session, keys: Items[str | ObjectMeta], *, ordered: bool
) -> AsyncGenerator[TriedMany, None]:
    """Yield as `fetch_many`; an object that could not be read is yielded as its error."""
    return _batches(session, keys, ordered=ordered, recover=_storage_error)


async def try_all(session: Session, keys: Sequence[str | ObjectMeta]) -> TriedBatch:
    """Read all objects; return pairs of metadata and bytes, or None and the error, in order."""

    async def read(item: str | ObjectMeta) -> tuple[ObjectMeta, bytes] | tuple[None, StorageError]:
        name, meta = parse_key(item)
        try:
            fetched = await fetch(session, name, meta)
        except StorageError as exc:
            return None, exc
        return meta or fetched.meta(), fetched.data

    if len(keys) == 1:
        return [await read(keys[0])]
    return await gather_bounded(read, keys, max_in_flight=session.options.max_in_flight)


def _storage_error(error: BaseException) -> StorageError | None:
    """Return a StorageError, which is yielded as a result; None for errors that are raised."""
    return error if isinstance(error, StorageError) else None


async def _batches(
    session: Session,
    keys: Items[str | ObjectMeta],
    *,
    ordered: bool,
    recover: Callable[[BaseException], StorageError | None] | None,
) -> AsyncGenerator[TriedMany, None]:
    # Each iteration has a budget of its own: results that wait for its consumer must not delay
    # other calls of the store.
    budget = PrefetchBudget(session.options.max_in_flight_bytes, ordered=ordered)
    full_batch_bytes = session.options.max_in_flight_bytes / MIN_BATCHES

    async def read(item: Any) -> tuple[str, Fetched] | StorageError:
        handover: Handover = item
        reservation = handover.reservation
        try:
            name, meta = parse_key(handover.item)
            fetched = await _fetch_within(session, name, meta, reservation, handover.prior)
        except BaseException:
            reservation.set(0)
            raise
        reservation.set(len(fetched.data))
        return name, fetched

    batches = bounded_batches(
        read,
        keys,
        max_in_flight=session.options.max_in_flight,
        ordered=ordered,
        new_runner=lambda fan_out: SmallReadLoop(session, budget, fan_out),
        recover=recover,
        weigh=_num_bytes,
        max_weight=full_batch_bytes,
    )
    async with aclosing_inner(batches) as inner:
        async for batch in inner:
            yield batch
            num_bytes = sum(map(_num_bytes, batch))
            if num_bytes >= len(batch) * LEAST_POOLED_BYTES:
                _offer(session, batch)
            budget.release_yielded(len(batch), num_bytes)
            # Each generator on the way to the consumer deletes its reference to the batch before
            # the next batch is made, so that the next batch can reuse the memory.
            del batch


def _offer(session: Session, batch: TriedMany) -> None:
    """Use the memory of large objects again when the consumer has released them."""
    for result in batch:
        if isinstance(result, tuple):
            session.memory.offer(result[1].data)


def _num_bytes(result: tuple[str, Fetched] | StorageError) -> int:
    """Return the size of a result in bytes; 0 for an error."""
    return len(result[1].data) if isinstance(result, tuple) else 0


async def _fetch_within(
    session: Session,
    key: str,
    meta: ObjectMeta | None,
    reservation: Reservation,
    prior: PriorAttempt,
) -> Fetched:
    """Wait until the prefetch budget has memory for an object, and read the object.

    Without `meta`, memory is reserved for the first range. If the object is larger and the budget
    has no memory for the rest, the first range is dropped, and the object is read again as soon as
    the budget has memory for all of it.
    """
    if meta is not None:
        if not reservation.try_acquire(meta.size):
            await reservation.acquire(meta.size)
        return await session.timed(key, fetch(session, key, meta, prior=prior), prior.started_at)
    estimate, options = session.unknown_size, session.options
    backoff: Backoff | None = None
    while True:
        if estimate.is_known and estimate.num_bytes > options.range_size_bytes:
            # One request for the size costs less than a first range that is dropped.
            current = await session.head(key)
            estimate.add(current.size)
        else:
            num_wanted = estimate.first_range_bytes
            if prior.first is None and not reservation.try_acquire(num_wanted):
                await reservation.acquire(num_wanted)
            try:
                # The reserved size: the estimate may have changed during the wait.
                first_bytes = reservation.num_bytes
                reading = fetch(
                    session, key, first_bytes=first_bytes, may_hold=reservation.grow, prior=prior
                )
                return await session.timed(key, reading, prior.started_at)
            except ExceedsReservationError as exc:
                current = exc.meta
                prior = NO_ATTEMPT
        await reservation.acquire(current.size)
        try:
            return await session.timed(key, fetch(session, key, current))
        except NotFoundError:  # replaced during the wait: read the new generation
            backoff = backoff or Backoff(session.retry)
            if not await backoff.pause():
                raise replaced_error(session, key, backoff.num_tries) from None

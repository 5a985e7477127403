"""Reads of many objects, prefetched within bounds of number and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from aioflux._concurrency.async_iteration import nested
from aioflux._concurrency.fan_out import bounded_batches
from aioflux._transfer.arguments import parse_key
from aioflux._transfer.get import ExceedsReservationError, fetch, replaced_error
from aioflux._transfer.get_small import NO_ATTEMPT, Fetched, first_range_bytes
from aioflux._transfer.prefetch_budget import PrefetchBudget
from aioflux._transfer.retry import Backoff
from aioflux._transfer.small_read_loop import SmallReadLoop
from aioflux.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from aioflux._concurrency.fan_out import Items
    from aioflux._transfer.get_small import PriorAttempt
    from aioflux._transfer.prefetch_budget import Reservation
    from aioflux._transfer.session import Session
    from aioflux._transfer.small_read_loop import Handover
    from aioflux._values.meta import ObjectMeta

__all__ = ["MIN_BATCHES", "fetch_many", "try_many"]

MIN_BATCHES: Final = 16
"""Least number of batches in a whole budget of results. The bytes of a batch stay in use until the
consumer needs the next one: a single batch would hold up all requests until then."""

FetchedBatch: TypeAlias = list[tuple[str, Fetched]]
TriedMany: TypeAlias = list[tuple[str, Fetched] | StorageError]


def fetch_many(
    session: Session, keys: Items[str | ObjectMeta], *, ordered: bool
) -> AsyncGenerator[FetchedBatch, None]:
    """Yield lists of `(key, object)`, each of the objects that are ready.

    Args:
        session: The session.
        keys: Keys, or metadata that pins a generation.
        ordered: In the order of `keys`; otherwise as they arrive.
    """
    batches = _batches(session, keys, ordered=ordered, recover=None)
    return cast("AsyncGenerator[FetchedBatch, None]", batches)


def try_many(
    session: Session, keys: Items[str | ObjectMeta], *, ordered: bool
) -> AsyncGenerator[TriedMany, None]:
    """Yield as `fetch_many`, with its error in place of an object that could not be read."""
    return _batches(session, keys, ordered=ordered, recover=_storage_error)


def _storage_error(error: BaseException) -> StorageError | None:
    """Return an error that concerns one object, and so need not end the reads of others."""
    return error if isinstance(error, StorageError) else None


async def _batches(
    session: Session,
    keys: Items[str | ObjectMeta],
    *,
    ordered: bool,
    recover: Callable[[BaseException], StorageError | None] | None,
) -> AsyncGenerator[TriedMany, None]:
    # The budget is this iteration's own: results that wait for the consumer must not hold up other
    # calls of the same store.
    budget = PrefetchBudget(session.options.max_in_flight_bytes, ordered=ordered)
    full_batch_bytes = session.options.max_in_flight_bytes / MIN_BATCHES

    async def one(item: Any) -> tuple[str, Fetched] | StorageError:
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
        one,
        keys,
        max_in_flight=session.options.max_in_flight,
        ordered=ordered,
        new_runner=lambda fan_out: SmallReadLoop(session, budget, fan_out),
        recover=recover,
        weigh=_num_bytes,
        max_weight=full_batch_bytes,
    )
    async with nested(batches) as inner:
        async for batch in inner:
            yield batch
            budget.release_yielded(len(batch), sum(map(_num_bytes, batch)))
            # All frames drop it before the next one, which may use its memory.
            del batch


def _num_bytes(result: tuple[str, Fetched] | StorageError) -> int:
    """Return the size of a result; a failed one has none."""
    return len(result[1].data) if isinstance(result, tuple) else 0


async def _fetch_within(
    session: Session,
    key: str,
    meta: ObjectMeta | None,
    reservation: Reservation,
    prior: PriorAttempt,
) -> Fetched:
    """Read one object within the budget, after a wait until it fits.

    For one that is read by name, bytes are reserved for its first range. If it turns out to be
    larger and the rest does not fit, the range is dropped; the object is read again when it fits.
    """
    if meta is not None:
        if not reservation.try_acquire(meta.size):
            await reservation.acquire(meta.size)
        return await fetch(session, key, meta, prior=prior)
    estimate, options = session.limits.unknown_size, session.options
    backoff: Backoff | None = None
    while True:
        if estimate.is_known and estimate.num_bytes > options.range_size_bytes:
            # One request for the size costs less than a range that is dropped.
            found = await session.head(key)
            estimate.add(found.size)
        else:
            wanted = first_range_bytes(estimate.num_bytes, options)
            if prior.first is None and not reservation.try_acquire(wanted):
                await reservation.acquire(wanted)
            try:
                # Not the estimate, which may have changed during the wait.
                first_bytes = reservation.num_bytes
                return await fetch(
                    session, key, first_bytes=first_bytes, may_hold=reservation.grow, prior=prior
                )
            except ExceedsReservationError as exc:
                found = exc.meta
                prior = NO_ATTEMPT
        await reservation.acquire(found.size)
        try:
            return await fetch(session, key, found)
        except NotFoundError:  # replaced during the wait: begin again
            backoff = backoff or Backoff(session.retry)
            if not await backoff.pause():
                raise replaced_error(session, key, backoff.num_tries) from None

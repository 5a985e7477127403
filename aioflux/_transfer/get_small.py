"""Small objects: one request each, and the judgement whether its answer is the object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from aioflux._services.base import ReadRequest
from aioflux._transfer.get_range import First, reads_twice
from aioflux._values.checksums import crc32c

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux._services.base import Body
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta
    from aioflux.errors import TransientError
    from aioflux.options import TransferOptions

__all__ = [
    "NOTHING",
    "Begun",
    "Fetched",
    "fetch_small",
    "first_range_bytes",
    "judge_small",
    "small_bytes",
]

_SMALL_BYTES: Final = 1024 * 1024
"""Objects of up to this size are read by one request at first, from the start again where its body
breaks off; of larger ones, what came is kept."""


class Fetched(NamedTuple):
    """A whole object."""

    data: bytes
    """Its bytes, verified."""
    told: ObjectMeta | Callable[[], ObjectMeta]
    """Its metadata, or what builds it."""

    def meta(self) -> ObjectMeta:
        """Return its metadata."""
        return self.told() if callable(self.told) else self.told


class Begun(NamedTuple):
    """What is known of a read that was begun before."""

    first: First | None = None
    """Its first range."""
    failure: TransientError | None = None
    """How its first attempt failed."""
    began: float = 0.0
    """When that began, on the monotonic clock."""
    num_reads: int = 0
    """Reads of it whose bytes were not sure."""


NOTHING: Final = Begun()


def first_range_bytes(estimate_bytes: int, options: TransferOptions) -> int:
    """Return how much is asked for first of an object of unknown size.

    It is also what is taken from the byte budget, so that reads by name keep within it: what an
    object has beyond this is asked for in ranges of known size. A quarter more than the estimate
    keeps objects of about one size whole, and half of each request's even share of the budget costs
    nobody a place: the other half is for objects that wait for the consumer.
    """
    share = options.max_in_flight_bytes // (2 * options.max_in_flight)
    wanted = max(share, estimate_bytes + estimate_bytes // 4, 1)
    return min(wanted, options.range_size_bytes)


def small_bytes(options: TransferOptions) -> int:
    """Return up to which size an object is read by one request, from the start at each attempt."""
    return min(_SMALL_BYTES, options.range_size_bytes)


async def fetch_small(
    session: Session, key: str, end: int, meta: ObjectMeta | None, begun: Begun
) -> Fetched | First | None:
    """Read an object in one request, as most small ones are; see `judge_small`."""
    service = session.service
    request = ReadRequest(key, "" if meta is None else meta.generation, 0, end)
    body = await session.call(
        key,
        lambda _: service.get(request),
        num_bytes=end,
        after=begun.failure,
        began=begun.began,
    )
    return judge_small(session, body, end, meta)


def judge_small(
    session: Session, body: Body, end: int, meta: ObjectMeta | None
) -> Fetched | First | None:
    """Judge the answer to a read of the bytes `[0, end)`.

    Args:
        session: Where.
        body: The answer.
        end: One past the last byte that was asked for.
        meta: What a listing said of the object, whose size is `end`.

    Returns:
        The object; or its first range, where it is larger, or is empty, of which a service may not
        tell all; or None where what came is not sure: it is for whoever reads with more care.
    """
    data, size = body.data, body.size
    if meta is None:
        session.limits.unknown_size.add(size)
        if not data and not size:
            return First(memoryview(b""), body)
    if not data or not isinstance(data, bytes) or len(data) != min(end, size):
        return None
    if len(data) < size:
        return First(memoryview(data), body) if meta is None else None
    if meta is not None and size != end:
        return None
    if session.options.verify:
        # What a listing told is as good as what the answer tells.
        expected = body.crc32c if meta is None or meta.crc32c is None else meta.crc32c
        if expected is None:
            # Where objects have none, to read it once more would tell nothing more, and over TLS
            # what came is believed.
            is_unsure = session.service.capabilities.checksums and reads_twice(session)
            return None if is_unsure else _fetched(data, body, meta)
        if expected != crc32c(data):
            return None
    return _fetched(data, body, meta)


def _fetched(data: bytes, body: Body, meta: ObjectMeta | None) -> Fetched:
    return Fetched(data, body.meta if meta is None else meta)

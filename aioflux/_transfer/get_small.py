"""Reads of small objects by one request each, and the check of its response."""

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
    "NO_ATTEMPT",
    "Fetched",
    "PriorAttempt",
    "check_small",
    "fetch_small",
    "first_range_bytes",
    "small_bytes",
]

_SMALL_BYTES: Final = 1024 * 1024
"""Largest object that is first read by one request, and anew from the start if its body breaks off;
of larger ones, the received bytes are kept."""


class Fetched(NamedTuple):
    """A whole object."""

    data: bytes
    """Its bytes, verified."""
    meta_source: ObjectMeta | Callable[[], ObjectMeta]
    """Its metadata, or a function that builds it."""

    def meta(self) -> ObjectMeta:
        """Return its metadata."""
        return self.meta_source() if callable(self.meta_source) else self.meta_source


class PriorAttempt(NamedTuple):
    """A read of the same object that was attempted before."""

    first: First | None = None
    """Its first range."""
    failure: TransientError | None = None
    """Failure of the first attempt."""
    started_at: float = 0.0
    """Start of that attempt, on the monotonic clock."""
    num_reads: int = 0
    """Reads whose bytes could not be verified."""


NO_ATTEMPT: Final = PriorAttempt()


def first_range_bytes(estimate_bytes: int, options: TransferOptions) -> int:
    """Return the size of the first range of an object of unknown size.

    It is also acquired from the byte budget, so that reads by name keep within it: the rest of an
    object is read in ranges of known size. A quarter more than the estimate keeps objects of about
    one size whole. Half of each request's even share of the budget delays no other request: the
    other half is for objects that wait for the consumer.
    """
    share = options.max_in_flight_bytes // (2 * options.max_in_flight)
    wanted = max(share, estimate_bytes + estimate_bytes // 4, 1)
    return min(wanted, options.range_size_bytes)


def small_bytes(options: TransferOptions) -> int:
    """Return the largest size of an object that is read from the start at each attempt."""
    return min(_SMALL_BYTES, options.range_size_bytes)


async def fetch_small(
    session: Session, key: str, end: int, meta: ObjectMeta | None, prior: PriorAttempt
) -> Fetched | First | None:
    """Read an object in one request; see `check_small`."""
    service = session.service
    request = ReadRequest(key, "" if meta is None else meta.generation, 0, end)
    body = await session.call(
        key,
        lambda _: service.get(request),
        num_bytes=end,
        after=prior.failure,
        started_at=prior.started_at,
    )
    return check_small(session, body, end, meta)


def check_small(
    session: Session, body: Body, end: int, meta: ObjectMeta | None
) -> Fetched | First | None:
    """Check the response to a read of the bytes `[0, end)`.

    Args:
        session: The session.
        body: The response.
        end: One past the last byte that was requested.
        meta: Metadata that a listing returned; its size is `end`.

    Returns:
        The object; or its first range, if it is larger, or is empty, of which a service may not
        return all metadata; or None if the bytes are not verified and must be read with more care.
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
        # The checksum in a listing is as good as that in the response.
        expected = body.crc32c if meta is None or meta.crc32c is None else meta.crc32c
        if expected is None:
            # If objects have none, a second read would prove nothing more; TLS is trusted.
            if session.service.capabilities.checksums and reads_twice(session):
                return None
        elif expected != crc32c(data):
            return None
    return Fetched(data, body.meta if meta is None else meta)

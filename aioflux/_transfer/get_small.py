"""Reads of small objects by one request each, and checks of the responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from aioflux._services.base import ReadRequest
from aioflux._transfer.get_range import FirstRange, mismatch_text
from aioflux._values.checksums import crc32c

if TYPE_CHECKING:
    from aioflux._services.base import Body
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta
    from aioflux.errors import TransientError
    from aioflux.options import TransferOptions


class Fetched(NamedTuple):
    """A whole object."""

    data: bytes
    """All bytes of the object; for their verification see `check_small`."""
    meta_source: ObjectMeta | Callable[[], ObjectMeta]
    """Metadata of the object, or a function that builds it when needed."""

    def meta(self) -> ObjectMeta:
        """Return the metadata of the object."""
        return self.meta_source() if callable(self.meta_source) else self.meta_source


class PriorAttempt(NamedTuple):
    """An earlier attempt to read the same object."""

    first: FirstRange | None = None
    """First range of the object, if the attempt received it."""
    failure: TransientError | None = None
    """Failure of the attempt, if it failed."""
    started_at: float = 0.0
    """Start of the attempt, on the monotonic clock; 0 if there was none."""
    num_reads: int = 0
    """Number of earlier reads whose bytes could not be verified."""


NO_ATTEMPT: Final = PriorAttempt()


def first_range_bytes(estimate_bytes: int, options: TransferOptions) -> int:
    """Return the size of the first range of an object of unknown size.

    The read acquires this number of bytes from the byte budget. The first range is a quarter larger
    than the estimate, so that it has all of an object if the objects are of similar sizes. It is at
    most `range_size_bytes`, and otherwise at least half of one request's share of the byte budget.
    The other half is for objects that wait for the consumer, so that a first range of this size
    delays no other request.
    """
    share = options.max_in_flight_bytes // (2 * options.max_in_flight)
    num_wanted = max(share, estimate_bytes + estimate_bytes // 4, 1)
    return min(num_wanted, options.range_size_bytes)


async def fetch_small(
    session: Session, key: str, end: int, meta: ObjectMeta | None, prior: PriorAttempt
) -> Fetched | FirstRange | None:
    """Read the bytes `[0, end)` of an object in one request; for the result see `check_small`."""
    service = session.service
    is_covered = meta is None or meta.crc32c is not None
    generation, size = ("", None) if meta is None else (meta.generation, meta.size)
    request = ReadRequest(key, generation, 0, end, size, is_covered)
    body = await session.call(
        key,
        lambda _: service.get(request),
        num_bytes=end,
        after=prior.failure,
        started_at=prior.started_at,
    )
    return check_small(session, key, body, end, meta)


def lacks_checksum(session: Session, body: Body, *, is_whole: bool) -> bool:
    """Return whether to ask `head` for a checksum, which the response to a read does not have.

    Responses of Cloud Storage always have one, unless a proxy removes it.
    """
    can = session.service.capabilities
    is_expected = can.checksums and (can.listed_checksums or not is_whole)
    return session.options.verify and is_expected and body.crc32c is None and bool(body.generation)


def check_small(
    session: Session, key: str, body: Body, end: int, meta: ObjectMeta | None
) -> Fetched | FirstRange | None:
    """Check the response to a read of the bytes `[0, end)`.

    Args:
        session: The session.
        key: Name of the object.
        body: The response.
        end: One past the last requested byte.
        meta: Metadata from a listing, whose size is `end`; None without a listing.

    Returns:
        The object, if the response has all its bytes. The first range, if `meta` is None and the
        object is larger or empty (services may return no metadata of an empty object), or its
        checksum is missing. None, if the object must be read again, because the bytes could not be
        verified or do not have the expected size.
    """
    data, size = body.data, body.size
    if meta is None:
        session.unknown_size.add(size)
        if not data and not size:
            return FirstRange(memoryview(b""), body)
    if not data or not isinstance(data, bytes):
        return None
    if len(data) != size or size > end:
        is_first = meta is None and len(data) == end < size
        return FirstRange(memoryview(data), body) if is_first else None
    if meta is not None and size != end:
        return None
    if session.options.verify:
        # The listing has the same checksum as the response.
        expected = body.crc32c if meta is None or meta.crc32c is None else meta.crc32c
        if expected is None:
            if lacks_checksum(session, body, is_whole=True):
                return FirstRange(memoryview(data), body) if meta is None else None
            if not body.is_verified:
                session.count_unverified(size, is_whole=True)
        elif expected != (actual := crc32c(data)):
            session.count_mismatch(key, mismatch_text(actual, expected))
            return None
    else:
        session.count_unverified(size, is_whole=True)
    # Twice as fast as `Fetched(...)`.
    return tuple.__new__(Fetched, (data, body.meta if meta is None else meta))

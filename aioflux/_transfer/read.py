"""Reads of one object, whole or in part: a plan of ranges, and an executor that fills one buffer.

key, or meta of a listing
    -> first range, whose response has size and generation if they are not known (a 416, after the
       end of the object, may have neither)
    -> plan_ranges(rest) -> each range into its part of the buffer, pinned to the generation
    -> combined crc32c of all ranges == crc32c of the object, if all of it was read

ranges -> coalesce_ranges -> merged ranges -> fetch_range of each, pinned -> slices, in order

Over 500 lines because all reads share `_read_known`, `_read_unknown` and `read_verified`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from aioflux._concurrency.fan_out import bounded_map, pair
from aioflux._http.memory import BytesBuffer
from aioflux._services.base import ReadRequest
from aioflux._transfer.read_plan import coalesce_ranges
from aioflux._transfer.read_range import (
    FirstRange,
    Pin,
    ReplacedError,
    mismatch_text,
    read_first,
    read_into,
    size_error,
)
from aioflux._transfer.retry import Backoff
from aioflux._values.checksums import combine_crc32c, crc32c
from aioflux.errors import (
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux._services.base import Body
    from aioflux._transfer.read_plan import MergedRange
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

T = TypeVar("T")

MAX_READS = 3
"""Maximum number of reads whose bytes mismatch the checksum; then ChecksumError is raised."""
_MAX_FIRST_BYTES: Final = 2 * 1024 * 1024
"""Largest first range of an object that may be large. The other ranges start only after the first
range, which returns the size: a first range of 16 MiB at 50 MB/s would take an eighth of the time
that eight connections need for 1 GiB."""
_PROBE_BYTES: Final = 256 * 1024
"""First range of a large range by name from the middle of an object: it returns the generation to
which the other ranges are pinned, and takes one round trip and 5 ms at 50 MB/s."""


class ExceedsReservationError(Exception):
    """An object is larger than the bytes that are reserved for it.

    Attributes:
        meta: Metadata of the object, from the response to the first range.
    """

    def __init__(self, meta: ObjectMeta) -> None:
        super().__init__(meta.uri)
        self.meta = meta


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


class _View:
    """Memory of the caller, for the bytes of a read."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def place(self, num_bytes: int) -> memoryview:
        """Return memory for a number of bytes."""
        return self._view[:num_bytes]

    def grow(self, first: FirstRange, num_bytes: int) -> memoryview:
        """Return memory for more bytes, which begins with those of the first range."""
        return self._view[:num_bytes]


class _NewBytes:
    """New memory for the bytes of a read, which becomes `bytes` without a copy."""

    def __init__(self, allocate: Callable[[int], BytesBuffer]) -> None:
        self._allocate = allocate
        self._buffer: BytesBuffer | None = None

    def place(self, num_bytes: int) -> memoryview:
        self._buffer = self._allocate(num_bytes)
        return self._buffer.view

    def grow(self, first: FirstRange, num_bytes: int) -> memoryview:
        view = self.place(num_bytes)
        view[: first.data.nbytes] = first.data
        first.drop()
        return view

    def finish(self) -> bytes:
        """Return the bytes."""
        return b"" if self._buffer is None else self._buffer.finish()


async def fetch(
    session: Session,
    key: str,
    meta: ObjectMeta | None = None,
    *,
    first_bytes: int = 0,
    may_hold: Callable[[int], bool] | None = None,
    prior: PriorAttempt = NO_ATTEMPT,
) -> Fetched:
    """Read a whole object and verify it.

    Args:
        session: The session.
        key: Name of the object.
        meta: Metadata from a listing: the read is pinned to its generation, and all ranges of a
            large object are requested at once.
        first_bytes: Size of the first range if `meta` is not given; 0 for that of the session's
            estimate. If the object may be large, it is at most `_MAX_FIRST_BYTES`.
        may_hold: Returns whether the given number of bytes may be held. Called with the size of the
            object if `meta` is not given and one read of the first range is not enough.
        prior: An earlier attempt to read the object.

    Raises:
        ChecksumError: The bytes did not match the object's crc32c in any read.
        ExceedsReservationError: `may_hold` returned False.
        NotFoundError: No object has this key, or the generation of `meta` no longer exists.
        PreconditionFailedError: `meta` is None, and the object was replaced during each read.
    """
    first, num_reads = prior.first, prior.num_reads
    if meta is not None:
        end = meta.size
        is_small = 0 < end <= session.small_bytes
        request = ReadRequest(key, meta.generation, 0, end, end, meta.crc32c is not None)
    else:
        estimate = session.unknown_size
        end = first_bytes or estimate.first_range_bytes
        is_probably_small = estimate.is_known and estimate.num_bytes <= session.small_bytes
        is_small = prior.failure is not None or (first is None and is_probably_small)
        request = ReadRequest(key, "", 0, end, None, is_covered=True)
    if is_small:
        body = await session.call(
            key,
            session.service.get,
            request,
            num_bytes=end,
            after=prior.failure,
            started_at=prior.started_at,
        )
        small = check_small(session, key, body, end, meta)
        if isinstance(small, Fetched):
            return small
        first, num_reads = small, num_reads + (small is None)
    reads = iter((first,))

    async def read() -> tuple[Fetched, int | None, int]:
        if meta is not None:
            return await _fetch_known(session, key, meta)
        return await _fetch_unknown(session, key, first_bytes, may_hold, next(reads, None))

    return await read_verified(session, key, read, num_reads=num_reads)


async def fetch_into(
    session: Session, key: str, view: memoryview, *, start: int, meta: ObjectMeta | None
) -> int:
    """Fill `view` with the bytes from `start` on, and return the number of bytes read.

    A whole object is verified by its crc32c.

    Raises:
        ChecksumError: The bytes did not match in any read.
        PreconditionFailedError: The object was replaced during each of the reads.
    """
    if not view.nbytes:
        return 0
    return await _fetch_part(session, key, start, start + view.nbytes, _View(view), meta)


async def fetch_range(
    session: Session, key: str, *, start: int, end: int, meta: ObjectMeta | None
) -> bytes:
    """Read `[start, end)`, in parallel ranges of one generation; raise as `fetch_into`."""
    target = _NewBytes(BytesBuffer)
    await _fetch_part(session, key, start, end, target, meta)
    return target.finish()


async def _fetch_part(
    session: Session,
    key: str,
    start: int,
    end: int,
    target: _View | _NewBytes,
    meta: ObjectMeta | None,
) -> int:
    async def read() -> tuple[int, int | None, int]:
        if meta is not None:
            return await _read_known(session, key, start, end, target, meta)
        largest = session.options.range_size_bytes
        most = min(largest, _PROBE_BYTES if start else _MAX_FIRST_BYTES)
        stop = end if end - start <= largest else start + most
        first = await read_first(session, key, start=start, end=stop, allocate=target.place)
        return await _read_unknown(session, key, start, end, target, first)

    return await read_verified(session, key, read)


async def fetch_ranges(
    session: Session,
    key: str,
    ranges: Sequence[tuple[int, int]],
    *,
    max_gap_bytes: int,
    meta: ObjectMeta | None,
) -> list[bytes]:
    """Read ranges of one generation of an object. Merged ranges are verified as in `fetch_range`.

    Raises:
        ChecksumError: The bytes of a merged range did not match in any read.
        NotFoundError: No object has this key, or the generation of `meta` no longer exists.
        PreconditionFailedError: `meta` is None, and the object was replaced during each read.
    """
    plan = coalesce_ranges(
        ranges, max_gap_bytes=max_gap_bytes, max_merged_bytes=session.options.range_size_bytes
    )
    if meta is not None or len(plan) <= 1:
        return await _read_plan(session, key, ranges, plan, meta)
    return await fetch_pinned(
        session, key, lambda current: _read_plan(session, key, ranges, plan, current)
    )


async def _read_plan(
    session: Session,
    key: str,
    ranges: Sequence[tuple[int, int]],
    plan: Sequence[MergedRange],
    meta: ObjectMeta | None,
) -> list[bytes]:
    results = [b""] * len(ranges)

    async def read(merged: MergedRange) -> None:
        data = await fetch_range(session, key, start=merged.start, end=merged.end, meta=meta)
        for index in merged.members:
            start, end = ranges[index]
            # No copy of a range that was not merged: a slice of all of `data` is `data` itself.
            results[index] = data[start - merged.start : end - merged.start]

    max_in_flight = session.options.max_in_flight
    async for _ in bounded_map(read, plan, max_in_flight=max_in_flight, ordered=False):
        pass
    return results


async def fetch_pinned(session: Session, key: str, read: Callable[[ObjectMeta], Awaitable[T]]) -> T:
    """Call `read` with the current metadata of an object; repeat if it is replaced meanwhile.

    Raises:
        NotFoundError: No object has this key, or its current generation cannot be read.
        PreconditionFailedError: The object was replaced during each of the reads.
    """
    failed: dict[tuple[str, str], NotFoundError] = {}

    async def attempt() -> tuple[T, int | None, int]:
        meta = await session.head(key)
        version = meta.generation, meta.etag
        if version in failed:  # not replaced since
            raise failed[version]
        try:
            return await read(meta), None, 0
        except NotFoundError as exc:
            failed[version] = exc
            raise ReplacedError from exc

    return await read_verified(session, key, attempt)


async def read_verified(
    session: Session,
    key: str,
    read: Callable[[], Awaitable[tuple[T, int | None, int]]],
    *,
    num_reads: int = 0,
) -> T:
    """Repeat a read until its bytes match the checksum and the object is not replaced meanwhile.

    `read` returns the result, the expected crc32c or None, and the actual crc32c. `num_reads`
    earlier reads did not match, and at least one more read is made.
    """
    backoff: Backoff | None = None
    num_remaining = MAX_READS - min(num_reads, MAX_READS - 1)
    while True:
        try:
            result, expected, actual = await read()
        except ReplacedError:
            backoff = backoff or Backoff(session.retry)
            if await backoff.pause():
                continue
            raise replaced_error(session, key, backoff.num_tries) from None
        if not session.options.verify or expected is None or expected == actual:
            return result
        num_remaining -= 1
        session.count_mismatch(key, mismatch_text(actual, expected))
        if not num_remaining:
            break
    uri = session.service.uri(key)
    raise ChecksumError(
        f"could not read {uri}: {mismatch_text(actual, expected)}, {MAX_READS} times in a row; the "
        "object is damaged, or the network, or a proxy in between, changes bytes",
        uri=uri,
    )


def replaced_error(session: Session, key: str, num_tries: int) -> PreconditionFailedError:
    """Return the error of an object that was replaced during each of several reads."""
    why = (
        f"it was replaced while it was read, {num_tries} times in a row; list it, and read the "
        "generation that you mean"
    )
    return PreconditionFailedError.of("read", session.service.uri(key), why)


async def head_of(session: Session, key: str, meta: ObjectMeta) -> ObjectMeta:
    """Read the metadata of a generation again, and check that the size is the same."""
    current = await session.head(key, meta.generation)
    if current.size != meta.size:
        raise size_error(session, key, Pin(meta.generation, meta.size), current.size)
    return current


async def _fetch_known(
    session: Session, key: str, meta: ObjectMeta
) -> tuple[Fetched, int | None, int]:
    if meta.size == 0:
        current = await head_of(session, key, meta)
        return Fetched(b"", current), current.crc32c, 0
    target = _NewBytes(session.memory.allocate)
    _, expected, actual = await _read_known(session, key, 0, meta.size, target, meta)
    return Fetched(target.finish(), meta), expected, actual


async def _fetch_unknown(
    session: Session,
    key: str,
    first_bytes: int,
    may_hold: Callable[[int], bool] | None,
    prior: FirstRange | None,
) -> tuple[Fetched, int | None, int]:
    estimate, target = session.unknown_size, _NewBytes(session.memory.allocate)
    first = prior
    if first is None:
        end = first_bytes or estimate.first_range_bytes
        if not estimate.is_known or estimate.num_bytes > session.options.range_size_bytes:
            end = min(end, _MAX_FIRST_BYTES)
        first = await read_first(
            session, key, start=0, end=end, allocate=target.place, is_covered=True
        )
        estimate.add(first.body.size)
    body = first.body
    if not body.size:
        if body.generation:
            return Fetched(b"", body.meta), body.crc32c, 0
        # The response to a range of an empty object is 416, without metadata.
        current = await session.head(key)
        if current.size:
            raise ReplacedError
        return Fetched(b"", current), current.crc32c, 0
    is_prior_whole = prior is not None and prior.data.nbytes == body.size
    _, expected, actual = await _read_unknown(session, key, 0, body.size, target, first, may_hold)
    data = bytes(first.data) if is_prior_whole else target.finish()
    return Fetched(data, body.meta), expected, actual


async def _read_known(
    session: Session, key: str, start: int, end: int, target: _View | _NewBytes, meta: ObjectMeta
) -> tuple[int, int | None, int]:
    """Read `[start, end)` of a generation; return the number of bytes, and both checksums."""
    length = max(0, min(end, meta.size) - start)
    if not length:
        # No bytes to read, but a read must fail if the generation does not exist.
        await head_of(session, key, meta)
        target.place(0)
        return 0, None, 0
    is_whole = length == meta.size
    expected = meta.crc32c if is_whole else None
    view = target.place(length)

    async def read() -> int:
        return await read_into(
            session,
            key,
            view,
            start=start,
            pin=Pin(meta.generation, meta.size, meta.crc32c),
            is_covered=expected is not None,
            is_hashed=is_whole,
        )

    can_ask = session.options.verify and session.service.capabilities.checksums
    if not is_whole or expected is not None or not can_ask:
        actual = await read()
    elif session.options.verify_ranges:
        # Whether a checksum covers the bytes must be known before they are read.
        expected = (await head_of(session, key, meta)).crc32c
        actual = await read()
    else:
        current, actual = await pair(head_of(session, key, meta), read())
        expected = current.crc32c
    session.count_unverified(length, is_whole=is_whole, expected=expected)
    return length, expected, actual


async def _read_unknown(
    session: Session,
    key: str,
    start: int,
    end: int,
    target: _View | _NewBytes,
    first: FirstRange,
    may_hold: Callable[[int], bool] | None = None,
) -> tuple[int, int | None, int]:
    """Read the rest of `[start, end)` after its first range; see `_read_known` for the result."""
    body, num_read = first.body, first.data.nbytes
    length = max(0, min(end, body.size) - start)
    if not length:
        target.place(0)  # an earlier read may have placed bytes of an object that was replaced
        return 0, None, 0
    is_whole = length == body.size
    if num_read < length and may_hold is not None and not may_hold(body.size):
        first.drop()
        raise ExceedsReservationError(body.meta())
    if is_whole and lacks_checksum(session, body, is_whole=num_read == length):
        try:
            body.crc32c = (await session.head(key, body.generation)).crc32c
        except NotFoundError as exc:
            raise ReplacedError from exc
    expected = body.crc32c if is_whole else None
    actual = first.crc32c() if session.options.verify and (is_whole or num_read < length) else 0
    if num_read < length:
        view = target.grow(first, length)
        try:
            rest = await read_into(
                session,
                key,
                view[num_read:],
                start=start + num_read,
                pin=Pin(body.generation, body.size),
                is_covered=expected is not None,
                is_hashed=is_whole,
            )
        except NotFoundError as exc:
            raise ReplacedError from exc
        actual = combine_crc32c(actual, rest, length - num_read)
    if num_read < length or not body.is_verified:
        session.count_unverified(length, is_whole=is_whole, expected=expected)
    return length, expected, actual


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

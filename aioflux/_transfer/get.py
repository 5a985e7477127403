"""Reads of whole objects and of ranges: a plan of ranges, and an executor that fills one buffer.

key, or meta of a listing
    -> first range, whose response has size and generation if they are not known
    -> plan_ranges(rest) -> each range into its slice of the buffer, pinned to the generation
    -> combined crc32c of all ranges == crc32c of the object

ranges -> coalesce_ranges -> merged ranges -> fetch_range of each, pinned -> slices, in order
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from aioflux._concurrency.fan_out import bounded_map, pair
from aioflux._http.memory import BytesBuffer
from aioflux._transfer.get_range import (
    Pin,
    ReplacedError,
    mismatch_text,
    read_first,
    read_into,
    size_error,
)
from aioflux._transfer.get_small import (
    NO_ATTEMPT,
    Fetched,
    PriorAttempt,
    fetch_small,
    first_range_bytes,
    lacks_checksum,
)
from aioflux._transfer.read_plan import coalesce_ranges
from aioflux._transfer.retry import Backoff
from aioflux._values.checksums import combine_crc32c
from aioflux.errors import ChecksumError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from aioflux._services.base import Body
    from aioflux._transfer.get_range import FirstRange
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


class ExceedsReservationError(Exception):
    """An object is larger than the bytes that are reserved for it.

    Attributes:
        meta: Metadata of the object, from the response to the first range.
    """

    def __init__(self, meta: ObjectMeta) -> None:
        super().__init__(meta.uri)
        self.meta = meta


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
        first_bytes: Size of the first range if `meta` is not given; 0 for `first_range_bytes`. If
            the object may be large, its first range has at most `_MAX_FIRST_BYTES`.
        may_hold: Returns whether the given number of bytes may be held. Called with the size of the
            object if `meta` is not given and one read of the first range is not enough.
        prior: An earlier attempt to read the object.

    Raises:
        ChecksumError: The bytes did not match the object's crc32c in any read.
        ExceedsReservationError: `may_hold` returned False.
        NotFoundError: No object has this key, or the generation of `meta` no longer exists.
        PreconditionFailedError: `meta` is None, and the object was replaced during each read.
    """
    first = prior.first
    if meta is not None:
        num_reads = prior.num_reads
        if 0 < meta.size <= session.small_bytes:
            small = await fetch_small(session, key, meta.size, meta, prior)
            if isinstance(small, Fetched):
                return small
            num_reads += 1
        return await _verify(
            session, key, lambda: _fetch_known(session, key, meta), num_reads=num_reads
        )
    estimate = session.unknown_size
    is_small = estimate.is_known and estimate.num_bytes <= session.small_bytes
    num_reads = prior.num_reads
    if prior.failure is not None or (first is None and is_small):
        end = first_bytes or first_range_bytes(estimate.num_bytes, session.options)
        small = await fetch_small(session, key, end, None, prior)
        if isinstance(small, Fetched):
            return small
        first = small
        num_reads += small is None
    reads = iter((first,))
    return await _verify(
        session,
        key,
        lambda: _fetch_unknown(session, key, first_bytes, may_hold, next(reads, None)),
        num_reads=num_reads,
    )


async def _verify(
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


async def _head_of(session: Session, key: str, meta: ObjectMeta) -> ObjectMeta:
    """Read the metadata of a generation again, and check that the size is the same."""
    current = await session.head(key, meta.generation)
    if current.size != meta.size:
        raise size_error(session, key, Pin(meta.generation, meta.size), current.size)
    return current


async def _fetch_known(
    session: Session, key: str, meta: ObjectMeta
) -> tuple[Fetched, int | None, int]:
    if meta.size == 0:
        current = await _head_of(session, key, meta)
        return Fetched(b"", current), current.crc32c, 0
    buffer = session.memory.allocate(meta.size)
    _, expected, actual = await _fill_known(session, key, buffer.view, 0, meta)
    return Fetched(buffer.finish(), meta), expected, actual


async def _fetch_unknown(
    session: Session,
    key: str,
    first_bytes: int,
    may_hold: Callable[[int], bool] | None,
    first: FirstRange | None,
) -> tuple[Fetched, int | None, int]:
    estimate = session.unknown_size
    buffers: list[BytesBuffer] = []

    def allocate(size: int) -> memoryview:
        buffers.append(session.memory.allocate(size))
        return buffers[-1].view

    if first is None:
        end = first_bytes or first_range_bytes(estimate.num_bytes, session.options)
        if not estimate.is_known or estimate.num_bytes > session.options.range_size_bytes:
            end = min(end, _MAX_FIRST_BYTES)
        first = await read_first(session, key, start=0, end=end, allocate=allocate, is_covered=True)
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
    num_read = first.data.nbytes
    if num_read == body.size:
        await _head_checksum(session, key, body, is_whole=True)
        if not body.is_verified:
            session.count_unverified(num_read, is_whole=True, expected=body.crc32c)
        actual = first.crc32c() if session.options.verify else 0
        data = buffers[-1].finish() if buffers else bytes(first.data)
        return Fetched(data, body.meta), body.crc32c, actual
    if may_hold is not None and not may_hold(body.size):
        buffers.clear()
        first.drop()
        raise ExceedsReservationError(body.meta())
    await _head_checksum(session, key, body, is_whole=False)
    checksum = first.crc32c() if session.options.verify else 0
    buffer = session.memory.allocate(body.size)
    buffer.view[:num_read] = first.data
    buffers.clear()
    first.drop()
    actual = await _complete(session, key, buffer.view, 0, num_read, checksum, body, is_whole=True)
    return Fetched(buffer.finish(), body.meta), body.crc32c, actual


async def _head_checksum(session: Session, key: str, body: Body, *, is_whole: bool) -> None:
    """Request the checksum of an object, if the response to its first range has none."""
    if lacks_checksum(session, body, is_whole=is_whole):
        try:
            body.crc32c = (await session.head(key, body.generation)).crc32c
        except NotFoundError as exc:
            raise ReplacedError from exc


async def _complete(
    session: Session,
    key: str,
    view: memoryview,
    start: int,
    num_read: int,
    checksum: int,
    body: Body,
    *,
    is_whole: bool,
) -> int:
    """Read the bytes after the first range, and return the crc32c of all of `view`.

    `view` is for the bytes of the object from `start` on. It already has the `num_read` bytes of
    the first range, whose crc32c is `checksum` and whose response is `body`.
    """
    rest_size = view.nbytes - num_read
    rest = 0
    if rest_size:
        try:
            rest = await read_into(
                session,
                key,
                view[num_read:],
                start=start + num_read,
                pin=Pin(body.generation, body.size),
                is_covered=is_whole and body.crc32c is not None,
                is_hashed=is_whole,
            )
        except NotFoundError as exc:
            raise ReplacedError from exc
    if rest_size or not body.is_verified:
        expected = body.crc32c if is_whole else None
        session.count_unverified(view.nbytes, is_whole=is_whole, expected=expected)
    return combine_crc32c(checksum, rest, rest_size)


async def fetch_into(
    session: Session, key: str, view: memoryview, *, start: int, meta: ObjectMeta | None
) -> int:
    """Fill `view` with the bytes from `start` on, and return the number of bytes read.

    A whole object is verified by its crc32c, a part of an object according to
    `TransferOptions.verify_ranges`.

    Raises:
        ChecksumError: The bytes did not match in any read.
        PreconditionFailedError: The object was replaced during each of the reads.
    """
    if not view.nbytes:
        return 0
    if meta is not None:
        return await _verify(session, key, lambda: _fill_known(session, key, view, start, meta))
    return await _verify(session, key, lambda: _fill_unknown(session, key, view, start))


async def _fill_known(
    session: Session, key: str, view: memoryview, start: int, meta: ObjectMeta
) -> tuple[int, int | None, int]:
    length = max(0, min(view.nbytes, meta.size - start))
    if not length:
        # No bytes to read, but a read must fail if the generation does not exist.
        await _head_of(session, key, meta)
        return 0, None, 0
    expected = meta.crc32c if length == meta.size else None

    async def read() -> int:
        return await read_into(
            session,
            key,
            view[:length],
            start=start,
            pin=Pin(meta.generation, meta.size, meta.crc32c),
            is_covered=expected is not None,
            is_hashed=length == meta.size,
        )

    can_ask = session.options.verify and session.service.capabilities.checksums
    if length < meta.size or expected is not None or not can_ask:
        actual = await read()
    elif session.options.verify_ranges:
        # Whether a checksum covers the bytes must be known before they are read.
        expected = (await _head_of(session, key, meta)).crc32c
        actual = await read()
    else:
        current, actual = await pair(_head_of(session, key, meta), read())
        expected = current.crc32c
    session.count_unverified(length, is_whole=length == meta.size, expected=expected)
    return length, expected, actual


async def _fill_unknown(
    session: Session, key: str, view: memoryview, start: int
) -> tuple[int, int | None, int]:
    largest = session.options.range_size_bytes
    end = start + (view.nbytes if view.nbytes <= largest else min(largest, _MAX_FIRST_BYTES))
    first = await read_first(session, key, start=start, end=end, allocate=lambda size: view[:size])
    body, num_read = first.body, first.data.nbytes
    length = max(0, min(view.nbytes, body.size - start))
    if not length:
        return 0, None, 0
    is_whole = length == body.size
    if is_whole:
        await _head_checksum(session, key, body, is_whole=num_read == length)
    actual = await _complete(
        session,
        key,
        view[:length],
        start,
        num_read,
        first.crc32c() if session.options.verify else 0,
        body,
        is_whole=is_whole,
    )
    return length, body.crc32c if is_whole else None, actual


async def fetch_range(
    session: Session, key: str, *, start: int, end: int, meta: ObjectMeta | None
) -> bytes:
    """Read the bytes `[start, end)`, in parallel ranges of one generation.

    Raises:
        ChecksumError: The bytes did not match in any read; see `fetch_into`.
        PreconditionFailedError: The object was replaced during each of the reads.
    """
    if meta is not None:
        return await _verify(session, key, lambda: _range_known(session, key, start, end, meta))
    if end - start <= session.options.range_size_bytes:
        return await _verify(session, key, lambda: _range_unknown(session, key, start, end))
    return await fetch_pinned(
        session, key, lambda current: fetch_range(session, key, start=start, end=end, meta=current)
    )


async def _range_known(
    session: Session, key: str, start: int, end: int, meta: ObjectMeta
) -> tuple[bytes, int | None, int]:
    buffer = BytesBuffer(max(0, min(end, meta.size) - start))
    _, expected, actual = await _fill_known(session, key, buffer.view, start, meta)
    return buffer.finish(), expected, actual


async def fetch_pinned(session: Session, key: str, read: Callable[[ObjectMeta], Awaitable[T]]) -> T:
    """Call `read` with the current metadata of an object; repeat if it is replaced meanwhile.

    Raises:
        NotFoundError: No object has this key.
        PreconditionFailedError: The object was replaced during each of the reads.
    """

    async def attempt() -> tuple[T, int | None, int]:
        meta = await session.head(key)
        try:
            return await read(meta), None, 0
        except NotFoundError as exc:
            raise ReplacedError from exc

    return await _verify(session, key, attempt)


async def _range_unknown(
    session: Session, key: str, start: int, end: int
) -> tuple[bytes, int | None, int]:
    buffers = [BytesBuffer(0)]

    def allocate(size: int) -> memoryview:
        buffers.append(BytesBuffer(size))
        return buffers[-1].view

    first = await read_first(session, key, start=start, end=end, allocate=allocate)
    is_whole = first.data.nbytes == first.body.size
    actual = first.crc32c() if session.options.verify and is_whole else 0
    expected = first.body.crc32c if is_whole else None
    if not first.body.is_verified:
        session.count_unverified(first.data.nbytes, is_whole=is_whole, expected=expected)
    return buffers[-1].finish(), expected, actual


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

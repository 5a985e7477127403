"""Reading objects: a plan of ranges, and the short executor that fills one buffer with them.

key, or meta of a listing
    -> first range (tells size and generation where they are not known)
    -> plan_ranges(rest) -> each range straight into its slice of the buffer, pinned
    -> crc32c of the ranges, combined, against the object's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from aioflux._errors import (
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)
from aioflux.http._memory import BytesBuffer
from aioflux.transfer._checksums import combine_crc32c, crc32c
from aioflux.transfer._fanout import gather

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aioflux._meta import ObjectMeta
    from aioflux.service._base import Body
    from aioflux.transfer._session import Session

__all__ = [
    "Fetched",
    "fetch",
    "fetch_into",
    "fetch_range",
    "plan_ranges",
    "read_into",
    "read_range",
]

T = TypeVar("T")

_MAX_READS = 3
"""Reads of an object whose bytes do not match its checksum before it is believed to be damaged, or
that is replaced each time."""


def plan_ranges(start: int, end: int, range_size_bytes: int) -> list[tuple[int, int]]:
    """Cut `[start, end)` into ranges of `range_size_bytes`, the last one shorter."""
    return [(at, min(at + range_size_bytes, end)) for at in range(start, end, range_size_bytes)]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole object."""

    data: bytes
    """Its bytes, verified."""
    meta: Callable[[], ObjectMeta]
    """Builds its metadata."""


async def read_range(
    session: Session, key: str, view: memoryview, *, start: int, generation: str
) -> Body:
    """Fill `view` with the bytes of an object from `start` on.

    A body that breaks off is resumed at the byte where it stopped, where the read is pinned to a
    generation; otherwise it is read again from its beginning.

    Raises:
        TransientError: Attempts ran out.
    """
    length = view.nbytes
    done = 0

    async def attempt(_: int) -> Body:
        nonlocal done
        try:
            body = await session.service.get(
                key,
                generation=generation,
                start=start + done,
                end=start + length,
                into=view[done:],
            )
        except TransientError as exc:
            if generation:
                # The last byte is always asked for again, so that a range is never empty.
                done = min(done + exc.num_bytes_received, length - 1)
            raise
        _require_bytes(session, key, len(body.data), length - done)
        return body

    return await session.call(key, attempt, num_bytes=length)


async def read_into(
    session: Session, key: str, view: memoryview, *, start: int, generation: str
) -> int:
    """Fill `view` in parallel ranges of one generation, and return its crc32c."""
    size = session.options.range_size_bytes
    plan = plan_ranges(start, start + view.nbytes, size)

    async def one(begin: int, end: int) -> int:
        part = view[begin - start : end - start]
        await read_range(session, key, part, start=begin, generation=generation)
        return crc32c(part) if session.options.verify else 0

    if len(plan) == 1:
        return await one(*plan[0])
    checksums = await gather(one(begin, end) for begin, end in plan)
    combined = 0
    for (begin, end), checksum in zip(plan, checksums, strict=True):
        combined = combine_crc32c(combined, checksum, end - begin)
    return combined


async def fetch(session: Session, key: str, meta: ObjectMeta | None = None) -> Fetched:
    """Read a whole object and verify it.

    Args:
        session: Where.
        key: Name of the object.
        meta: What a listing said of it: the read is pinned to this generation, and one request less
            is needed.

    Raises:
        ChecksumError: The bytes never matched the object's crc32c.
        PreconditionFailedError: The object was replaced each time while it was read.
    """
    if meta is not None:
        return await _verified(session, key, lambda: _fetch_known(session, key, meta))
    return await _verified(session, key, lambda: _fetch_unknown(session, key))


async def _verified(
    session: Session, key: str, read: Callable[[], Awaitable[tuple[T, int | None, int]]]
) -> T:
    """Read again what does not match its checksum, or was replaced while it was read.

    Args:
        session: Where.
        key: Name of the object.
        read: Returns the result, the expected crc32c or None, and the actual one.
    """
    failure: StorageError | None = None
    for _ in range(_MAX_READS):
        try:
            result, expected, actual = await read()
        except _ReplacedError:
            uri = session.service.uri(key)
            failure = PreconditionFailedError(
                f"could not read {uri}: it was replaced while it was read, {_MAX_READS} times in a "
                "row; list it, and read the generation that you mean",
                uri=uri,
            )
            continue
        if not session.options.verify or expected is None or expected == actual:
            return result
        uri = session.service.uri(key)
        failure = ChecksumError(
            f"could not read {uri}: its bytes have crc32c {actual:#010x}, but the service says "
            f"{expected:#010x}, {_MAX_READS} times in a row; the object is damaged, or "
            "something between here and the service changes bytes",
            uri=uri,
        )
    assert failure is not None
    raise failure


class _ReplacedError(Exception):
    """The object that a read without a generation has begun is gone."""


async def _read_rest(
    session: Session, key: str, view: memoryview, *, start: int, generation: str
) -> int:
    try:
        return await read_into(session, key, view, start=start, generation=generation)
    except NotFoundError as exc:
        raise _ReplacedError from exc


async def _fetch_known(
    session: Session, key: str, meta: ObjectMeta
) -> tuple[Fetched, int | None, int]:
    if meta.size == 0:
        head = await session.call(
            key, lambda _: session.service.head(key, generation=meta.generation)
        )
        return Fetched(b"", lambda: head), head.crc32c, 0
    buffer = BytesBuffer(meta.size)
    actual = await read_into(session, key, buffer.view, start=0, generation=meta.generation)
    return Fetched(buffer.finish(), lambda: meta), meta.crc32c, actual


async def _fetch_unknown(session: Session, key: str) -> tuple[Fetched, int | None, int]:
    step = session.options.range_size_bytes

    async def attempt(_: int) -> Body:
        body = await session.service.get(key, start=0, end=step)
        _require_bytes(session, key, len(body.data), min(step, body.size))
        return body

    estimate = session.limits.unknown_size
    first = await session.call(key, attempt, num_bytes=min(step, estimate.num_bytes))
    data = bytes(first.data)
    estimate.add(first.size)
    if not first.size and not first.generation:
        # An empty object answers a range as unsatisfiable, and without its metadata.
        head = await session.call(key, lambda _: session.service.head(key))
        return await _fetch_known(session, key, head)
    if len(data) >= first.size:
        actual = crc32c(data) if session.options.verify else 0
        return Fetched(data, first.meta), first.crc32c, actual
    buffer = BytesBuffer(first.size)
    buffer.view[: len(data)] = data
    begun = len(data)
    actual = crc32c(data) if session.options.verify else 0
    del data
    rest = await _read_rest(
        session, key, buffer.view[begun:], start=begun, generation=first.generation
    )
    actual = combine_crc32c(actual, rest, first.size - begun)
    return Fetched(buffer.finish(), first.meta), first.crc32c, actual


async def fetch_into(
    session: Session, key: str, view: memoryview, *, start: int, meta: ObjectMeta | None
) -> int:
    """Fill `view` from byte `start` on, and return how many bytes there were.

    A read of the whole object is verified; of a part, nothing is known to verify it with.
    """
    if not view.nbytes:
        return 0
    if meta is not None:
        return await _verified(
            session, key, lambda: _fetch_into_known(session, key, view, start, meta)
        )
    return await _verified(session, key, lambda: _fetch_into_unknown(session, key, view, start))


async def _fetch_into_known(
    session: Session, key: str, view: memoryview, start: int, meta: ObjectMeta
) -> tuple[int, int | None, int]:
    length = max(0, min(view.nbytes, meta.size - start))
    actual = 0
    if length:
        actual = await read_into(
            session, key, view[:length], start=start, generation=meta.generation
        )
    is_whole = start == 0 and length == meta.size
    return length, meta.crc32c if is_whole else None, actual


async def fetch_range(
    session: Session, key: str, *, start: int, end: int, meta: ObjectMeta | None
) -> bytes:
    """Read the bytes `[start, end)`, in parallel ranges of one generation."""
    if end - start <= session.options.range_size_bytes:
        return await _fetch_one_range(session, key, start, end, meta.generation if meta else "")
    if meta is None:
        meta = await session.call(key, lambda _: session.service.head(key))
    buffer = BytesBuffer(max(0, min(end, meta.size) - start))
    if buffer.view.nbytes:
        await read_into(session, key, buffer.view, start=start, generation=meta.generation)
    return buffer.finish()


async def _fetch_one_range(
    session: Session, key: str, start: int, end: int, generation: str
) -> bytes:
    async def attempt(_: int) -> Body:
        body = await session.service.get(key, generation=generation, start=start, end=end)
        _require_bytes(session, key, len(body.data), max(0, min(end, body.size) - start))
        return body

    body = await session.call(key, attempt, num_bytes=end - start)
    return bytes(body.data)


async def _fetch_into_unknown(
    session: Session, key: str, view: memoryview, start: int
) -> tuple[int, int | None, int]:
    step = min(session.options.range_size_bytes, view.nbytes)

    async def attempt(_: int) -> Body:
        body = await session.service.get(key, start=start, end=start + step, into=view[:step])
        _require_bytes(session, key, len(body.data), max(0, min(step, body.size - start)))
        return body

    first = await session.call(key, attempt, num_bytes=step)
    begun = len(first.data)
    length = max(0, min(view.nbytes, first.size - start))
    actual = crc32c(view[:begun]) if session.options.verify else 0
    if length > begun:
        rest = await _read_rest(
            session, key, view[begun:length], start=start + begun, generation=first.generation
        )
        actual = combine_crc32c(actual, rest, length - begun)
    is_whole = start == 0 and length == first.size
    return length, first.crc32c if is_whole else None, actual


def _require_bytes(session: Session, key: str, received: int, expected: int) -> None:
    if received != expected:
        uri = session.service.uri(key)
        raise TransientError(
            f"could not read {uri}: {received} of {expected} bytes came",
            uri=uri,
            num_bytes_received=received,
        )

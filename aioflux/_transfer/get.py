"""Reading objects: a plan of ranges, and the short executor that fills one buffer with them.

key, or meta of a listing
    -> first range (tells size and generation where they are not known)
    -> plan_ranges(rest) -> each range straight into its slice of the buffer, pinned
    -> crc32c of the ranges, combined, against the object's; a part of an object as `get_range` says
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from aioflux._concurrency.fan_out import pair
from aioflux._http.memory import BytesBuffer
from aioflux._transfer.get_range import (
    Pin,
    ReplacedError,
    confirm,
    plan_ranges,
    read_first,
    read_first_twice,
    read_into,
    reads_twice,
    size_error,
)
from aioflux._transfer.get_small import (
    NOTHING,
    Begun,
    Fetched,
    fetch_small,
    first_range_bytes,
    small_bytes,
)
from aioflux._transfer.retry import Backoff
from aioflux._values.checksums import combine_crc32c, crc32c
from aioflux.errors import ChecksumError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aioflux._services.base import Body
    from aioflux._transfer.get_range import First
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = [
    "NoRoomError",
    "fetch",
    "fetch_into",
    "fetch_pinned",
    "fetch_range",
    "head",
    "plan_ranges",
    "replaced_error",
]

T = TypeVar("T")

MAX_READS = 3
"""Reads of an object whose bytes do not match its checksum before it is believed to be damaged."""
_OPENING_BYTES: Final = 2 * 1024 * 1024
"""Most that is read alone of an object that may be large: the other ranges wait until it tells what
to ask for. 16 MiB at 50 MB/s are a tenth of the time that eight connections need for 1 GiB."""


class NoRoomError(Exception):
    """An object turned out to be larger than what may be held now.

    Attributes:
        meta: What its first range told of it.
    """

    def __init__(self, meta: ObjectMeta) -> None:
        super().__init__(meta.uri)
        self.meta = meta


def _always(_: int) -> bool:
    return True


async def fetch(
    session: Session,
    key: str,
    meta: ObjectMeta | None = None,
    *,
    first_bytes: int = 0,
    may_hold: Callable[[int], bool] = _always,
    begun: Begun = NOTHING,
) -> Fetched:
    """Read a whole object and verify it.

    Args:
        session: Where.
        key: Name of the object.
        meta: What a listing said of it: the read is pinned to this generation, and one request less
            is needed.
        first_bytes: Most bytes of the first range where it is read by name; by default what
            `first_range_bytes` returns.
        may_hold: Asked whether all bytes of an object may be held whose first range is not all of
            it; only where it is read by name.
        begun: What has been done of it.

    Raises:
        ChecksumError: The bytes never matched the object's crc32c.
        NoRoomError: `may_hold` said no.
        PreconditionFailedError: The object was replaced each time while it was read.
    """
    first = begun.first
    if meta is not None:
        num_reads = begun.num_reads
        if 0 < meta.size <= small_bytes(session.options):
            found = await fetch_small(session, key, meta.size, meta, begun)
            if isinstance(found, Fetched):
                return found
            num_reads += 1
        return await _verified(
            session, key, lambda: _fetch_known(session, key, meta), num_reads=num_reads
        )
    estimate = session.limits.unknown_size
    is_small = estimate.is_known and estimate.num_bytes <= small_bytes(session.options)
    num_reads = begun.num_reads
    if begun.failure is not None or (first is None and is_small):
        end = first_bytes or first_range_bytes(estimate.num_bytes, session.options)
        found = await fetch_small(session, key, end, None, begun)
        if isinstance(found, Fetched):
            return found
        first = found
        num_reads += found is None
    reads = iter((first,))
    return await _verified(
        session,
        key,
        lambda: _fetch_unknown(session, key, first_bytes, may_hold, next(reads, None)),
        num_reads=num_reads,
    )


async def _verified(
    session: Session,
    key: str,
    read: Callable[[], Awaitable[tuple[T, int | None, int]]],
    *,
    num_reads: int = 0,
) -> T:
    """Read again what does not match its checksum, or was replaced while it was read.

    Args:
        session: Where.
        key: Name of the object.
        read: Returns the result, the expected crc32c or None, and the actual one.
        num_reads: Reads before that did not match; there is one more in any case.
    """
    backoff: Backoff | None = None
    num_left = MAX_READS - min(num_reads, MAX_READS - 1)
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
        num_left -= 1
        if not num_left:
            break
    uri = session.service.uri(key)
    raise ChecksumError(
        f"could not read {uri}: its bytes have crc32c {actual:#010x}, but the service says "
        f"{expected:#010x}, {MAX_READS} times in a row; the object is damaged, or "
        "something between here and the service changes bytes",
        uri=uri,
    )


def replaced_error(session: Session, key: str, num_tries: int) -> PreconditionFailedError:
    """Return the error of an object that was another at each of several tries."""
    uri = session.service.uri(key)
    return PreconditionFailedError(
        f"could not read {uri}: it was replaced while it was read, {num_tries} times in a row; "
        "list it, and read the generation that you mean",
        uri=uri,
    )


async def head(session: Session, key: str, generation: str = "") -> ObjectMeta:
    """Read the metadata of an object."""
    return await session.call(key, lambda _: session.service.head(key, generation=generation))


async def _head_of(session: Session, key: str, meta: ObjectMeta) -> ObjectMeta:
    """Read the metadata of a generation again, which must tell the same size."""
    found = await head(session, key, meta.generation)
    if found.size != meta.size:
        raise size_error(session, key, Pin(meta.generation, meta.size), found.size)
    return found


async def _fetch_known(
    session: Session, key: str, meta: ObjectMeta
) -> tuple[Fetched, int | None, int]:
    if meta.size == 0:
        found = await _head_of(session, key, meta)
        return Fetched(b"", found), found.crc32c, 0
    buffer = BytesBuffer(meta.size)
    _, expected, actual = await _fill_known(session, key, buffer.view, 0, meta)
    return Fetched(buffer.finish(), meta), expected, actual


async def _fetch_unknown(
    session: Session,
    key: str,
    first_bytes: int,
    may_hold: Callable[[int], bool],
    first: First | None,
) -> tuple[Fetched, int | None, int]:
    estimate = session.limits.unknown_size
    made: list[BytesBuffer] = []

    def allocate(size: int) -> memoryview:
        made.append(BytesBuffer(size))
        return made[-1].view

    if first is None:
        end = first_bytes or first_range_bytes(estimate.num_bytes, session.options)
        if not estimate.is_known or estimate.num_bytes > session.options.range_size_bytes:
            end = min(end, _OPENING_BYTES)
        first = await read_first(session, key, start=0, end=end, allocate=allocate)
        estimate.add(first.body.size)
    body = first.body
    if not body.size:
        if body.generation:
            return Fetched(b"", body.meta), body.crc32c, 0
        # An empty object answers a range as unsatisfiable, and without its metadata.
        found = await head(session, key)
        if found.size:
            raise ReplacedError
        return Fetched(b"", found), found.crc32c, 0
    begun = first.data.nbytes
    if begun == body.size and not _twice_whole(session, body.crc32c):
        # Of bytes, not of a view of them: half the cost at 100 KiB.
        data = made[-1].finish()
        actual = crc32c(data) if session.options.verify else 0
        return Fetched(data, body.meta), body.crc32c, actual
    if not may_hold(body.size):
        made.clear()
        first.drop()
        raise NoRoomError(body.meta())
    if begun < body.size:
        await _learn_checksum(session, key, body)
    buffer = BytesBuffer(body.size)
    buffer.view[:begun] = first.data
    made.clear()
    first.drop()
    actual = await _complete(session, key, buffer.view, 0, begun, body, is_whole=True)
    return Fetched(buffer.finish(), body.meta), body.crc32c, actual


def _twice_whole(session: Session, expected: int | None) -> bool:
    """Tell whether a whole object is read twice, for want of a checksum."""
    return expected is None and reads_twice(session)


def _asks_head(session: Session) -> bool:
    """Tell whether only `head` knows the checksum of what is read in ranges."""
    return session.options.verify and not session.service.capabilities.listed_checksums


async def _learn_checksum(session: Session, key: str, body: Body) -> None:
    """Ask for the checksum of an object whose first range came without it."""
    if body.crc32c is None and body.generation and _asks_head(session):
        try:
            body.crc32c = (await head(session, key, body.generation)).crc32c
        except NotFoundError as exc:
            raise ReplacedError from exc


async def _complete(
    session: Session,
    key: str,
    view: memoryview,
    start: int,
    begun: int,
    body: Body,
    *,
    is_whole: bool,
    is_sure: bool = False,
) -> int:
    """Read what is left after the first range, and return the crc32c of all of `view`.

    Args:
        session: Where.
        key: Name of the object.
        view: Takes the bytes; the first `begun` of them are there.
        start: Place of `view` in the object.
        begun: Bytes of the first range.
        body: The answer to the first range.
        is_whole: `view` is the whole object.
        is_sure: The first range was read twice already.
    """
    checksum = crc32c(view[:begun]) if session.options.verify else 0
    twice = reads_twice(session) and not (is_whole and body.crc32c is not None)
    left = view.nbytes - begun

    async def check() -> int:
        if not twice or is_sure or not begun:
            return checksum
        return await confirm(
            session,
            key,
            view[:begun],
            start=start,
            pin=Pin(body.generation, body.size),
            checksum=checksum,
        )

    async def read_rest() -> int:
        if not left:
            return 0
        return await read_into(
            session,
            key,
            view[begun:],
            start=start + begun,
            pin=Pin(body.generation, body.size),
            twice=twice,
        )

    try:
        checksum, rest = await pair(check(), read_rest())
    except NotFoundError as exc:
        raise ReplacedError from exc
    return combine_crc32c(checksum, rest, left)


async def fetch_into(
    session: Session, key: str, view: memoryview, *, start: int, meta: ObjectMeta | None
) -> int:
    """Fill `view` from byte `start` on, and return how many bytes there were.

    A read of the whole object is verified by its crc32c, of a part as `verify_ranges` says.

    Raises:
        ChecksumError: The bytes never matched.
        PreconditionFailedError: The object was replaced each time while it was read.
    """
    if not view.nbytes:
        return 0
    if meta is not None:
        return await _verified(session, key, lambda: _fill_known(session, key, view, start, meta))
    return await _verified(session, key, lambda: _fill_unknown(session, key, view, start))


async def _fill_known(
    session: Session, key: str, view: memoryview, start: int, meta: ObjectMeta
) -> tuple[int, int | None, int]:
    length = max(0, min(view.nbytes, meta.size - start))
    if not length:
        # Nothing to read, but it must be there in this generation, as for any other range.
        await _head_of(session, key, meta)
        return 0, None, 0
    expected = meta.crc32c if length == meta.size else None

    async def read() -> int:
        return await read_into(
            session,
            key,
            view[:length],
            start=start,
            pin=Pin(meta.generation, meta.size),
            twice=_twice_whole(session, expected),
        )

    if length < meta.size or expected is not None or not _asks_head(session):
        return length, expected, await read()
    if reads_twice(session):
        # A checksum saves the second read.
        expected = (await _head_of(session, key, meta)).crc32c
        return length, expected, await read()
    told, actual = await pair(_head_of(session, key, meta), read())
    return length, told.crc32c, actual


async def _fill_unknown(
    session: Session, key: str, view: memoryview, start: int
) -> tuple[int, int | None, int]:
    largest = session.options.range_size_bytes
    end = start + (view.nbytes if view.nbytes <= largest else min(largest, _OPENING_BYTES))
    # From the first byte on it is often all of the object, which its crc32c verifies.
    first = await _read_start(session, key, start, end, lambda size: view[:size], at_once=start > 0)
    body, begun = first.body, first.data.nbytes
    length = max(0, min(view.nbytes, body.size - start))
    if not length:
        return 0, None, 0
    is_whole = length == body.size
    if is_whole and begun < length:
        await _learn_checksum(session, key, body)
    actual = await _complete(
        session,
        key,
        view[:length],
        start,
        begun,
        body,
        is_whole=is_whole,
        is_sure=start > 0,
    )
    return length, body.crc32c if is_whole else None, actual


async def _read_start(
    session: Session,
    key: str,
    start: int,
    end: int,
    allocate: Callable[[int], memoryview],
    *,
    at_once: bool,
) -> First:
    """Read the first range; `at_once`, the second copy that it may need is read with it."""
    read = read_first_twice if at_once and reads_twice(session) else read_first
    return await read(session, key, start=start, end=end, allocate=allocate)


async def fetch_range(
    session: Session, key: str, *, start: int, end: int, meta: ObjectMeta | None
) -> bytes:
    """Read the bytes `[start, end)`, in parallel ranges of one generation.

    Raises:
        ChecksumError: The bytes never matched; see `fetch_into`.
        PreconditionFailedError: The object was replaced each time while it was read.
    """
    if meta is not None:
        return await _verified(session, key, lambda: _range_known(session, key, start, end, meta))
    if end - start <= session.options.range_size_bytes:
        return await _verified(session, key, lambda: _range_unknown(session, key, start, end))
    return await _verified(session, key, lambda: _range_byhead(session, key, start, end))


async def _range_known(
    session: Session, key: str, start: int, end: int, meta: ObjectMeta
) -> tuple[bytes, int | None, int]:
    buffer = BytesBuffer(max(0, min(end, meta.size) - start))
    _, expected, actual = await _fill_known(session, key, buffer.view, start, meta)
    return buffer.finish(), expected, actual


async def fetch_pinned(session: Session, key: str, read: Callable[[ObjectMeta], Awaitable[T]]) -> T:
    """Read an object by the metadata that it has now; again if it is replaced before that is done.

    Args:
        session: Where.
        key: Name of the object.
        read: Reads the generation of the metadata, and verifies what it reads.

    Raises:
        NotFoundError: No object has this key.
        PreconditionFailedError: The object was replaced each time while it was read.
    """

    async def attempt() -> tuple[T, int | None, int]:
        meta = await head(session, key)
        try:
            return await read(meta), None, 0
        except NotFoundError as exc:
            raise ReplacedError from exc

    return await _verified(session, key, attempt)


async def _range_byhead(
    session: Session, key: str, start: int, end: int
) -> tuple[bytes, int | None, int]:
    meta = await head(session, key)
    try:
        return await _range_known(session, key, start, end, meta)
    except NotFoundError as exc:
        raise ReplacedError from exc


async def _range_unknown(
    session: Session, key: str, start: int, end: int
) -> tuple[bytes, int | None, int]:
    made = [BytesBuffer(0)]

    def allocate(size: int) -> memoryview:
        made.append(BytesBuffer(size))
        return made[-1].view

    first = await _read_start(session, key, start, end, allocate, at_once=True)
    is_whole = first.data.nbytes == first.body.size
    data = made[-1].finish()
    actual = crc32c(data) if session.options.verify else 0
    return data, first.body.crc32c if is_whole else None, actual

"""Reads of one range: resumed if the response breaks off, read twice if no checksum covers it.

Services return checksums of whole objects only. So with `TransferOptions.verify_ranges`, a range is
read twice at the same time; if the two copies differ, a third read decides. The second copy begins
one byte before the range and the third two bytes (if the object has these), so that a fault at a
fixed offset of the response changes different bytes.

`read_first` is over 60 lines because its attempts share memory, generation and progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from aioflux._concurrency.fan_out import gather, pair
from aioflux._http import HashedMemory
from aioflux._http.memory import new_buffer
from aioflux._services.base import ReadRequest
from aioflux._transfer.range_plan import plan_ranges
from aioflux._values.checksums import combine_crc32c, crc32c
from aioflux.errors import ChecksumError, NotFoundError, StorageError, TransientError

if TYPE_CHECKING:
    from aioflux._services.base import Body
    from aioflux._transfer.session import Session


class Pin(NamedTuple):
    """The generation of an object to which a read is pinned."""

    generation: str
    """Generation; empty if the service has no generations."""
    size: int
    """Size of the object in bytes, from a listing or an earlier response."""
    crc32c: int | None = None
    """CRC32C of the object, compared if it has no generation; None if unknown."""


class ReplacedError(Exception):
    """The object was replaced during a read of its current generation; the read is repeated."""


def reads_twice(session: Session) -> bool:
    """Return whether bytes that no checksum covers are read twice."""
    return session.options.verify and session.options.verify_ranges


async def read_range(session: Session, key: str, view: memoryview, *, start: int, pin: Pin) -> None:
    """Fill `view` with the bytes of one generation of an object from `start` on.

    If the body breaks off, the next attempt requests only the missing bytes. If the service has no
    generations, to which the missing bytes could be pinned, the whole range is read again.

    Raises:
        TransientError: Attempts or time ran out.
    """
    await _fill(session, key, start, view.nbytes, pin, lambda: view, is_hashed=False)


async def _fill(
    session: Session,
    key: str,
    start: int,
    length: int,
    pin: Pin,
    memory: Callable[[], memoryview],
    *,
    is_hashed: bool,
) -> HashedMemory | None:
    """Read `length` bytes into `memory()`.

    Each attempt calls `memory` after the byte budget has admitted the bytes.

    Returns:
        The memory with the crc32c of all bytes, if `is_hashed`; None after a resumed read, whose
        attempts received only parts of the bytes.
    """
    num_done = 0
    hashed: HashedMemory | None = None
    sizes: set[int] = set()

    async def attempt(_: int) -> Body:
        nonlocal num_done, hashed
        target = memory()[num_done:]
        hashed = HashedMemory(target) if is_hashed and not num_done else None
        try:
            async with session.prefaulter.during(target):
                request = ReadRequest(key, pin.generation, start + num_done, start + length)
                into = hashed or target
                body = await session.spread.run(
                    target.nbytes, lambda service: service.get(request, into=into)
                )
            if body.size != pin.size:
                is_certain = body.size in sizes
                sizes.add(body.size)
                raise size_error(session, key, pin, body.size, is_certain=is_certain)
            if not pin.generation and len({pin.crc32c, body.crc32c} - {None}) > 1:
                uri = session.service.uri(key)
                message = f"could not read {uri}: its crc32c is not that of its metadata; it was"
                raise ChecksumError(f"{message} replaced, or damaged by a copy", uri=uri)
            _require_bytes(session, key, len(body.data), length - num_done, pin.generation)
        except TransientError as exc:
            if pin.generation and exc.generation:
                # Request the last byte again in any case, because a range must not be empty.
                num_done = min(num_done + exc.num_bytes_received, length - 1)
            raise
        return body

    await session.call(key, attempt, num_bytes=length)
    return hashed


@dataclass(slots=True)
class FirstRange:
    """The first range of an object whose size was not known."""

    data: memoryview
    """Bytes of the range; of the whole object, if the object is not larger."""
    body: Body
    """Response, with size and metadata of the object. After a resumed read, `body.data` has only
    the bytes of the last attempt."""
    hashed: HashedMemory | None = None
    """Destination of all bytes of the range, unless the read was resumed."""

    def crc32c(self) -> int:
        """Return the crc32c of the range."""
        return crc32c(self.data) if self.hashed is None else self.hashed.crc32c(self.data)

    def drop(self) -> None:
        """Free the bytes, even if other code still references this `FirstRange`."""
        self.data, self.body.data, self.hashed = memoryview(b""), b"", None


async def read_first(
    session: Session,
    key: str,
    *,
    start: int,
    end: int,
    allocate: Callable[[int], memoryview],
) -> FirstRange:
    """Read `[start, end)` of the current generation of an object.

    If the body breaks off, the next attempt requests the missing bytes, of the generation in the
    headers of the first response.

    Args:
        session: The session.
        key: Name of the object.
        start: First byte.
        end: One past the last byte; beyond the end of the object it means the end.
        allocate: Returns memory of the given size; called again if all bytes are read again.

    Raises:
        ReplacedError: The object was replaced before the missing bytes were read.
        TransientError: Attempts or time ran out.
    """
    memory = memoryview(b"")
    generation = ""
    num_done = 0
    hashed: HashedMemory | None = None

    def place(size: int) -> memoryview:
        nonlocal memory
        memory = allocate(size)
        return memory

    async def attempt(_: int) -> Body:
        nonlocal num_done, generation, hashed
        num_kept, num_done = num_done, 0
        hashed = HashedMemory(place) if session.options.verify and not num_kept else None
        try:
            if not num_kept:
                generation = ""
                request = ReadRequest(key, "", start, end)
                body = await session.service.get(request, into=hashed or place)
                expected = max(0, min(end, body.size) - start)
                _require_bytes(session, key, len(body.data), expected, "")
                return body
            rest = ReadRequest(key, generation, start + num_kept, start + memory.nbytes)
            body = await session.service.get(rest, into=memory[num_kept:])
            _require_bytes(session, key, len(body.data), memory.nbytes - num_kept, generation)
        except TransientError as exc:
            generation = generation or exc.generation
            if generation and memory.nbytes:
                num_new = exc.num_bytes_received if exc.generation else 0
                num_done = min(num_kept + num_new, memory.nbytes - 1)
            raise
        except NotFoundError as exc:
            if num_kept:
                raise ReplacedError from exc
            raise
        return body

    body = await session.call(key, attempt, num_bytes=end - start)
    return FirstRange(memory, body, hashed)


async def read_first_twice(
    session: Session, key: str, *, start: int, end: int, allocate: Callable[[int], memoryview]
) -> FirstRange:
    """Read `[start, end)` of the current generation of an object; twice, if `reads_twice`.

    Both reads are sent at the same time.

    Raises:
        ChecksumError: Three reads returned three different contents.
        ReplacedError: The two reads returned different generations or object sizes.
    """
    lead = _lead(start)

    async def read_copy() -> tuple[Body, int]:
        second = await read_first(
            session,
            key,
            start=start - lead,
            end=end,
            allocate=lambda size: memoryview(new_buffer(size)),
        )
        return second.body, _skip_lead(second.crc32c(), second.data, lead)

    reading = read_first(session, key, start=start, end=end, allocate=allocate)
    if not reads_twice(session):
        return await reading
    first, (copy_body, copy_checksum) = await pair(reading, read_copy())
    body = first.body
    # A response to a range beyond the end may have no generation.
    is_same = body.generation == copy_body.generation or not first.data
    if body.size != copy_body.size or not is_same:
        raise ReplacedError
    checksum = first.crc32c()
    if checksum != copy_checksum:
        await _read_third_time(
            session,
            key,
            first.data,
            start,
            Pin(body.generation, body.size),
            {checksum, copy_checksum},
        )
    return first


async def read_checked(
    session: Session,
    key: str,
    view: memoryview,
    *,
    start: int,
    pin: Pin,
    twice: bool,
    is_hashed: bool = True,
) -> int:
    """Fill `view` as `read_range`, and return its crc32c.

    With `twice`, the range is read twice at the same time, and the two copies are compared.
    Otherwise 0 is returned if `is_hashed` is False or `TransferOptions.verify` is off.

    Raises:
        ChecksumError: Three reads returned three different contents.
    """
    is_hashed = session.options.verify and (is_hashed or twice)
    reading = _fill(session, key, start, view.nbytes, pin, lambda: view, is_hashed=is_hashed)
    if not twice:
        hashed = await reading
        return _crc32c(hashed, view) if is_hashed else 0
    reading_copy = read_checksum(session, key, start, view.nbytes, pin)
    hashed, second = await pair(reading, reading_copy)
    first = _crc32c(hashed, view)
    if first == second:
        return first
    return await _read_third_time(session, key, view, start, pin, {first, second})


def _crc32c(hashed: HashedMemory | None, view: memoryview) -> int:
    """Return the crc32c of a range in `view`, from the result of `_fill`."""
    return crc32c(view) if hashed is None else hashed.crc32c(view)


async def confirm(
    session: Session, key: str, view: memoryview, *, start: int, pin: Pin, checksum: int
) -> int:
    """Read the range in `view` a second time to confirm its bytes, and return their crc32c.

    `checksum` is the crc32c of the first read. If the first read was wrong, `view` is filled with
    the right bytes.

    Raises:
        ChecksumError: Three reads returned three different contents.
    """
    second = await read_checksum(session, key, start, view.nbytes, pin)
    if second == checksum:
        return checksum
    return await _read_third_time(session, key, view, start, pin, {checksum, second})


async def read_checksum(session: Session, key: str, start: int, length: int, pin: Pin) -> int:
    """Read a second copy of a range, and return the crc32c of the range."""
    lead = _lead(start)
    copies: list[memoryview] = []

    def memory() -> memoryview:
        if not copies:
            copies.append(memoryview(new_buffer(lead + length)))
        return copies[0]

    hashed = await _fill(session, key, start - lead, lead + length, pin, memory, is_hashed=True)
    return _skip_lead(_crc32c(hashed, copies[0]), copies[0], lead)


def _lead(start: int) -> int:
    """Return the number of bytes that a second copy of a range has before the range."""
    return min(start, 1)


def _skip_lead(checksum: int, copy: memoryview, lead: int) -> int:
    """Return the crc32c of `copy[lead:]`, from the crc32c of all of it."""
    if copy.nbytes <= lead:  # a range beyond the end of the object
        return 0
    # `combine_crc32c` is an exclusive or with the shifted crc32c of the lead: its own inverse.
    return combine_crc32c(crc32c(copy[:lead]), checksum, copy.nbytes - lead)


async def _read_third_time(
    session: Session, key: str, view: memoryview, start: int, pin: Pin, seen: set[int]
) -> int:
    """Read a range a third time; return its crc32c, which must be one of the two in `seen`."""
    session.count_mismatch(key, f"two reads of the bytes from {start} on differ")
    lead = min(start, 2)  # another offset than in the first two responses
    copy = memoryview(new_buffer(lead + view.nbytes))
    await read_range(session, key, copy, start=start - lead, pin=pin)
    view[:] = copy[lead:]
    checksum = crc32c(view)
    if checksum in seen:
        return checksum
    session.count_mismatch(key, "three reads differ")
    uri = session.service.uri(key)
    raise ChecksumError(
        f"could not read bytes [{start}, {start + view.nbytes}) of {uri}: three reads returned "
        "three different contents; the network, or a proxy in between, changes bytes",
        uri=uri,
    )


async def read_into(
    session: Session,
    key: str,
    view: memoryview,
    *,
    start: int,
    pin: Pin,
    twice: bool = False,
    is_hashed: bool = True,
) -> int:
    """Fill `view` in parallel ranges of one generation, and return its crc32c.

    See `read_checked` for `twice` and `is_hashed`, and for the cases that return 0.
    """
    size = session.options.range_size_bytes
    plan = plan_ranges(start, start + view.nbytes, size)
    checksums = await gather(
        read_checked(
            session,
            key,
            view[begin - start : end - start],
            start=begin,
            pin=pin,
            twice=twice,
            is_hashed=is_hashed,
        )
        for begin, end in plan
    )
    combined = 0
    for (begin, end), checksum in zip(plan, checksums, strict=True):
        combined = combine_crc32c(combined, checksum, end - begin)
    return combined


def size_error(
    session: Session, key: str, pin: Pin, size: int, *, is_certain: bool = True
) -> StorageError:
    """Return the error of a response whose object size differs from that of `pin`.

    Without `is_certain`, the response may be damaged, and the error is a TransientError, which is
    retried. The size is certain if two responses, or the metadata, had it.
    """
    uri = session.service.uri(key)
    text = (
        f"could not read {uri}: it has {pin.size} bytes in its metadata, but {size} in the response"
    )
    if not is_certain:
        return TransientError(text, uri=uri)
    if not pin.generation:
        return NotFoundError(f"{text}; it was replaced, list it again", uri=uri)
    return ChecksumError(
        f"{text}; list it again, and if that does not help, the network, or a proxy in between, "
        "changes responses",
        uri=uri,
    )


def mismatch_text(actual: int, expected: int) -> str:
    """Return the text of a mismatch of checksums, for messages."""
    return f"its bytes have crc32c {actual:#010x}, but its metadata has {expected:#010x}"


def _require_bytes(
    session: Session, key: str, received: int, expected: int, generation: str
) -> None:
    if received != expected:
        uri = session.service.uri(key)
        raise TransientError(
            f"could not read {uri}: received {received} of {expected} bytes",
            uri=uri,
            num_bytes_received=received,
            generation=generation,
        )

"""Reads of one range: resumed when its body breaks off, read twice when it has no checksum.

A service returns the checksum of a whole object only. A range over plain http is read twice at the
same time (`TransferOptions.verify_ranges`); if the two differ, a third read decides. The second
copy begins a byte earlier unless the range begins the object: a fault at a fixed offset of a
response does not change the same byte of both.

`read_first` is over 60 lines because its attempts share memory, generation and progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from aioflux._concurrency.fan_out import gather, pair
from aioflux._http.memory import new_buffer
from aioflux._services.base import ReadRequest
from aioflux._transfer.range_plan import plan_ranges
from aioflux._values.checksums import combine_crc32c, crc32c
from aioflux.errors import ChecksumError, NotFoundError, StorageError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux._services.base import Body
    from aioflux._transfer.session import Session

__all__ = [
    "First",
    "Pin",
    "ReplacedError",
    "confirm",
    "read_checksum",
    "read_first",
    "read_first_twice",
    "read_into",
    "read_range",
    "read_sure",
    "reads_twice",
    "size_error",
]


class Pin(NamedTuple):
    """The one content of an object that is read."""

    generation: str
    """Its generation; empty if a service has none."""
    size: int
    """Its size in bytes, from a listing or an earlier response."""


class ReplacedError(Exception):
    """The object was replaced during a read by name, which begins anew."""


def reads_twice(session: Session) -> bool:
    """Return whether bytes that no checksum covers are read twice."""
    options = session.options
    if not options.verify or options.verify_ranges == "never":
        return False
    return options.verify_ranges == "always" or not session.service.capabilities.guarded_transport


async def read_range(session: Session, key: str, view: memoryview, *, start: int, pin: Pin) -> None:
    """Fill `view` with the bytes of one generation of an object from `start` on.

    A body that breaks off is resumed at the byte where it stopped; if a service has no generations
    to pin the rest to, it is read again from its beginning.

    Raises:
        TransientError: Attempts or time ran out.
    """
    await _fill(session, key, start, view.nbytes, pin, lambda: view)


async def _fill(
    session: Session,
    key: str,
    start: int,
    length: int,
    pin: Pin,
    memory: Callable[[], memoryview],
) -> None:
    """Read `length` bytes into `memory()`, called when they are within the byte budget."""
    num_done = 0
    sizes: set[int] = set()

    async def attempt(_: int) -> Body:
        nonlocal num_done
        target = memory()[num_done:]
        try:
            async with session.prefaulter.during(target):
                request = ReadRequest(key, pin.generation, start + num_done, start + length)
                body = await session.service.get(request, into=target)
            if body.size != pin.size:
                is_certain = body.size in sizes
                sizes.add(body.size)
                raise size_error(session, key, pin, body.size, is_certain=is_certain)
            _require_bytes(session, key, len(body.data), length - num_done, pin.generation)
        except TransientError as exc:
            if pin.generation:
                # The last byte is always requested again, so that a range is never empty.
                num_done = min(num_done + exc.num_bytes_received, length - 1)
            raise
        return body

    await session.call(key, attempt, num_bytes=length)


@dataclass(slots=True)
class First:
    """The first range of an object whose size is not known yet."""

    data: memoryview
    """Its bytes; all of the object if it ends within the range."""
    body: Body
    """The response, with size and metadata of the object; its `data` may be the end alone."""

    def drop(self) -> None:
        """Free the bytes, even if other code still references this object."""
        self.data, self.body.data = memoryview(b""), b""


async def read_first(
    session: Session,
    key: str,
    *,
    start: int,
    end: int,
    allocate: Callable[[int], memoryview],
) -> First:
    """Read `[start, end)` of the current generation of an object.

    A body that breaks off is resumed at the byte where it stopped, in the generation that its
    headers named.

    Args:
        session: The session.
        key: Name of the object.
        start: First byte.
        end: One past the last byte; beyond the end of the object it means the end.
        allocate: Returns memory of the given size; called again when a read begins anew.

    Raises:
        ReplacedError: The object was replaced between the two pieces of a broken body.
        TransientError: Attempts or time ran out.
    """
    memory = memoryview(b"")
    generation = ""
    done = 0

    def place(size: int) -> memoryview:
        nonlocal memory
        memory = allocate(size)
        return memory

    async def attempt(_: int) -> Body:
        nonlocal done, generation
        begun, done = done, 0
        try:
            if not begun:
                generation = ""
                body = await session.service.get(ReadRequest(key, "", start, end), into=place)
                expected = max(0, min(end, body.size) - start)
                _require_bytes(session, key, len(body.data), expected, "")
                return body
            rest = ReadRequest(key, generation, start + begun, start + memory.nbytes)
            body = await session.service.get(rest, into=memory[begun:])
            _require_bytes(session, key, len(body.data), memory.nbytes - begun, generation)
        except TransientError as exc:
            generation = generation or exc.generation
            if generation and memory.nbytes:
                done = min(begun + exc.num_bytes_received, memory.nbytes - 1)
            raise
        except NotFoundError as exc:
            if begun:
                raise ReplacedError from exc
            raise
        return body

    body = await session.call(key, attempt, num_bytes=end - start)
    return First(memory, body)


async def read_first_twice(
    session: Session, key: str, *, start: int, end: int, allocate: Callable[[int], memoryview]
) -> First:
    """Read `[start, end)` of the current generation of an object; twice, if `reads_twice`.

    Both reads are sent at the same time.

    Raises:
        ChecksumError: Three reads gave three different contents.
        ReplacedError: The object was replaced between the two.
    """
    lead = _lead(start)

    async def again() -> tuple[Body, int]:
        second = await read_first(
            session,
            key,
            start=start - lead,
            end=end,
            allocate=lambda size: memoryview(new_buffer(size)),
        )
        return second.body, crc32c(second.data[lead:])

    async def once() -> First:
        return await read_first(session, key, start=start, end=end, allocate=allocate)

    if not reads_twice(session):
        return await once()
    first, (other, second_checksum) = await pair(once(), again())
    body = first.body
    # A response to a range beyond the end may have no generation.
    is_same = body.generation == other.generation or not first.data
    if body.size != other.size or not is_same:
        raise ReplacedError
    checksum = crc32c(first.data)
    if checksum != second_checksum:
        await _settle(
            session,
            key,
            first.data,
            start,
            Pin(body.generation, body.size),
            {checksum, second_checksum},
        )
    return first


async def read_sure(
    session: Session, key: str, view: memoryview, *, start: int, pin: Pin, twice: bool
) -> int:
    """Fill `view` as `read_range`, and return its crc32c; 0 if nothing is verified.

    With `twice` it is read twice at the same time, and compared.

    Raises:
        ChecksumError: Three reads gave three different contents.
    """
    reading = read_range(session, key, view, start=start, pin=pin)
    if not twice:
        await reading
        return crc32c(view) if session.options.verify else 0
    again = read_checksum(session, key, start, view.nbytes, pin)
    _, second = await pair(reading, again)
    first = crc32c(view)
    if first == second:
        return first
    return await _settle(session, key, view, start, pin, {first, second})


async def confirm(
    session: Session, key: str, view: memoryview, *, start: int, pin: Pin, checksum: int
) -> int:
    """Read the bytes of `view`, which have this crc32c, a second time; return the right crc32c.

    If they were wrong, they are replaced.

    Raises:
        ChecksumError: Three reads gave three different contents.
    """
    second = await read_checksum(session, key, start, view.nbytes, pin)
    if second == checksum:
        return checksum
    return await _settle(session, key, view, start, pin, {checksum, second})


async def read_checksum(session: Session, key: str, start: int, length: int, pin: Pin) -> int:
    """Return the crc32c of a range, read as a second copy."""
    lead = _lead(start)
    copies: list[memoryview] = []

    def memory() -> memoryview:
        if not copies:
            copies.append(memoryview(new_buffer(lead + length)))
        return copies[0]

    await _fill(session, key, start - lead, lead + length, pin, memory)
    return crc32c(copies[0][lead:])


def _lead(start: int) -> int:
    """Return how many bytes before a range its second copy begins."""
    return min(start, 1)


async def _settle(
    session: Session, key: str, view: memoryview, start: int, pin: Pin, seen: set[int]
) -> int:
    """Read a third time what differed twice: the content that came two times is right."""
    await read_range(session, key, view, start=start, pin=pin)
    checksum = crc32c(view)
    if checksum in seen:
        return checksum
    uri = session.service.uri(key)
    raise ChecksumError(
        f"could not read bytes [{start}, {start + view.nbytes}) of {uri}: three reads gave three "
        "different contents; the network, or a proxy in between, changes bytes",
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
) -> int:
    """Fill `view` in parallel ranges of one generation, each as `read_sure`; return its crc32c."""
    size = session.options.range_size_bytes
    plan = plan_ranges(start, start + view.nbytes, size)
    checksums = await gather(
        read_sure(
            session, key, view[begin - start : end - start], start=begin, pin=pin, twice=twice
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
    """Return the error of a response with another size than that of `pin`.

    Unless another response had the same size it may be damaged, and the error causes a retry.
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


def _require_bytes(
    session: Session, key: str, received: int, expected: int, generation: str
) -> None:
    if received != expected:
        uri = session.service.uri(key)
        raise TransientError(
            f"could not read {uri}: {received} of {expected} bytes came",
            uri=uri,
            num_bytes_received=received if generation else 0,
            generation=generation,
        )

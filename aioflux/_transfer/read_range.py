"""Reads of one range, which continue at the missing bytes if a response breaks off.

`read_range` and `read_first` are over 60 lines because their attempts share memory and progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from aioflux._concurrency.fan_out import gather
from aioflux._http import HashedMemory
from aioflux._services.base import ReadRequest
from aioflux._transfer.prefault import LEAST_THREADED_BYTES
from aioflux._transfer.read_plan import plan_ranges
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


async def read_range(
    session: Session,
    key: str,
    view: memoryview,
    *,
    start: int,
    pin: Pin,
    is_covered: bool = False,
    is_hashed: bool = False,
) -> int:
    """Fill `view` with the bytes of one generation of an object from `start` on.

    If the body breaks off, the next attempt requests only the missing bytes. If the service has no
    generations, to which the missing bytes could be pinned, the whole range is read again.

    Args:
        session: The session.
        key: Name of the object.
        view: Memory for the bytes.
        start: First byte.
        pin: The generation.
        is_covered: A checksum will be compared with bytes that include these.
        is_hashed: Compute the crc32c of the bytes.

    Returns:
        The crc32c of the bytes; 0 without `is_hashed`.

    Raises:
        TransientError: Attempts or time ran out.
    """
    num_done, length = 0, view.nbytes
    hashed: HashedMemory | None = None
    sizes: set[int] = set()

    async def attempt() -> Body:
        nonlocal num_done, hashed
        target = view[num_done:]
        hashed = HashedMemory(target) if is_hashed and not num_done else None
        try:
            begin, end = start + num_done, start + length
            request = ReadRequest(key, pin.generation, begin, end, pin.size, is_covered)
            into = hashed or target
            if target.nbytes < LEAST_THREADED_BYTES:
                body = await session.service.get(request, into=into)
            else:
                async with session.prefaulter.during(target):
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
    if not is_hashed:
        return 0
    return crc32c(view) if hashed is None else hashed.crc32c(view)


async def read_first(
    session: Session,
    key: str,
    *,
    start: int,
    end: int,
    allocate: Callable[[int], memoryview],
    is_covered: bool = False,
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
        is_covered: As for `read_range`, if the response has the crc32c of the object.

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

    async def attempt() -> Body:
        nonlocal num_done, generation, hashed
        num_kept, num_done = num_done, 0
        hashed = HashedMemory(place) if session.options.verify and not num_kept else None
        try:
            if not num_kept:
                generation = ""
                request = ReadRequest(key, "", start, end, None, is_covered)
                body = await session.service.get(request, into=hashed or place)
                expected = max(0, min(end, body.size) - start)
                _require_bytes(session, key, len(body.data), expected, "")
                return body
            begin, stop = start + num_kept, start + memory.nbytes
            rest = ReadRequest(key, generation, begin, stop, None, is_covered)
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


async def read_into(
    session: Session,
    key: str,
    view: memoryview,
    *,
    start: int,
    pin: Pin,
    is_covered: bool = False,
    is_hashed: bool = True,
) -> int:
    """Fill `view` in parallel ranges of one generation, and return its crc32c.

    Arguments as for `read_range`. 0 is returned without `is_hashed`, or if `TransferOptions.verify`
    is off.
    """
    size = session.options.range_size_bytes
    plan = plan_ranges(start, start + view.nbytes, size)
    checksums = await gather(
        read_range(
            session,
            key,
            view[begin - start : end - start],
            start=begin,
            pin=pin,
            is_covered=is_covered,
            is_hashed=is_hashed and session.options.verify,
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

"""Ranges, parts, memory, prefixes and TLS context for the peers. Imports no peer."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from functools import partial
from typing import TYPE_CHECKING

from perf._meter import steady

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from typing_extensions import Buffer

    from perf.work import Work

__all__ = [
    "MIN_PART_BYTES",
    "each_range",
    "fill",
    "memory_of",
    "new_run",
    "one_by_one",
    "part_size_bytes",
    "put_into",
    "ranges",
    "ssl_context",
]

MIN_PART_BYTES = 5 << 20
"""Minimum size of a part of a multipart upload, except the last part."""


def ranges(work: Work) -> list[tuple[int, int]]:
    """Return the half-open ranges of one object, each of `range_size_bytes`."""
    step = work.range_size_bytes
    return [
        (start, min(start + step, work.size_bytes)) for start in range(0, work.size_bytes, step)
    ]


async def _read_ranges(read: Callable[[int, int], Awaitable[int]], work: Work) -> int:
    """Read the ranges of an object, `in_flight` at the same time, and return their bytes."""
    todo = iter(ranges(work))

    async def worker() -> int:
        return sum([await read(start, end) for start, end in todo])

    return sum(await asyncio.gather(*(worker() for _ in range(work.in_flight))))


async def each_range(read: Callable[[str, int, int], Awaitable[int]], work: Work) -> int:
    """Read each object in ranges, `in_flight` at the same time; return the bytes of all objects.

    Args:
        read: Reads the bytes `[start, end)` of a key, and returns the number of bytes read.
        work: The work.
    """
    return await one_by_one(lambda key, work: _read_ranges(partial(read, key), work), work)


async def one_by_one(one: Callable[[str, Work], Awaitable[int]], work: Work) -> int:
    """Move one object after the other, and return the bytes of all objects.

    Args:
        one: Moves an object; its arguments are the key, and the work of this or the measured part.
        work: The work.
    """

    async def move(work: Work) -> int:
        return sum([await one(key, work) for key in work.each_key()])

    return await steady(move, work)


def new_run() -> str:
    """Return a new prefix for checkpoints: to replace an old one would take more requests."""
    return f"steps/{uuid.uuid4().hex}"


def part_size_bytes(work: Work) -> int:
    """Return the size of the parts of an upload: the size of ranges, at least `MIN_PART_BYTES`."""
    return max(MIN_PART_BYTES, work.range_size_bytes)


def ssl_context(work: Work) -> ssl.SSLContext | None:
    """Return a context that trusts only the server's authority; None without TLS."""
    return ssl.create_default_context(cafile=work.ca_file) if work.ca_file else None


def memory_of(work: Work, *, again: bool) -> Iterator[memoryview]:
    """Yield memory for each object: the same memory for all (`again`), or new memory for each."""
    view = memoryview(bytearray(work.size_bytes))
    while True:
        yield view
        if not again:
            view = memoryview(bytearray(work.size_bytes))


async def fill(
    read: Callable[[str, int, int, memoryview], Awaitable[int]], work: Work, *, again: bool
) -> int:
    """Read each object into memory, in ranges, `in_flight` at the same time.

    Args:
        read: Reads the bytes `[start, end)` of a key into memory of this length, and returns the
            number of bytes read.
        work: The work.
        again: Use the same memory for all objects; otherwise allocate new memory for each.

    Returns:
        The bytes of all objects.
    """

    async def move(work: Work) -> int:
        total = 0
        for key, view in zip(work.each_key(), memory_of(work, again=again), strict=False):

            async def read_into(
                start: int, end: int, key: str = key, view: memoryview = view
            ) -> int:
                return await read(key, start, end, view[start:end])

            total += await _read_ranges(read_into, work)
        return total

    return await steady(move, work)


def put_into(view: memoryview, data: Buffer) -> int:
    """Copy a body into memory of the same length, and return the length.

    Raises:
        ValueError: The lengths differ.
    """
    view[:] = data
    return view.nbytes

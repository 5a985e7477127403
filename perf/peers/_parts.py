"""What adapters share: the ranges of an object, and whom they trust. Imports no peer."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from typing_extensions import Buffer

    from perf.work import Work

__all__ = [
    "MIN_PART_BYTES",
    "fill",
    "memory_of",
    "part_size_bytes",
    "put_into",
    "ranges",
    "ssl_context",
]

MIN_PART_BYTES = 5 << 20
"""Least size of a part of a multipart upload, the last one aside."""


def ranges(work: Work) -> list[tuple[int, int]]:
    """Cut one object into half-open ranges of `range_size_bytes`."""
    step = work.range_size_bytes
    return [
        (start, min(start + step, work.size_bytes)) for start in range(0, work.size_bytes, step)
    ]


def part_size_bytes(work: Work) -> int:
    """Return the size of the parts of one upload: that of ranges, where services take it."""
    return max(MIN_PART_BYTES, work.range_size_bytes)


def ssl_context(work: Work) -> ssl.SSLContext | None:
    """Return a context that trusts the server's authority alone; None without TLS."""
    return ssl.create_default_context(cafile=work.ca_file) if work.ca_file else None


def memory_of(work: Work, *, again: bool) -> Iterator[memoryview]:
    """Yield memory for each object: the same again and again, or new for each."""
    view = memoryview(bytearray(work.size_bytes))
    while True:
        yield view
        if not again:
            view = memoryview(bytearray(work.size_bytes))


async def fill(
    read: Callable[[str, int, int, memoryview], Awaitable[int]], work: Work, *, again: bool
) -> int:
    """Read each object into memory, in ranges, `in_flight` under way at once.

    Args:
        read: Reads the bytes `[start, end)` of a key into memory of that length, and returns how
            many came.
        work: What to do.
        again: Into the same memory for every object; otherwise each gets its own.

    Returns:
        The bytes of all objects.
    """
    total = 0

    async def worker(key: str, todo: Iterator[tuple[int, int]], view: memoryview) -> int:
        return sum([await read(key, start, end, view[start:end]) for start, end in todo])

    for key, view in zip(work.each_key(), memory_of(work, again=again), strict=False):
        todo = iter(ranges(work))
        workers = (worker(key, todo, view) for _ in range(work.in_flight))
        total += sum(await asyncio.gather(*workers))
    return total


def put_into(view: memoryview, data: Buffer) -> int:
    """Copy a body into memory of its length, and return that.

    Raises:
        ValueError: It has another length.
    """
    view[:] = data
    return view.nbytes

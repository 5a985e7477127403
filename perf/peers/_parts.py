"""What adapters share: the ranges of an object, and whom they trust. Imports no peer."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from typing_extensions import Buffer

    from perf.work import Work

__all__ = ["MIN_PART_BYTES", "fill", "part_size_bytes", "pieces", "ranges", "ssl_context"]

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


def pieces(work: Work) -> list[memoryview]:
    """Cut the bytes of one object into pieces of a part's size; they are one memory."""
    size = part_size_bytes(work)
    block = memoryview(bytes(min(size, work.size_bytes)))
    whole, rest = divmod(work.size_bytes, size)
    return [block] * whole + ([block[:rest]] if rest else [])


def ssl_context(work: Work) -> ssl.SSLContext | None:
    """Return a context that trusts the server's authority alone; None without TLS."""
    return ssl.create_default_context(cafile=work.ca_file) if work.ca_file else None


async def fill(
    read: Callable[[str, int, int], Awaitable[Buffer]], work: Work, buffer: bytearray
) -> int:
    """Read each object into `buffer`, in ranges, `in_flight` under way at once.

    Args:
        read: Reads the bytes `[start, end)` of a key.
        work: What to do.
        buffer: Memory of one object; each object goes into it in its turn.

    Returns:
        The bytes of all objects.
    """
    with memoryview(buffer) as view:

        async def worker(key: str, todo: Iterator[tuple[int, int]]) -> int:
            done = 0
            for start, end in todo:
                # A body of another length does not fit, which raises.
                view[start:end] = await read(key, start, end)
                done += end - start
            return done

        total = 0
        for key in work.each_key():
            todo = iter(ranges(work))
            workers = (worker(key, todo) for _ in range(work.in_flight))
            total += sum(await asyncio.gather(*workers))
        return total

"""The bytes of a data object, as they were staged or compressed on the way."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from aioflux.checkpoint._format.codec import Codec
from aioflux.checkpoint._format.commit import StoredItem

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aioflux.checkpoint._save.job import Compression, Job

__all__ = ["compressed_pieces", "staged_pieces"]

_ALIGNMENT_BYTES: Final = 64

_MIN_COMPRESSED_BYTES: Final = 16 * 1024
"""Smaller tensors are stored as they are: a frame takes 0.4 ms, as 150 KiB of a large one do."""


def staged_pieces(job: Job, memory: memoryview) -> list[bytes | memoryview]:
    """Return what was staged: as it is stored already."""
    return [memory[: job.size], *job.tail]


async def compressed_pieces(
    job: Job, memory: memoryview, compression: Compression, stored: list[StoredItem]
) -> AsyncGenerator[bytes | bytearray | memoryview]:
    """Yield the bytes of the object with its tensors compressed.

    Args:
        job: The save.
        memory: What is in its arena.
        compression: How.
        stored: Takes where each item lies, as its bytes are yielded.
    """
    with Codec(
        level=compression.level,
        threads=compression.threads,
        byte_planes=compression.byte_planes,
    ) as codec:
        # Tied tensors are one item several times, of which the first is written.
        firsts = {item.offset: number for number, item in reversed([*enumerate(job.items)])}
        frames = [
            codec.encode_item(
                memory[item.offset : item.data_start],
                memory[item.data_start : item.data_start + item.data_size],
                memory[item.data_start + item.data_size : item.offset + item.length],
                element_size=element_size,
            )
            if item.data_size >= _MIN_COMPRESSED_BYTES and firsts[item.offset] == number
            else None
            for number, (item, element_size) in enumerate(
                zip(job.items, job.element_sizes, strict=True)
            )
        ]
        tail = iter(job.tail)
        at = 0
        made = codec.encode_items_on_loop(each for each in frames if each is not None)
        async with aclosing(made) as segments:
            for number, (item, each) in enumerate(zip(job.items, frames, strict=True)):
                if (first := firsts[item.offset]) != number:
                    stored.append(stored[first])
                    continue
                padding = bytes(-at % _ALIGNMENT_BYTES)
                yield padding
                at += len(padding)
                if each is None:
                    end = item.offset + item.length
                    yield next(tail) if item.offset >= job.size else memory[item.offset : end]
                    moved = at - item.offset if item.data_start else 0
                    placed = StoredItem(at, item.length, item.data_start + moved, item.data_size)
                else:
                    for _ in range(each.num_segments):
                        yield (await anext(segments))[1]
                    placed = each.stored(at)
                stored.append(placed)
                at += placed.length

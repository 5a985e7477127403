"""The bytes of a data object: items one behind the other, compressed on the way if asked.

Needs no torch: the process that uploads does without it.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aioflux.checkpoint._format.codec import Codec
from aioflux.checkpoint._format.commit import StoredItem

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from aioflux.checkpoint._save.job import Compression, StagedState

__all__ = ["ALIGNMENT_BYTES", "EncodedItem", "Packer", "compressed_pieces", "staged_pieces"]

ALIGNMENT_BYTES: Final = 64
"""Items, and the bytes of a tensor in its item, begin at a multiple of this."""

_MIN_COMPRESSED_BYTES: Final = 16 * 1024
"""Smaller tensors are stored as they are: a frame takes 0.4 ms, as 150 KiB of a large one do."""


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """The bytes that torch.save writes of one tensor or value, in pieces."""

    segments: tuple[bytes | memoryview, ...]
    """The pieces in order; of a tensor: bytes before its memory, its memory, bytes after it."""
    length: int
    """Bytes of all pieces together."""
    data_start: int = 0
    """Offset of the tensor's bytes in the item; 0 if they are unknown."""
    data_size: int = 0
    """Bytes of the tensor; 0 if they are unknown."""
    element_size: int = 1
    """Bytes of one element."""


class Packer:
    """Lays items into one data object.

    Attributes:
        stored: The location of each item whose bytes were read.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        """Compresses tensors with the codec; without one all is stored as it is."""
        self.stored: list[StoredItem] = []
        self._codec = codec
        self._size = 0

    def lay(self, item: EncodedItem) -> tuple[bytes | memoryview, ...]:
        """Return the bytes of an item that is stored as it is, after what aligns it."""
        padding = self._pad()
        start = self._size + item.data_start if item.data_start else 0
        self._add(StoredItem(self._size, item.length, start, item.data_size))
        return padding, *item.segments

    async def pack(self, items: Sequence[EncodedItem]) -> AsyncGenerator[bytes | memoryview]:
        """Yield the bytes of items; later ones are compressed ahead."""
        codec = self._codec
        assert codec is not None
        frames = [
            codec.encode_item(*item.segments, element_size=item.element_size)
            if item.data_size >= _MIN_COMPRESSED_BYTES
            else None
            for item in items
        ]
        compressed = codec.encode_items(each for each in frames if each is not None)
        async with aclosing(compressed) as segments:
            for item, each in zip(items, frames, strict=True):
                if each is None:
                    for piece in self.lay(item):
                        yield piece
                    continue
                yield self._pad()
                for _ in range(each.num_segments):
                    yield memoryview((await anext(segments))[1])
                self._add(each.stored(self._size))

    def _pad(self) -> bytes:
        padding = bytes(-self._size % ALIGNMENT_BYTES)
        self._size += len(padding)
        return padding

    def _add(self, stored: StoredItem) -> None:
        self.stored.append(stored)
        self._size = stored.offset + stored.length


def staged_pieces(state: StagedState, memory: memoryview) -> list[bytes | memoryview]:
    """Return the bytes that were staged: as they are stored already."""
    return [memory[: state.size], *state.tail]


async def compressed_pieces(
    state: StagedState, memory: memoryview, compression: Compression, stored: list[StoredItem]
) -> AsyncGenerator[bytes | memoryview]:
    """Yield the bytes of the object with its tensors compressed.

    `stored` is filled with the location of each item, once all bytes were read.
    """
    # Tied tensors are one item several times, which is written once.
    firsts = {item.offset: number for number, item in reversed([*enumerate(state.items)])}
    with Codec(
        level=compression.level, threads=compression.threads, byte_planes=compression.byte_planes
    ) as codec:
        packer = Packer(codec)
        async with aclosing(packer.pack([*_staged_items(state, memory, firsts)])) as pieces:
            async for piece in pieces:
                yield piece
    written = dict(zip(sorted(firsts.values()), packer.stored, strict=True))
    stored += [written[firsts[item.offset]] for item in state.items]


def _staged_items(
    state: StagedState, memory: memoryview, firsts: dict[int, int]
) -> Iterator[EncodedItem]:
    """Yield the items of a state, each once."""
    tail = iter(state.tail)
    sizes = state.element_sizes
    for number, (item, element_size) in enumerate(zip(state.items, sizes, strict=True)):
        if firsts[item.offset] != number:
            continue
        if item.offset >= state.size:
            yield EncodedItem((next(tail),), item.length)
            continue
        first, last = item.data_start, item.data_start + item.data_size
        around = memory[item.offset : first], memory[last : item.offset + item.length]
        segments = (around[0], memory[first:last], around[1])
        yield EncodedItem(segments, item.length, first - item.offset, item.data_size, element_size)

"""Packer: the bytes of a data object, a sequence of items that may be compressed.

Needs no torch, which the uploader process does not import.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aioflux.checkpoint._format.codec import Codec
from aioflux.checkpoint._format.commit import StoredItem

if TYPE_CHECKING:
    from aioflux.checkpoint._save.job import Compression, StagedState

ALIGNMENT_BYTES: Final = 64
"""Alignment of items in a data object, and of a tensor's data in its item."""

_MIN_COMPRESSED_BYTES: Final = 16 * 1024
"""Smaller tensors are not compressed: a separate frame costs 0.4 ms, the time that 150 KiB of a
large tensor take."""


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """The bytes that torch.save writes for one tensor or value."""

    segments: tuple[bytes | memoryview, ...]
    """Segments of the item in order. A tensor has three: the bytes before its data, its data, and
    the bytes after its data."""
    length: int
    """Size of the item in bytes."""
    data_start: int = 0
    """Offset of the tensor's data in the item; 0 if unknown, or if the item is a value."""
    data_size: int = 0
    """Size of the tensor's data in bytes; 0 if unknown."""
    element_size: int = 1
    """Size of one element in bytes."""


class Packer:
    """Sequence of the items of one data object, with the offset of each.

    Attributes:
        stored: The location of each item that was added, in order.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        """Start an empty data object; only `pack` needs the codec."""
        self.stored: list[StoredItem] = []
        self._codec = codec
        self._size = 0

    def add(self, item: EncodedItem) -> tuple[bytes | memoryview, ...]:
        """Add an item without compression; return its padding and its segments."""
        padding = self._pad()
        start = self._size + item.data_start if item.data_start else 0
        self._append(StoredItem(self._size, item.length, start, item.data_size))
        return padding, *item.segments

    async def pack(self, items: Sequence[EncodedItem]) -> AsyncGenerator[bytes | memoryview]:
        """Add items, compress the large tensors among them, and yield the bytes.

        While the caller uses the bytes of one item, threads of the codec compress the next items.
        """
        codec = self._codec
        assert codec is not None
        compressed_items = [
            codec.encode_item(*item.segments, element_size=item.element_size)
            if item.data_size >= _MIN_COMPRESSED_BYTES
            else None
            for item in items
        ]
        encoded = codec.encode_items(each for each in compressed_items if each is not None)
        async with aclosing(encoded) as segments:
            for item, compressed_item in zip(items, compressed_items, strict=True):
                if compressed_item is None:
                    for piece in self.add(item):
                        yield piece
                    continue
                yield self._pad()
                for _ in range(compressed_item.num_segments):
                    yield memoryview((await anext(segments))[1])
                self._append(compressed_item.stored(self._size))

    def _pad(self) -> bytes:
        padding = bytes(-self._size % ALIGNMENT_BYTES)
        self._size += len(padding)
        return padding

    def _append(self, stored: StoredItem) -> None:
        self.stored.append(stored)
        self._size = stored.offset + stored.length


def staged_pieces(state: StagedState, memory: memoryview) -> list[bytes | memoryview]:
    """Return the bytes of the data object without compression: the arena and the tail."""
    return [memory[: state.size], *state.tail]


async def compressed_pieces(
    state: StagedState, memory: memoryview, compression: Compression, stored: list[StoredItem]
) -> AsyncGenerator[bytes | memoryview]:
    """Yield the bytes of the data object with its large tensors compressed.

    At the end of the iteration the location of each item is appended to `stored`.
    """
    # Tied tensors share one item, which is written once, for the first of them.
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
    """Yield the items of a state; tied tensors yield one item."""
    tail = iter(state.tail)
    sizes = state.element_sizes
    for number, (item, element_size) in enumerate(zip(state.items, sizes, strict=True)):
        if firsts[item.offset] != number:
            continue
        if item.offset >= state.size:
            yield EncodedItem((next(tail),), item.length)
            continue
        start, stop = item.data_start, item.data_start + item.data_size
        end = item.offset + item.length
        segments = (memory[item.offset : start], memory[start:stop], memory[stop:end])
        yield EncodedItem(segments, item.length, start - item.offset, item.data_size, element_size)

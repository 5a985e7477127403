"""The CRC32C of each block of an object, and of the whole object. Pure.

Services store a checksum of the whole object only. To verify ranges, the commit stores the crc32c
of each block. A block has 64 KiB or more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from aioflux._values.checksums import combine_crc32c, crc32c, crc32c_blocks, join_crc32c

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import StoredObject


class RangeChecksum(NamedTuple):
    """The checksum of a range of bytes within one block of an object."""

    crc32c: int
    size: int


class BlockDigest:
    """CRC32C of each block of a stream of bytes, and of the whole stream."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.size = 0
        self._crcs: list[int] = []
        self._current = 0

    def update(self, view: memoryview) -> None:
        if num_pending := self.size % self.block_size:
            head = view[: self.block_size - num_pending]
            self._current = crc32c(head, self._current)
            self._advance(head.nbytes)
            view = view[head.nbytes :]
        if not view.nbytes:
            return
        self._crcs += crc32c_blocks(view, self.block_size)
        self.size += view.nbytes
        if view.nbytes % self.block_size:
            self._current = self._crcs.pop()

    def add(self, checksum: RangeChecksum) -> None:
        """Add the checksum of bytes that do not cross the end of the current block."""
        self._current = combine_crc32c(self._current, checksum.crc32c, checksum.size)
        self._advance(checksum.size)

    def _advance(self, size: int) -> None:
        self.size += size
        if self.size % self.block_size == 0:
            self._crcs.append(self._current)
            self._current = 0

    def finish(self) -> tuple[int, bytes]:
        """Return the crc32c of all bytes, and the bytes for `StoredObject.block_crcs`."""
        crcs = list(self._crcs)
        if self.size % self.block_size:
            crcs.append(self._current)
        whole = join_crc32c(crcs, self.block_size, self.size)
        return whole, struct.pack(f">{len(crcs)}I", *crcs)


def checksum_ranges(view: memoryview, *, offset: int, block_size: int) -> Iterator[RangeChecksum]:
    """Yield the checksum of each piece of `view`, which is cut at the ends of blocks.

    `view` begins at byte `offset` of its object.
    """
    start = 0
    while start < view.nbytes:
        num_in_block = block_size - (offset + start) % block_size
        piece = view[start : start + num_in_block]
        yield RangeChecksum(crc32c(piece), piece.nbytes)
        start += piece.nbytes


def joined_blocks(stored: StoredObject, start: int, size: int) -> int:
    """Return the crc32c of `size` bytes of whole blocks from `start` on, from the commit."""
    block_size = stored.block_size
    first, num_blocks = start // block_size, -(-size // block_size)
    crcs = struct.unpack_from(f">{num_blocks}I", stored.block_crcs, 4 * first)
    return join_crc32c(crcs, block_size, size)


def verify_blocks(stored: StoredObject, start: int, view: memoryview) -> int | None:
    """Return the index of the first block whose checksum does not match, or None.

    `view` holds whole blocks of the object; the first block begins at byte `start` of the object.
    """
    first = start // stored.block_size
    actual = crc32c_blocks(view, stored.block_size)
    expected = struct.unpack_from(f">{len(actual)}I", stored.block_crcs, 4 * first)
    pairs = enumerate(zip(actual, expected, strict=True), first)
    return next((index for index, (crc, saved) in pairs if crc != saved), None)

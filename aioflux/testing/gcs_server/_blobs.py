"""Blobs, the stored bytes of objects and parts: base classes, and blobs in memory.

A blob consists of leaves. A small object is one leaf. The concatenation of several objects is a
`JoinedBlob` with many leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._buffer_pool import is_owned

if TYPE_CHECKING:
    from aioflux.testing.gcs_server._messages import Buffer

_LEAF_BYTES = 256 * 1024


class Blob(ABC):
    """Immutable bytes of one object, part or upload."""

    size: int

    @abstractmethod
    def view(self, start: int, end: int) -> Buffer:
        """Return the bytes `[start, end)` in one buffer, which stays valid after `discard`."""

    @abstractmethod
    def discard(self) -> None:
        """Delete the bytes. The blob must not be used any more."""

    def views(self, start: int, end: int) -> Sequence[Buffer]:
        """Return the bytes `[start, end)` in one or several buffers, without a copy."""
        return (self.view(start, end),)

    def leaves(self) -> Sequence[Blob]:
        """Return the leaves of this blob; a blob that is not joined is its own leaf."""
        return (self,)


class Blobs(ABC):
    """Store of blobs."""

    @abstractmethod
    def put(self, pieces: Iterable[Buffer]) -> Blob:
        """Store the concatenation of pieces as one leaf."""

    @abstractmethod
    def share(self, leaf: Blob) -> Blob:
        """Return a new leaf with the same bytes, which stay valid if `leaf` is discarded."""

    def concat(self, blobs: Sequence[Blob]) -> Blob:
        """Return a new blob with the concatenation of blobs.

        Large leaves are shared, which is fast. Neighbouring small leaves are copied into one leaf,
        so that repeated appends of a few bytes do not make a blob of many tiny leaves.
        """
        groups = group_leaves([leaf for blob in blobs for leaf in blob.leaves() if leaf.size])
        new_leaves = [
            self.share(leaves[0])
            if len(leaves) == 1
            else self.put(leaf.view(0, leaf.size) for leaf in leaves)
            for leaves in groups
        ]
        if not new_leaves:
            return self.put(())
        return new_leaves[0] if len(new_leaves) == 1 else JoinedBlob(new_leaves)


class JoinedBlob(Blob):
    """Concatenation of several leaves, which belong to this blob and are not empty."""

    def __init__(self, leaves: Sequence[Blob]) -> None:
        self._leaves = tuple(leaves)
        self._starts = list(accumulate((leaf.size for leaf in leaves), initial=0))
        self.size = self._starts.pop()

    def view(self, start: int, end: int) -> Buffer:
        views = self.views(start, end)
        return views[0] if len(views) == 1 else b"".join(views)

    def views(self, start: int, end: int) -> Sequence[Buffer]:
        views: list[Buffer] = []
        index = bisect_right(self._starts, start) - 1
        while start < end:
            leaf, base = self._leaves[index], self._starts[index]
            stop = min(end, base + leaf.size)
            views.append(leaf.view(start - base, stop - base))
            start, index = stop, index + 1
        return views

    def leaves(self) -> Sequence[Blob]:
        return self._leaves

    def discard(self) -> None:
        for leaf in self._leaves:
            leaf.discard()


def group_leaves(leaves: Sequence[Blob]) -> list[list[Blob]]:
    """Group neighbouring leaves. A group has up to 256 KiB, or one larger leaf."""
    groups: list[list[Blob]] = []
    free_bytes = 0
    for leaf in leaves:
        if leaf.size <= free_bytes:
            groups[-1].append(leaf)
            free_bytes -= leaf.size
        else:
            groups.append([leaf])
            free_bytes = _LEAF_BYTES - leaf.size
    return groups


class MemoryBlob(Blob):
    """Leaf in memory."""

    __slots__ = ("_data", "size")

    def __init__(self, data: Buffer) -> None:
        self._data = data
        self.size = len(data)

    def view(self, start: int, end: int) -> Buffer:
        if start == 0 and end == self.size:
            return self._data
        return memoryview(self._data)[start:end]

    def discard(self) -> None:
        """See base class; the memory is freed with the last reference."""


class MemoryBlobs(Blobs):
    """Store of blobs in memory."""

    def put(self, pieces: Iterable[Buffer]) -> Blob:
        parts = list(pieces)
        if len(parts) == 1 and is_owned(parts[0]):
            return MemoryBlob(parts[0])
        return MemoryBlob(b"".join(parts))

    def share(self, leaf: Blob) -> Blob:
        """See base class; returns the same leaf, because `discard` does nothing."""
        return leaf

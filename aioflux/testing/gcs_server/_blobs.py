"""Bytes of objects: an interface, and its implementation in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._buffer_pool import is_owned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioflux.testing.gcs_server._messages import Buffer

_LEAF_BYTES = 256 * 1024


class Blob(ABC):
    """Bytes that never change, owned by one record."""

    size: int

    @abstractmethod
    def view(self, start: int, end: int) -> Buffer:
        """Return the bytes `[start, end)` in one piece, valid even after `discard`."""

    @abstractmethod
    def discard(self) -> None:
        """Release the bytes: their owner is gone."""

    def views(self, start: int, end: int) -> Sequence[Buffer]:
        """Return the bytes `[start, end)` as they are stored, without a copy."""
        return (self.view(start, end),)

    def leaves(self) -> Sequence[Blob]:
        """Return the blobs that this one consists of, none of which is a joined one."""
        return (self,)


class Blobs(ABC):
    """Store of blobs."""

    @abstractmethod
    def put(self, pieces: Iterable[Buffer]) -> Blob:
        """Store the concatenation of pieces as one blob."""

    @abstractmethod
    def share(self, leaf: Blob) -> Blob:
        """Return a second blob of the same bytes, discarded separately."""

    def concat(self, blobs: Sequence[Blob]) -> Blob:
        """Return the concatenation of blobs, which stay.

        Large leaves are shared and small neighbours are copied together: it takes little time, and
        an object that grows by many small steps does not become a list of small leaves.
        """
        groups = group([leaf for blob in blobs for leaf in blob.leaves() if leaf.size])
        made = [
            self.share(leaves[0])
            if len(leaves) == 1
            else self.put(leaf.view(0, leaf.size) for leaf in leaves)
            for leaves in groups
        ]
        return made[0] if len(made) == 1 else JoinedBlob(made) if made else self.put(())


class JoinedBlob(Blob):
    """Concatenation of several blobs, none of them empty or joined; they belong to this one."""

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


def group(leaves: Sequence[Blob]) -> list[list[Blob]]:
    """Group leaves in order: several of 256 KiB together at most, larger ones alone."""
    groups: list[list[Blob]] = []
    free = 0
    for leaf in leaves:
        if leaf.size <= free:
            groups[-1].append(leaf)
            free -= leaf.size
        else:
            groups.append([leaf])
            free = _LEAF_BYTES - leaf.size
    return groups


class MemoryBlob(Blob):
    """Bytes in memory."""

    __slots__ = ("_data", "size")

    def __init__(self, data: Buffer) -> None:
        self._data = data
        self.size = len(data)

    def view(self, start: int, end: int) -> Buffer:
        if start == 0 and end == self.size:
            return self._data
        return memoryview(self._data)[start:end]

    def discard(self) -> None:
        """See base class; left to the garbage collector."""


class MemoryBlobs(Blobs):
    """Store in memory."""

    def put(self, pieces: Iterable[Buffer]) -> Blob:
        parts = list(pieces)
        if len(parts) == 1 and is_owned(parts[0]):
            return MemoryBlob(parts[0])
        return MemoryBlob(b"".join(parts))

    def share(self, leaf: Blob) -> Blob:
        """See base class; immutable bytes need no copy."""
        return leaf

"""Plan of composites: groups of small objects, and slices of a composite for its objects. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from aioflux._values.checksums import crc32c

if TYPE_CHECKING:
    from aioflux._services.base import Capabilities
    from aioflux._values.meta import ObjectMeta

Group: TypeAlias = "tuple[ObjectMeta, ...]"

_CLASSES: Final = frozenset({"", "STANDARD"})
"""Storage classes whose objects are composed. A composite has the storage class of its sources, and
in the other classes an object is billed for at least a month, even if it is deleted at once
(cloud.google.com/storage/docs/composing-objects)."""


def can_compose(capabilities: Capabilities) -> bool:
    """Return whether a service composes listed generations, and lists their checksums."""
    return capabilities.compose and capabilities.generations and capabilities.listed_checksums


def is_composable(meta: ObjectMeta, max_bytes: int) -> bool:
    """Return whether an object may be a source of a composite of at most `max_bytes`.

    An object with a Content-Encoding is not composed, because a service may decode it. An object
    without a generation could not be pinned, and without a crc32c its slice could not be verified.
    """
    return (
        0 < meta.size <= max_bytes
        and meta.generation != ""
        and meta.crc32c is not None
        and not meta.content_encoding
        and meta.storage_class in _CLASSES
    )


class Grouper:
    """A division of a sequence of objects into groups of neighbours, one composite each.

    Args:
        max_sources: Maximum number of objects in a group.
        max_bytes: Largest size of a group. An object that is larger, or for another reason not
            composable, is a group of its own.
    """

    def __init__(self, *, max_sources: int, max_bytes: int) -> None:
        self._max_sources = max_sources
        self._max_bytes = max_bytes
        self._open: list[ObjectMeta] = []
        self._num_bytes = 0

    def add(self, meta: ObjectMeta) -> list[Group]:
        """Add an object, and return the groups that it completes, in order."""
        if not is_composable(meta, self._max_bytes):
            return [*self.rest(), (meta,)]
        complete = self.rest() if self._num_bytes + meta.size > self._max_bytes else []
        self._open.append(meta)
        self._num_bytes += meta.size
        if len(self._open) == self._max_sources:
            complete += self.rest()
        return complete

    def rest(self) -> list[Group]:
        """Return a list of the last, incomplete group; an empty list if there is none."""
        group, self._open, self._num_bytes = tuple(self._open), [], 0
        return [group] if group else []


def plan_groups(metas: Iterable[ObjectMeta], grouper: Grouper) -> Iterator[Group]:
    """Yield the groups of a sequence of objects."""
    for meta in metas:
        yield from grouper.add(meta)
    yield from grouper.rest()


def split(data: bytes, group: Group, *, verify: bool) -> list[bytes] | None:
    """Split the bytes of a composite into its objects.

    Returns None if the total size or, with `verify`, the crc32c of an object is wrong.
    """
    if len(data) != sum(meta.size for meta in group):
        return None
    slices = []
    start = 0
    for meta in group:
        piece = data[start : start + meta.size]
        if verify and crc32c(piece) != meta.crc32c:
            return None
        slices.append(piece)
        start += meta.size
    return slices

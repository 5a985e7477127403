"""Groups of small objects for one composite each, and its division into them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from aioflux._values.checksums import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aioflux._services.base import Capabilities
    from aioflux._values.meta import ObjectMeta

__all__ = ["Group", "Grouper", "can_compose", "is_composable", "plan_groups", "split"]

Group: TypeAlias = "tuple[ObjectMeta, ...]"

_CLASSES: Final = frozenset({"", "STANDARD"})
"""Storage classes that are composed: a composite has that of its sources, and an object of another
is billed for a month or more however soon it is deleted
(cloud.google.com/storage/docs/composing-objects)."""


def can_compose(capabilities: Capabilities) -> bool:
    """Return whether a service composes objects of the generation that was listed."""
    return capabilities.compose and capabilities.generations and capabilities.listed_checksums


def is_composable(meta: ObjectMeta, max_bytes: int) -> bool:
    """Return whether an object may be a source of a composite of at most `max_bytes`.

    A service may decode an object with a Content-Encoding; one without generation cannot be pinned,
    and the slice of one without crc32c could not be verified.
    """
    return (
        0 < meta.size <= max_bytes
        and meta.generation != ""
        and meta.crc32c is not None
        and not meta.content_encoding
        and meta.storage_class in _CLASSES
    )


class Grouper:
    """Divides a sequence of objects into groups of neighbours, for one composite each.

    Args:
        max_sources: Most objects of one group.
        max_bytes: Most bytes of one group; larger objects form groups of their own.
    """

    def __init__(self, *, max_sources: int, max_bytes: int) -> None:
        self._max_sources = max_sources
        self._max_bytes = max_bytes
        self._open: list[ObjectMeta] = []
        self._num_bytes = 0

    def add(self, meta: ObjectMeta) -> list[Group]:
        """Add an object, and return the groups that are complete, in order."""
        if not is_composable(meta, self._max_bytes):
            return [*self.rest(), (meta,)]
        complete = self.rest() if self._num_bytes + meta.size > self._max_bytes else []
        self._open.append(meta)
        self._num_bytes += meta.size
        if len(self._open) == self._max_sources:
            complete += self.rest()
        return complete

    def rest(self) -> list[Group]:
        """Return the group that is not complete, if it has objects."""
        group, self._open, self._num_bytes = tuple(self._open), [], 0
        return [group] if group else []


def plan_groups(metas: Iterable[ObjectMeta], grouper: Grouper) -> Iterator[Group]:
    """Yield the groups of a sequence of objects."""
    for meta in metas:
        yield from grouper.add(meta)
    yield from grouper.rest()


def split(data: bytes, group: Group, *, verify: bool) -> list[bytes] | None:
    """Split the bytes of a composite into its objects; None if they do not match them."""
    if len(data) != sum(meta.size for meta in group):
        return None
    slices = []
    at = 0
    for meta in group:
        part = data[at : at + meta.size]
        if verify and crc32c(part) != meta.crc32c:
            return None
        slices.append(part)
        at += meta.size
    return slices

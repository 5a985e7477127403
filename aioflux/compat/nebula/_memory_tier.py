"""MemoryTier: the versions in the memory of a node, and which segments are free. No I/O.

    allocate -> a free segment, a new one, one on disk, or: wait
    add_part -> an open version of its tag -> complete -> saved to other tiers -> evicted

All processes of the node share one budget. Segments that are free or saved elsewhere are freed
before a trainer has to wait; a version that is saved nowhere else is only replaced by a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMMITTED", "GROWING", "Allocation", "MemoryTier", "Part", "Segment", "Version"]

COMMITTED: Final = -2
"""A number of files: the version is complete when `commit` is called."""
GROWING: Final = -1
"""A number of files: the version is complete after each file."""

_SLACK_BYTES: Final = 4 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Segment:
    """A segment of shared memory that a trainer created."""

    number: int
    """Its number on this node."""
    owner: int
    """Number of the trainer that created it and can reuse it; 0 when that has disconnected."""
    size: int
    """Its bytes."""
    is_on_disk: bool = False
    """Whether it is on disk, outside the budget."""
    is_filling: bool = True
    """Whether its owner writes to it."""
    num_readers: int = 0
    """Trainers that load from it."""


@dataclass(slots=True, eq=False)
class Part:
    """One named part of a version."""

    name: str
    """Its name."""
    segment: Segment
    """The segment that holds it."""
    size: int
    """Its bytes."""
    crc32c: int | None = None
    """Their checksum, once it is computed."""


@dataclass(slots=True, eq=False)
class Version:
    """One save under a tag."""

    tag: str
    """The tag."""
    num_files: int
    """Parts that make it complete, or COMMITTED or GROWING."""
    save_id: str = ""
    """Id of the save, once it is complete; sorts by time."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Its parts by name."""
    owners: set[int] = field(default_factory=set)
    """Numbers of the trainers that added parts."""
    blocked_seconds: float = 0.0
    """Longest time for which a trainer was blocked."""
    is_due: bool = False
    """Whether it is saved to the other tiers even if a newer version exists."""
    saved_in: set[str] = field(default_factory=set)
    """Names of the other tiers that have it."""
    failures: dict[str, str] = field(default_factory=dict)
    """Errors of other tiers, by name."""
    rank: int = 0
    """Index of this node among those that save it."""
    num_nodes: int = 1
    """Nodes that save it."""
    num_readers: int = 0
    """Uploads in progress."""

    @property
    def num_bytes(self) -> int:
        return sum(part.size for part in self.parts.values())


class Allocation(NamedTuple):
    """Answer to a request for memory."""

    kind: str
    """`reuse`, `new`, `disk` or `wait`."""
    segment: Segment | None = None
    """The segment; None for `wait`."""


@dataclass(slots=True)
class MemoryTier:
    """The memory of one node."""

    budget_bytes: int
    """Limit of the bytes in memory."""
    retention: int = 2
    """Complete versions to keep."""
    num_tiers: int = 1
    """Other tiers that versions are saved to."""
    segments: dict[int, Segment] = field(default_factory=dict)
    """All segments by number."""
    versions: list[Version] = field(default_factory=list)
    """Complete versions, oldest first."""
    open: dict[str, Version] = field(default_factory=dict)
    """Incomplete versions by tag."""
    freed: list[Segment] = field(default_factory=list)
    """Freed segments; the node daemon unmaps them and clears the list."""
    _num_segments: int = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments in memory, in use or not."""
        return sum(each.size for each in self.segments.values() if not each.is_on_disk)

    @property
    def newest(self) -> Version | None:
        return self.versions[-1] if self.versions else None

    def find(self, tag: str, save_id: str = "") -> Version | None:
        """Return a complete version; the newest of its tag without a save id."""
        for version in reversed(self.versions):
            if version.tag == tag and save_id in {"", version.save_id}:
                return version
        return None

    def allocate(self, owner: int, size: int) -> Allocation:
        """Find a segment for a part, and free others for it if needed.

        The part belongs to a new version: an old one is evicted first, so that its warm memory is
        reused.
        """
        for version in self.versions[:-1]:
            if len(self.versions) >= self.retention and self._is_evictable(version):
                self.versions.remove(version)
        used = self._used_segments()
        fitting = [
            each
            for each in self.segments.values()
            if each.owner == owner
            and each not in used
            and not (each.is_filling or each.num_readers or each.is_on_disk)
            and size <= each.size <= 2 * size + _SLACK_BYTES
        ]
        if fitting:
            segment = min(fitting, key=lambda each: each.size)
            segment.is_filling = True
            return Allocation("reuse", segment)
        if size > self.budget_bytes:
            return Allocation("disk", self._add(owner, size, is_on_disk=True))
        for victim in self._evictables():
            if self.used_bytes + size <= self.budget_bytes:
                break
            self._free_memory(victim)
        if self.used_bytes + size <= self.budget_bytes:
            return Allocation("new", self._add(owner, size))
        newest = self.newest
        if newest is not None and self._is_waiting(newest):
            newest.is_due = True  # it can be evicted when it is saved elsewhere
        if self._will_free_memory():
            return Allocation("wait")
        return Allocation("disk", self._add(owner, size, is_on_disk=True))

    def add_part(
        self, owner: int, number: int, part: tuple[str, str, int], num_files: int, seconds: float
    ) -> Version:
        """Add a part that a trainer has copied, and return its version.

        `number` is that of the segment, `part` the tag, the name and the bytes, and `seconds` the
        time for which the trainer was blocked.
        """
        tag, name, size = part
        segment = self.segments[number]
        segment.is_filling = False
        version = self.open.get(tag)
        if version is None or version.num_files != num_files:
            version = self.open[tag] = Version(tag, num_files)
            before = self.find(tag)
            if num_files == GROWING and before is not None and name not in before.parts:
                version.parts.update(before.parts)
        version.parts[name] = Part(name, segment, size)
        version.owners.add(owner)
        version.blocked_seconds = max(version.blocked_seconds, seconds)
        self._free_unused()
        return version

    def has_all_parts(self, version: Version) -> bool:
        """Return whether an open version has its number of parts."""
        if version.num_files == GROWING:
            return bool(version.parts)
        return 0 < version.num_files <= len(version.parts)

    def complete(self, version: Version, save_id: str) -> None:
        """Complete a version; evict older ones of its tag, and those above the retention."""
        self.open.pop(version.tag, None)
        version.save_id = save_id
        self.versions.append(version)
        for each in [each for each in self.versions[:-1] if each.tag == version.tag]:
            if not each.num_readers:
                self.versions.remove(each)
        self._apply_retention()

    def set_saved(self, version: Version, tier: str, failure: str = "") -> None:
        """Record that a version is saved to another tier, or that this failed."""
        version.failures.pop(tier, None)
        if failure:
            version.failures[tier] = failure
        else:
            version.saved_in.add(tier)
        self._apply_retention()

    def _apply_retention(self) -> None:
        for each in self.versions[:-1]:
            if len(self.versions) > self.retention and self._is_evictable(each):
                self.versions.remove(each)
        self._free_unused()

    def remove(self, tag: str) -> None:
        """Evict a tag, unless it is the newest or is being saved."""
        for version in self.versions[:-1]:
            if version.tag == tag and not version.num_readers:
                self.versions.remove(version)
        self._free_unused()

    def cancel(self, number: int, *, is_created: bool = True) -> None:
        """Return a segment to which nothing was copied; one that the daemon lacks is not reused."""
        if (segment := self.segments.get(number)) is not None:
            segment.is_filling = False
            if not is_created:
                self._free(segment)
            self._free_unused()

    def remove_owner(self, owner: int, *, is_last: bool = True) -> None:
        """Remove a trainer that has disconnected, and what it had not finished.

        Its parts stay while others are connected, whose parts may complete their version.
        """
        for tag, version in list(self.open.items()):
            version.owners.discard(owner)
            if is_last and not version.owners:
                del self.open[tag]
        for segment in self.segments.values():
            if segment.owner == owner:
                segment.owner, segment.is_filling = 0, False
        self._free_unused()

    def remove_orphaned_parts(self) -> None:
        """Remove parts of disconnected trainers from open versions, when a trainer connects.

        It may be a restart of the same training, and a version never mixes two runs.
        """
        for tag, version in list(self.open.items()):
            for part in list(version.parts.values()):
                if not part.segment.owner:
                    del version.parts[part.name]
            if not version.parts:
                del self.open[tag]
        self._free_unused()

    def release(self, segment: Segment) -> None:
        """End one reader's use of a segment."""
        segment.num_readers -= 1
        self._free_unused()

    def _add(self, owner: int, size: int, *, is_on_disk: bool = False) -> Segment:
        self._num_segments += 1
        segment = Segment(self._num_segments, owner, size, is_on_disk)
        self.segments[segment.number] = segment
        return segment

    def _used_segments(self) -> set[Segment]:
        held = [*self.versions, *self.open.values()]
        return {part.segment for version in held for part in version.parts.values()}

    def _evictables(self) -> Iterator[Segment | Version]:
        """Yield unused segments, then versions that can be evicted."""
        used = self._used_segments()
        for segment in list(self.segments.values()):
            is_busy = segment in used or segment.is_filling or segment.num_readers
            if not (is_busy or segment.is_on_disk):
                yield segment
        for version in list(self.versions):
            if self._is_evictable(version):
                yield version

    def _free_memory(self, victim: Segment | Version) -> None:
        if isinstance(victim, Version):
            self.versions.remove(victim)
            for part in victim.parts.values():
                if part.segment not in self._used_segments():
                    self._free(part.segment)
        else:
            self._free(victim)

    def _is_evictable(self, version: Version) -> bool:
        if version.num_readers or self._is_read(version) or self._is_due(version):
            return False
        return bool(version.saved_in) or version is not self.newest

    def _is_due(self, version: Version) -> bool:
        return version.is_due and self._is_waiting(version)

    def _is_waiting(self, version: Version) -> bool:
        """Return whether another tier has neither saved the version nor failed."""
        return self.num_tiers > len(version.saved_in) + len(version.failures)

    def _will_free_memory(self) -> bool:
        """Return whether memory becomes free when uploads or loads end."""

        def is_in_first_upload(version: Version) -> bool:
            # A retry may take minutes to fail.
            is_retry = bool(version.failures) and not self._is_waiting(version)
            return version.num_readers > 0 and not is_retry

        return any(
            is_in_first_upload(version) or self._is_due(version) or self._is_read(version)
            for version in self.versions
        )

    @staticmethod
    def _is_read(version: Version) -> bool:
        return any(part.segment.num_readers for part in version.parts.values())

    def _free_unused(self) -> None:
        """Free unused segments that are not reused: of disconnected trainers, and on disk."""
        used = self._used_segments()
        for segment in list(self.segments.values()):
            is_idle = not (segment in used or segment.is_filling or segment.num_readers)
            if is_idle and (not segment.owner or segment.is_on_disk):
                self._free(segment)

    def _free(self, segment: Segment) -> None:
        del self.segments[segment.number]
        self.freed.append(segment)

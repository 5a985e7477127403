"""Versions and memory segments of one node: allocation, completion and eviction. Pure.

    allocate -> an unused segment, a new segment in memory, a new segment on disk, or wait
    add_part -> an incomplete version of the tag -> complete -> saved to other tiers -> evicted

A trainer is a process that saves or loads checkpoints; a version is one save of a tag. All trainers
of the node share one budget of memory. When the budget is exhausted, unused segments are freed, and
versions are evicted; a version that no other tier has is evicted only if a newer version exists. If
this is not enough, the trainer waits for uploads or loads that will free memory. If there are none
of these, the new segment is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

COMMITTED: Final = -2
"""Value of `num_files`: a call of `commit` completes the version."""
GROWING: Final = -1
"""Value of `num_files`: each part completes a new version, with the parts of the version before
unless that version already has a part with the name of the new part."""

_SLACK_BYTES: Final = 4 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Segment:
    """A segment of shared memory, or of a file on disk, that a trainer created."""

    number: int
    owner: int
    """Number of the trainer that created the segment, 0 after the trainer has disconnected. Only
    the owner can write to the segment again."""
    size: int
    """Size in bytes."""
    is_on_disk: bool = False
    """Whether the segment is a file on disk, which the budget does not count."""
    is_filling: bool = True
    """Whether the owner is copying a part to the segment."""
    num_readers: int = 0
    """Number of trainers that are loading from the segment."""


@dataclass(slots=True, eq=False)
class Part:
    """One part of a version."""

    name: str
    segment: Segment
    """The segment that contains the bytes, from its start."""
    size: int
    """Size in bytes."""
    crc32c: int | None = None
    """Checksum of the bytes; None until an upload has computed it."""


@dataclass(slots=True, eq=False)
class Version:
    """One save of a tag."""

    tag: str
    num_files: int
    """Number of parts that complete the version, or COMMITTED or GROWING."""
    save_id: str = ""
    """Id of the save, sorted by time; empty until the version is complete."""
    parts: dict[str, Part] = field(default_factory=dict)
    owners: set[int] = field(default_factory=set)
    """Numbers of the connected trainers that have added parts."""
    blocked_seconds: float = 0.0
    """Maximum time for which a save of a part has blocked a trainer."""
    must_save: bool = False
    """Whether to save the version to the other tiers even if a newer version exists."""
    saved_in: set[str] = field(default_factory=set)
    """Names of the other tiers that have the version."""
    failures: dict[str, str] = field(default_factory=dict)
    """Error messages of failed saves, by name of the tier."""
    rank: int = 0
    """Index of this node among the nodes that save the version."""
    num_nodes: int = 1
    num_readers: int = 0
    """Number of uploads in progress."""

    @property
    def num_bytes(self) -> int:
        return sum(part.size for part in self.parts.values())


class Allocation(NamedTuple):
    """Result of a request for memory."""

    kind: str
    """`reuse` (a segment of the trainer), `new`, `disk`, or `wait` (request again later)."""
    segment: Segment | None = None


@dataclass(slots=True)
class MemoryTier:
    """State of the checkpoint memory of one node."""

    budget_bytes: int
    """Maximum size of all segments in memory."""
    retention: int = 2
    """Number of complete versions to keep."""
    num_tiers: int = 1
    """Number of other tiers that versions are saved to."""
    segments: dict[int, Segment] = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)
    """Complete versions, oldest first."""
    open: dict[str, Version] = field(default_factory=dict)
    """Incomplete versions by tag."""
    freed: list[Segment] = field(default_factory=list)
    """Segments that were freed here. The node daemon unmaps them, and clears the list."""
    _num_segments: int = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments in memory, including unused segments."""
        return sum(segment.size for segment in self.segments.values() if not segment.is_on_disk)

    @property
    def newest(self) -> Version | None:
        return self.versions[-1] if self.versions else None

    def find(self, tag: str, save_id: str = "") -> Version | None:
        """Return the complete version of a tag and save id; without save id, the newest version."""
        for version in reversed(self.versions):
            if version.tag == tag and save_id in {"", version.save_id}:
                return version
        return None

    def allocate(self, owner: int, size: int) -> Allocation:
        """Return a segment for a new part; free segments and evict versions if necessary.

        The part belongs to a new version. If this version will exceed the retention, old versions
        are evicted now, so that the part can reuse their memory, which is mapped already.
        """
        for version in self.versions[:-1]:
            if len(self.versions) >= self.retention and self._is_evictable(version):
                self.versions.remove(version)
        used = self._used_segments()
        fitting = [
            segment
            for segment in self.segments.values()
            if segment.owner == owner
            and segment not in used
            and not (segment.is_filling or segment.num_readers or segment.is_on_disk)
            and size <= segment.size <= 2 * size + _SLACK_BYTES
        ]
        if fitting:
            segment = min(fitting, key=lambda segment: segment.size)
            segment.is_filling = True
            return Allocation("reuse", segment)
        if size > self.budget_bytes:
            return Allocation("disk", self._add(owner, size, is_on_disk=True))
        for victim in self._list_victims():
            if self.used_bytes + size <= self.budget_bytes:
                break
            self._free_memory(victim)
        if self.used_bytes + size <= self.budget_bytes:
            return Allocation("new", self._add(owner, size))
        newest = self.newest
        if newest is not None and self._has_pending_save(newest):
            newest.must_save = True  # It can be evicted once another tier has it.
        if self._will_free_memory():
            return Allocation("wait")
        return Allocation("disk", self._add(owner, size, is_on_disk=True))

    def add_part(
        self, owner: int, number: int, part: tuple[str, str, int], num_files: int, seconds: float
    ) -> Version:
        """Add a part (tag, name, size) that trainer `owner` has copied to segment `number`.

        `seconds` is the time for which the trainer was blocked. Returns the version of the part.
        """
        tag, name, size = part
        segment = self.segments[number]
        segment.is_filling = False
        version = self.open.get(tag)
        if version is None or version.num_files != num_files:
            version = self.open[tag] = Version(tag, num_files)
            previous = self.find(tag)
            if num_files == GROWING and previous is not None and name not in previous.parts:
                version.parts.update(previous.parts)
        version.parts[name] = Part(name, segment, size)
        version.owners.add(owner)
        version.blocked_seconds = max(version.blocked_seconds, seconds)
        self._free_unused()
        return version

    def has_all_parts(self, version: Version) -> bool:
        """Return whether a version has all its parts; False if `commit` must complete it."""
        if version.num_files == GROWING:
            return bool(version.parts)
        return 0 < version.num_files <= len(version.parts)

    def complete(self, version: Version, save_id: str) -> None:
        """Complete a version, and evict older versions of the tag and versions above the retention.

        Versions that are in an upload are not evicted.
        """
        self.open.pop(version.tag, None)
        version.save_id = save_id
        self.versions.append(version)
        for older in [older for older in self.versions[:-1] if older.tag == version.tag]:
            if not older.num_readers:
                self.versions.remove(older)
        self._apply_retention()

    def set_saved(self, version: Version, tier: str, failure: str = "") -> None:
        """Record that another tier has saved a version or, with a failure, could not save it."""
        version.failures.pop(tier, None)
        if failure:
            version.failures[tier] = failure
        else:
            version.saved_in.add(tier)
        self._apply_retention()

    def _apply_retention(self) -> None:
        for version in self.versions[:-1]:
            if len(self.versions) > self.retention and self._is_evictable(version):
                self.versions.remove(version)
        self._free_unused()

    def remove(self, tag: str) -> None:
        """Evict the versions of a tag, except versions in an upload and the newest of all tags."""
        for version in self.versions[:-1]:
            if version.tag == tag and not version.num_readers:
                self.versions.remove(version)
        self._free_unused()

    def cancel(self, number: int, *, is_created: bool = True) -> None:
        """Release a segment whose copy failed; free it if the trainer has not created it."""
        if (segment := self.segments.get(number)) is not None:
            segment.is_filling = False
            if not is_created:
                self._free(segment)
            self._free_unused()

    def remove_owner(self, owner: int, *, is_last: bool = True) -> None:
        """Remove a trainer that has disconnected. Its segments then have no owner.

        Its parts in incomplete versions are kept while other trainers are connected, because the
        other trainers may complete these versions.
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
        """Remove parts of disconnected trainers from incomplete versions.

        Called when a trainer connects: the training may have restarted, and a version must not
        contain parts of two runs.
        """
        for tag, version in list(self.open.items()):
            for part in list(version.parts.values()):
                if not part.segment.owner:
                    del version.parts[part.name]
            if not version.parts:
                del self.open[tag]
        self._free_unused()

    def release(self, segment: Segment) -> None:
        """Record the end of a load from a segment."""
        segment.num_readers -= 1
        self._free_unused()

    def _add(self, owner: int, size: int, *, is_on_disk: bool = False) -> Segment:
        self._num_segments += 1
        segment = Segment(self._num_segments, owner, size, is_on_disk)
        self.segments[segment.number] = segment
        return segment

    def _used_segments(self) -> set[Segment]:
        versions = [*self.versions, *self.open.values()]
        return {part.segment for version in versions for part in version.parts.values()}

    def _list_victims(self) -> Iterator[Segment | Version]:
        """Yield unused segments, then the versions that can be evicted."""
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
        if version.num_readers or self._is_loading(version) or self._will_be_saved(version):
            return False
        return bool(version.saved_in) or version is not self.newest

    def _will_be_saved(self, version: Version) -> bool:
        return version.must_save and self._has_pending_save(version)

    def _has_pending_save(self, version: Version) -> bool:
        """Return whether a save to another tier has neither succeeded nor failed yet."""
        return self.num_tiers > len(version.saved_in) + len(version.failures)

    def _will_free_memory(self) -> bool:
        """Return whether the end of an upload or load may free memory."""

        def is_in_first_upload(version: Version) -> bool:
            # A retry does not count, because it may take minutes to fail.
            is_retry = bool(version.failures) and not self._has_pending_save(version)
            return version.num_readers > 0 and not is_retry

        return any(
            is_in_first_upload(version) or self._will_be_saved(version) or self._is_loading(version)
            for version in self.versions
        )

    @staticmethod
    def _is_loading(version: Version) -> bool:
        return any(part.segment.num_readers for part in version.parts.values())

    def _free_unused(self) -> None:
        """Free unused segments that no trainer can reuse: without an owner, or on disk."""
        used = self._used_segments()
        for segment in list(self.segments.values()):
            is_idle = not (segment in used or segment.is_filling or segment.num_readers)
            if is_idle and (not segment.owner or segment.is_on_disk):
                self._free(segment)

    def _free(self, segment: Segment) -> None:
        del self.segments[segment.number]
        self.freed.append(segment)

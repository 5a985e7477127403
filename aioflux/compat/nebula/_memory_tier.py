"""Shelf: what the memory of a node holds, and what may be put there next. Pure.

    ask for room -> a piece of memory that is free, a new one, one on the disk, or: wait
    put a part   -> an open version of its tag -> complete -> saved elsewhere -> evicted

One budget holds for all processes of the node. What is free, or saved elsewhere, gives way before
anybody waits; what is nowhere else is never given up, but for a newer version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMMITTED", "GROWING", "Grant", "Part", "Piece", "Shelf", "Version"]

COMMITTED: Final = -2
"""A number of files: the version is complete when somebody says so."""
GROWING: Final = -1
"""A number of files: the version is complete with each file that comes."""

_SLACK_BYTES: Final = 4 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Piece:
    """One piece of memory, made by a trainer."""

    number: int
    """Names it on the node."""
    owner: int
    """The trainer that made it and may fill it again; 0 where that is gone."""
    size: int
    """Bytes of it."""
    is_on_disk: bool = False
    """Whether it is a part of the disk: then the budget is not asked."""
    is_filling: bool = True
    """Whether its owner writes to it."""
    num_readers: int = 0
    """Who looks at it just now: uploads, trainers that load."""


@dataclass(slots=True, eq=False)
class Part:
    """One named part of a version."""

    name: str
    """Its name."""
    piece: Piece
    """Where it lies."""
    size: int
    """Its bytes."""
    crc32c: int | None = None
    """Their checksum, once it was computed."""


@dataclass(slots=True, eq=False)
class Version:
    """What was saved under a tag."""

    tag: str
    """The tag."""
    num_files: int
    """Parts that make it complete, or COMMITTED or GROWING."""
    save_id: str = ""
    """Names the save, once it is complete; sorts by time."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Its parts by name."""
    owners: set[int] = field(default_factory=set)
    """Trainers that put something there."""
    blocked_seconds: float = 0.0
    """How long trainers were held up, the longest of them."""
    is_due: bool = False
    """Whether it is saved elsewhere, whatever comes after it."""
    places: set[str] = field(default_factory=set)
    """Where else it is saved."""
    failures: dict[str, str] = field(default_factory=dict)
    """Where it could not be saved, and why."""
    rank: int = 0
    """Number of this node among those that save it."""
    num_nodes: int = 1
    """How many save it."""
    num_readers: int = 0
    """Uploads under way."""

    @property
    def is_complete(self) -> bool:
        """Whether all of it is there."""
        return bool(self.save_id)

    @property
    def num_bytes(self) -> int:
        """Bytes of its parts."""
        return sum(part.size for part in self.parts.values())


class Grant(NamedTuple):
    """What becomes of a wish for room."""

    kind: str
    """`reuse`, `new`, `disk` or `wait`."""
    piece: Piece | None = None
    """The piece; None where it waits."""


@dataclass(slots=True)
class Shelf:
    """The memory of one node."""

    budget_bytes: int
    """Most bytes in memory."""
    retention: int = 2
    """Complete versions that stay in memory."""
    num_places: int = 1
    """Places where versions are saved beside."""
    pieces: dict[int, Piece] = field(default_factory=dict)
    """What there is, by number."""
    versions: list[Version] = field(default_factory=list)
    """Complete versions, from the oldest on."""
    open: dict[str, Version] = field(default_factory=dict)
    """Versions under way, by tag."""
    dropped: list[Piece] = field(default_factory=list)
    """Given up and not yet taken back; whoever holds the memory empties this."""
    _num_pieces: int = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that is taken, in use or not."""
        return sum(each.size for each in self.pieces.values() if not each.is_on_disk)

    @property
    def newest(self) -> Version | None:
        """The newest complete version."""
        return self.versions[-1] if self.versions else None

    def find(self, tag: str, save_id: str = "") -> Version | None:
        """Return a complete version, the newest of its tag where the save is not named."""
        for version in reversed(self.versions):
            if version.tag == tag and save_id in {"", version.save_id}:
                return version
        return None

    def ask(self, owner: int, size: int) -> Grant:
        """Find room for a part; what has to give way is dropped.

        The part is of one more version: an older one goes before it, whose warm memory it takes.
        """
        for version in self.versions[:-1]:
            if len(self.versions) >= self.retention and self._may_go(version):
                self._evict(version)
        used = self._used_pieces()
        fitting = [
            each
            for each in self.pieces.values()
            if each.owner == owner
            and each not in used
            and not (each.is_filling or each.num_readers or each.is_on_disk)
            and size <= each.size <= 2 * size + _SLACK_BYTES
        ]
        if fitting:
            piece = min(fitting, key=lambda each: each.size)
            piece.is_filling = True
            return Grant("reuse", piece)
        if size > self.budget_bytes:
            return Grant("disk", self._add(owner, size, is_on_disk=True))
        for victim in self._victims():
            if self.used_bytes + size <= self.budget_bytes:
                break
            self._give_up(victim)
        if self.used_bytes + size <= self.budget_bytes:
            return Grant("new", self._add(owner, size))
        newest = self.newest
        if newest is not None and self._is_waiting(newest):
            newest.is_due = True  # it can go when it is saved elsewhere
        if self._is_anything_under_way():
            return Grant("wait")
        return Grant("disk", self._add(owner, size, is_on_disk=True))

    def put(
        self, owner: int, number: int, part: tuple[str, str, int], num_files: int, seconds: float
    ) -> Version:
        """Add a part that was copied; return its version, which may be complete now.

        Args:
            owner: Who.
            number: Of the piece that it lies in.
            part: Tag, name and bytes.
            num_files: Parts that make the version complete, or COMMITTED or GROWING.
            seconds: How long the trainer was held up.
        """
        tag, name, size = part
        piece = self.pieces[number]
        piece.is_filling = False
        version = self.open.get(tag)
        if version is None or version.num_files != num_files:
            version = self.open[tag] = Version(tag, num_files)
            before = self.find(tag)
            if num_files == GROWING and before is not None and name not in before.parts:
                version.parts.update(before.parts)
        version.parts[name] = Part(name, piece, size)
        version.owners.add(owner)
        version.blocked_seconds = max(version.blocked_seconds, seconds)
        self._forget_unused()
        return version

    def is_full(self, version: Version) -> bool:
        """Tell whether an open version has all that it was said to have."""
        if version.num_files == GROWING:
            return bool(version.parts)
        return 0 < version.num_files <= len(version.parts)

    def close(self, version: Version, save_id: str) -> None:
        """Make an open version complete; older ones of its tag, and more than are kept, go."""
        self.open.pop(version.tag, None)
        version.save_id = save_id
        self.versions.append(version)
        for each in [each for each in self.versions[:-1] if each.tag == version.tag]:
            if not each.num_readers:
                self.versions.remove(each)
        for each in self.versions[:-1]:
            if len(self.versions) > self.retention and self._may_go(each):
                self._evict(each)
        self._forget_unused()

    def saved(self, version: Version, place: str, failure: str = "") -> None:
        """Note that a version is saved in another place, or could not be."""
        version.failures.pop(place, None)
        if failure:
            version.failures[place] = failure
        else:
            version.places.add(place)
        for each in self.versions[:-1]:
            if len(self.versions) > self.retention and self._may_go(each):
                self._evict(each)
        self._forget_unused()

    def remove(self, tag: str) -> None:
        """Forget a tag, unless it is the newest, or being saved."""
        for version in self.versions[:-1]:
            if version.tag == tag and not version.num_readers:
                self._evict(version)
        self._forget_unused()

    def abandon(self, number: int, *, is_made: bool = True) -> None:
        """Take back a piece that nothing was copied to after all.

        Args:
            number: Of the piece.
            is_made: Whether its owner has handed it over once; else nobody can fill it again.
        """
        if (piece := self.pieces.get(number)) is not None:
            piece.is_filling = False
            if not is_made:
                self._drop(piece)
            self._forget_unused()

    def leave(self, owner: int, *, is_last: bool = True) -> None:
        """Know that a trainer is gone: what it had not finished goes with it.

        Parts that it had put stay while others are there, whose parts may make a version of them.

        Args:
            owner: Who.
            is_last: Whether nobody else is there.
        """
        for tag, version in list(self.open.items()):
            version.owners.discard(owner)
            if is_last and not version.owners:
                del self.open[tag]
        for piece in self.pieces.values():
            if piece.owner == owner:
                piece.owner, piece.is_filling = 0, False
        self._forget_unused()

    def arrive(self) -> None:
        """Know that a trainer has come: parts of those that are gone will not be completed by it.

        It may be the same training once more, and a version is never made of two runs.
        """
        for tag, version in list(self.open.items()):
            for part in list(version.parts.values()):
                if not part.piece.owner:
                    del version.parts[part.name]
            if not version.parts:
                del self.open[tag]
        self._forget_unused()

    def release(self, piece: Piece) -> None:
        """Know that somebody does not look at a piece any more."""
        piece.num_readers -= 1
        self._forget_unused()

    def _add(self, owner: int, size: int, *, is_on_disk: bool = False) -> Piece:
        self._num_pieces += 1
        piece = Piece(self._num_pieces, owner, size, is_on_disk)
        self.pieces[piece.number] = piece
        return piece

    def _used_pieces(self) -> set[Piece]:
        held = [*self.versions, *self.open.values()]
        return {part.piece for version in held for part in version.parts.values()}

    def _victims(self) -> Iterator[Piece | Version]:
        """Yield what can give way, the cheapest first."""
        used = self._used_pieces()
        for piece in list(self.pieces.values()):
            if not (piece in used or piece.is_filling or piece.num_readers or piece.is_on_disk):
                yield piece
        for version in list(self.versions):
            if self._may_go(version):
                yield version

    def _give_up(self, victim: Piece | Version) -> None:
        if isinstance(victim, Version):
            self._evict(victim)
            for part in victim.parts.values():
                if part.piece in self.pieces.values() and part.piece not in self._used_pieces():
                    self._drop(part.piece)
        else:
            self._drop(victim)

    def _may_go(self, version: Version) -> bool:
        if version.num_readers or any(part.piece.num_readers for part in version.parts.values()):
            return False
        if self._is_due(version):
            return False
        return bool(version.places) or version is not self.newest

    def _is_due(self, version: Version) -> bool:
        return version.is_due and self._is_waiting(version)

    def _is_waiting(self, version: Version) -> bool:
        """Tell whether a version can still come to a place beside."""
        return self.num_places > len(version.places) + len(version.failures)

    def _is_anything_under_way(self) -> bool:
        return any(
            (version.num_readers and not self._has_failed(version))
            or self._is_due(version)
            or self._is_read(version)
            for version in self.versions
        )

    def _has_failed(self, version: Version) -> bool:
        """Tell whether an upload of a version is one more try, which may take minutes to fail."""
        return bool(version.failures) and not self._is_waiting(version)

    @staticmethod
    def _is_read(version: Version) -> bool:
        return any(part.piece.num_readers for part in version.parts.values())

    def _evict(self, version: Version) -> None:
        self.versions.remove(version)

    def _forget_unused(self) -> None:
        """Drop what nobody will fill again: pieces of trainers that are gone, and the disk's."""
        used = self._used_pieces()
        for piece in list(self.pieces.values()):
            is_idle = not (piece in used or piece.is_filling or piece.num_readers)
            if is_idle and (not piece.owner or piece.is_on_disk):
                self._drop(piece)

    def _drop(self, piece: Piece) -> None:
        if self.pieces.pop(piece.number, None) is not None:
            self.dropped.append(piece)

"""Base classes of the scenarios with many objects and of the scenarios with one large object."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from perf.scenarios._scenario import KIB, MIB, Match, Rival, Scenario, Side, matches_against
from perf.work import Work

__all__ = ["ManyObjects", "OneObject"]


@dataclass(frozen=True, kw_only=True)
class _RivalMatches(Scenario):
    """A scenario with one match for each rival."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return matches_against(self.rivals, self._side)

    @abstractmethod
    def _side(self, rival: Rival) -> Side:
        """Return the work and the server of a contender."""


@dataclass(frozen=True, kw_only=True)
class ManyObjects(_RivalMatches):
    """Reads or writes of many objects of one size, `in_flight` at a time."""

    size_bytes: int = 100 * KIB
    """Size of each object."""
    num_objects: int = 3_000
    """Objects that aioflux moves in one sample; a slower peer moves fewer."""
    num_keys: int = 64
    """Number of different objects; they are moved repeatedly."""
    in_flight: int = 64
    """Maximum number of requests in flight."""

    def _work(self, rival: Rival, operation: str) -> Work:
        return Work(
            peer=rival.peer,
            operation=operation,
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            num_keys=self.num_keys,
            in_flight=rival.in_flight or self.in_flight,
        )


@dataclass(frozen=True, kw_only=True)
class OneObject(_RivalMatches):
    """Read or write of one large object, in concurrent ranges or parts."""

    size_bytes: int = 1024 * MIB
    """Size of the object."""
    in_flight: int = 8
    """Maximum number of ranges or parts in flight."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def _work(self, rival: Rival, operation: str, piece_size_bytes: int) -> Work:
        return Work(
            peer=rival.peer,
            operation=operation,
            url="",
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            in_flight=self.in_flight,
            range_size_bytes=piece_size_bytes,
        )

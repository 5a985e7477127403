"""What scenarios have in common that move many objects, or one large one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from perf.scenarios._scenario import KIB, MIB, Match, Rival, Scenario, Turn, duels
from perf.work import Work

__all__ = ["ManyObjects", "OneObject"]


@dataclass(frozen=True, kw_only=True)
class _Duels(Scenario):
    """A scenario in which each rival meets ours once."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return duels(self.rivals, self._turn)

    @abstractmethod
    def _turn(self, rival: Rival) -> Turn:
        """Return what a contender does."""


@dataclass(frozen=True, kw_only=True)
class ManyObjects(_Duels):
    """Objects of one size, so many under way at once."""

    size_bytes: int = 100 * KIB
    """Size of each object."""
    num_objects: int = 3_000
    """Objects that we move in one sample; a slower peer moves fewer."""
    num_keys: int = 64
    """Different objects, which are moved again and again."""
    in_flight: int = 64
    """Requests under way at once."""

    def _work(self, rival: Rival, operation: str) -> Work:
        return Work(
            peer=rival.peer,
            operation=operation,
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            num_keys=self.num_keys,
            in_flight=self.in_flight,
        )


@dataclass(frozen=True, kw_only=True)
class OneObject(_Duels):
    """One large object, so many pieces of it under way at once."""

    size_bytes: int = 1024 * MIB
    """Size of the object."""
    in_flight: int = 8
    """Ranges or parts under way at once."""

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

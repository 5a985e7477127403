"""One object of 1 GiB into a buffer that the caller allocated: get-into."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._scenario import (
    MIB,
    Match,
    MemoryGoal,
    Rival,
    Scenario,
    Turn,
    duels,
    ready_objects,
)
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS", "GetInto"]


@dataclass(frozen=True, kw_only=True)
class GetInto(Scenario):
    """The read of one large object into memory that is there already."""

    size_bytes: int = 1024 * MIB
    """Size of the object and of the buffer."""
    range_size_bytes: int = 16 * MIB
    """Size of a range."""
    in_flight: int = 8
    """Ranges under way at once."""
    spare_bytes: int = 32 * MIB
    """Memory that a read may take beside the buffer."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return duels(self.rivals, self._turn)

    def memory_goal(self) -> MemoryGoal:
        """See base class."""
        return MemoryGoal(limit_bytes=self.size_bytes + self.spare_bytes, is_above_idle=True)

    def toy(self) -> GetInto:
        """See base class."""
        return replace(self, size_bytes=4 * MIB, range_size_bytes=MIB, in_flight=2)

    def _turn(self, rival: Rival) -> Turn:
        work = Work(
            peer=rival.peer,
            operation="get_into",
            url="",
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            in_flight=self.in_flight,
            range_size_bytes=self.range_size_bytes,
        )
        return Turn(work=work, server=ServerSpec(objects=ready_objects(work)))


SCENARIOS = (GetInto(name="get-into", rivals=(Rival(peer="obstore", at_least=1.2),)),)

"""Read of one object of 1 GiB into a buffer of the caller: get-into."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import OneObject
from perf.scenarios._scenario import MIB, MemoryGoal, Rival, Side, ready_objects
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "GetInto"]


@dataclass(frozen=True, kw_only=True)
class GetInto(OneObject):
    """Read of one large object into an allocated buffer."""

    range_size_bytes: int = 16 * MIB
    """Size of a range."""
    spare_bytes: int = 32 * MIB
    """Limit of the memory in addition to the buffer."""

    def memory_goal(self) -> MemoryGoal:
        """See base class."""
        return MemoryGoal(limit_bytes=self.size_bytes + self.spare_bytes, is_above_idle=True)

    def toy(self) -> GetInto:
        """See base class."""
        return replace(self, size_bytes=4 * MIB, range_size_bytes=MIB, in_flight=2)

    def _side(self, rival: Rival) -> Side:
        work = self._work(rival, "get_into", self.range_size_bytes)
        return Side(work=work, server=ServerSpec(objects=ready_objects(work)))


SCENARIOS = (GetInto(name="get-into", rivals=(Rival(peer="obstore", at_least=1.2),)),)

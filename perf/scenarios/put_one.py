"""One object of 1 GiB, written by the multipart or resumable way of each: put-1GiB.

The object exists before the clock starts; our memory is told beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import OneObject
from perf.scenarios._scenario import MIB, MemoryGoal, Rival, Turn
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "PutOne"]


@dataclass(frozen=True, kw_only=True)
class PutOne(OneObject):
    """The write of one large object."""

    part_size_bytes: int = 16 * MIB
    """Size of a part."""
    in_flight: int = 4
    """Parts under way at once."""
    limit_bytes: int = 256 * MIB
    """Most memory that may be resident beside the caller's own bytes."""

    def memory_goal(self) -> MemoryGoal:
        """See base class. What is idle holds the object already."""
        return MemoryGoal(limit_bytes=self.limit_bytes, is_above_idle=True)

    def toy(self) -> PutOne:
        """See base class."""
        return replace(self, size_bytes=12 * MIB, part_size_bytes=5 * MIB, in_flight=2)

    def _turn(self, rival: Rival) -> Turn:
        work = self._work(rival, "put_one", self.part_size_bytes)
        # The object as it was, its parts, and the whole that they become: at once.
        return Turn(work=work, server=ServerSpec(written_bytes=3 * self.size_bytes + 64 * MIB))


SCENARIOS = (
    PutOne(
        name="put-1GiB",
        rivals=(
            Rival(peer="obstore", at_least=1.2),
            Rival(peer="gcloud_aio", at_least=2.0),
            Rival(peer="transfer_manager", at_least=2.0),
        ),
    ),
)

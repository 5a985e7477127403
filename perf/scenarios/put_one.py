"""Multipart or resumable upload of one object of 1 GiB: put-1GiB.

The bytes are created before the measured part; the memory limit does not include them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import OneObject
from perf.scenarios._scenario import MIB, MemoryGoal, Rival, Side
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "PutOne"]


@dataclass(frozen=True, kw_only=True)
class PutOne(OneObject):
    """Write of one large object."""

    part_size_bytes: int = 16 * MIB
    """Size of a part."""
    in_flight: int = 4
    """Maximum number of parts in flight."""
    is_tls: bool = False
    """Whether the server uses TLS 1.3."""
    limit_bytes: int = 256 * MIB
    """Limit of the memory in addition to the caller's bytes."""

    def memory_goal(self) -> MemoryGoal:
        """See base class."""
        return MemoryGoal(limit_bytes=self.limit_bytes, is_above_idle=True)

    def toy(self) -> PutOne:
        """See base class."""
        return replace(self, size_bytes=12 * MIB, part_size_bytes=5 * MIB, in_flight=2)

    def _side(self, rival: Rival) -> Side:
        work = self._work(rival, "put_one", self.part_size_bytes)
        # The server stores the old object, the parts and the new object at the same time.
        room = 3 * self.size_bytes + 64 * MIB
        return Side(work=work, server=ServerSpec(tls=self.is_tls, written_bytes=room))


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

"""`put_many` of objects of 100 KiB: put-many."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import ManyObjects
from perf.scenarios._scenario import MIB, Rival, Side
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "PutMany"]


@dataclass(frozen=True, kw_only=True)
class PutMany(ManyObjects):
    """Concurrent writes of whole objects."""

    def toy(self) -> PutMany:
        """See base class."""
        return replace(self, num_objects=16, num_keys=4, in_flight=4)

    def _side(self, rival: Rival) -> Side:
        work = self._work(rival, "put_many")
        room = 2 * self.size_bytes * (self.num_keys + self.in_flight) + 64 * MIB
        return Side(work=work, server=ServerSpec(written_bytes=room))


SCENARIOS = (
    PutMany(
        name="put-many",
        rivals=(
            Rival(peer="obstore", at_least=1.5),
            Rival(peer="gcloud_aio", at_least=3.0),
        ),
    ),
)

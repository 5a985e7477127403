"""Many objects of 100 KiB through `put_many`: put-many."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._scenario import KIB, MIB, Match, Rival, Scenario, Turn, duels
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS", "PutMany"]


@dataclass(frozen=True, kw_only=True)
class PutMany(Scenario):
    """Writes of whole objects, so many under way at once."""

    size_bytes: int = 100 * KIB
    """Size of each object."""
    num_objects: int = 3_000
    """Objects that we write in one sample; a slower peer writes fewer."""
    num_keys: int = 64
    """Different keys, which are written again and again."""
    in_flight: int = 64
    """Writes under way at once."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return duels(self.rivals, self._turn)

    def toy(self) -> PutMany:
        """See base class."""
        return replace(self, num_objects=16, num_keys=4, in_flight=4)

    def _turn(self, rival: Rival) -> Turn:
        work = Work(
            peer=rival.peer,
            operation="put_many",
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            num_keys=self.num_keys,
            in_flight=self.in_flight,
        )
        room = 2 * self.size_bytes * (self.num_keys + self.in_flight) + 64 * MIB
        return Turn(work=work, server=ServerSpec(written_bytes=room))


SCENARIOS = (
    PutMany(
        name="put-many",
        rivals=(
            Rival(peer="obstore", at_least=1.5),
            Rival(peer="gcloud_aio", at_least=3.0),
        ),
    ),
)

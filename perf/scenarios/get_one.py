"""One object of 1 GiB into memory: object-1GiB and object-1GiB-tls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._scenario import MIB, Match, Rival, Scenario, Turn, duels, ready_objects
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS", "GetOne"]


@dataclass(frozen=True, kw_only=True)
class GetOne(Scenario):
    """The read of one large object, by the fastest way that each contender has."""

    size_bytes: int = 1024 * MIB
    """Size of the object."""
    range_size_bytes: int = 16 * MIB
    """Size of a range, where the contender reads by ranges."""
    in_flight: int = 8
    """Ranges under way at once."""
    is_tls: bool = False
    """Whether the server speaks TLS 1.3."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return duels(self.rivals, self._turn)

    def toy(self) -> GetOne:
        """See base class."""
        return replace(self, size_bytes=4 * MIB, range_size_bytes=MIB, in_flight=2)

    def _turn(self, rival: Rival) -> Turn:
        work = Work(
            peer=rival.peer,
            operation="get_one",
            url="",
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            in_flight=self.in_flight,
            range_size_bytes=self.range_size_bytes,
        )
        return Turn(work=work, server=ServerSpec(tls=self.is_tls, objects=ready_objects(work)))


_RIVALS = (
    Rival(peer="obstore", at_least=1.1),
    Rival(peer="gcloud_aio", at_least=1.4),
    Rival(peer="transfer_manager", at_least=2.0),
)
SCENARIOS = (
    GetOne(name="object-1GiB", rivals=_RIVALS),
    GetOne(name="object-1GiB-tls", is_tls=True, rivals=_RIVALS),
)

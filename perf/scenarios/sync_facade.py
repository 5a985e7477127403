"""`get_many` of the blocking face beside the asynchronous one: sync."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._scenario import KIB, OURS, Match, Rival, Scenario, Turn, duels, ready_objects
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS", "Sync"]

_FACADE = Rival(peer="aioflux_sync")


@dataclass(frozen=True, kw_only=True)
class Sync(Scenario):
    """Reads of whole objects from a thread that has no loop."""

    size_bytes: int = 100 * KIB
    """Size of each object."""
    num_objects: int = 3_000
    """Objects of one sample."""
    num_keys: int = 64
    """Different objects."""
    in_flight: int = 64
    """Reads under way at once."""
    async_share: float = 0.85
    """Share to reach of the asynchronous rate."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        own = Match(
            ours=self._turn(_FACADE),
            theirs=self._turn(OURS),
            label="async",
            at_least=self.async_share,
        )
        return (own, *duels(self.rivals, self._turn, ours=_FACADE))

    def toy(self) -> Sync:
        """See base class."""
        return replace(self, num_objects=32, num_keys=4, in_flight=4)

    def _turn(self, rival: Rival) -> Turn:
        work = Work(
            peer=rival.peer,
            operation="get_many",
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            num_keys=self.num_keys,
            in_flight=self.in_flight,
        )
        return Turn(work=work, server=ServerSpec(objects=ready_objects(work)))


SCENARIOS = (Sync(name="sync"),)

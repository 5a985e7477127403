"""`get_many` of the blocking face beside the asynchronous one: sync."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import ManyObjects
from perf.scenarios._scenario import OURS, Match, Rival, Turn, duels, ready_objects
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "Sync"]

_FACADE = Rival(peer="aioflux_sync")


@dataclass(frozen=True, kw_only=True)
class Sync(ManyObjects):
    """Reads of whole objects from a thread that has no loop."""

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
        work = self._work(rival, "get_many")
        return Turn(work=work, server=ServerSpec(objects=ready_objects(work)))


SCENARIOS = (Sync(name="sync"),)

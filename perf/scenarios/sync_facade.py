"""`get_many` of the blocking store, compared with the asynchronous store: sync."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import ManyObjects
from perf.scenarios._scenario import OURS, Match, Rival, Side, matches_against, ready_objects
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "Sync"]

_FACADE = Rival(peer="aioflux_sync")


@dataclass(frozen=True, kw_only=True)
class Sync(ManyObjects):
    """Blocking reads of whole objects."""

    async_share: float = 0.85
    """Goal, as a share of the rate of the asynchronous store."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        own = Match(
            ours=self._side(_FACADE),
            theirs=self._side(OURS),
            label="async",
            at_least=self.async_share,
        )
        return (own, *matches_against(self.rivals, self._side, ours=_FACADE))

    def toy(self) -> Sync:
        """See base class."""
        return replace(self, num_objects=32, num_keys=4, in_flight=4)

    def _side(self, rival: Rival) -> Side:
        work = self._work(rival, "get_many")
        return Side(work=work, server=ServerSpec(objects=ready_objects(work)))


SCENARIOS = (Sync(name="sync"),)

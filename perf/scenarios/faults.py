"""Reads from a server that refuses some and cuts off others, beside the same undisturbed: faults.

That nothing is lost is checked in every sample: one whose bytes are not all there has failed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import ManyObjects
from perf.scenarios._scenario import OURS, Match, Rival, Turn, duels, ready_objects
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "Faults"]


@dataclass(frozen=True, kw_only=True)
class Faults(ManyObjects):
    """Reads of whole objects, some of which meet a 503 or a reset."""

    num_objects: int = 10_000
    """Objects of one sample."""
    fault_rate: float = 0.01
    """Share of the reads that meet a 503, and again as many a reset."""
    clean_share: float = 0.9
    """Share to reach of the undisturbed rate."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        own = Match(
            ours=self._turn(OURS),
            theirs=self._turn(OURS, is_clean=True),
            label="clean",
            at_least=self.clean_share,
        )
        return (own, *duels(self.rivals, self._turn))

    def toy(self) -> Faults:
        """See base class."""
        return replace(self, num_objects=100, num_keys=4, in_flight=4, fault_rate=0.03)

    def _turn(self, rival: Rival, *, is_clean: bool = False) -> Turn:
        work = self._work(rival, "get_many")
        fault_rate = 0.0 if is_clean else self.fault_rate
        spec = ServerSpec(kind="embedded", fault_rate=fault_rate, objects=ready_objects(work))
        return Turn(work=work, server=spec)


SCENARIOS = (Faults(name="faults"),)

"""Reads from a server with some 503s and resets, compared with a server without faults: faults.

A sample fails if it does not read all bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import ManyObjects
from perf.scenarios._scenario import OURS, Match, Rival, Side, matches_against, ready_objects
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "Faults"]


@dataclass(frozen=True, kw_only=True)
class Faults(ManyObjects):
    """Reads of whole objects; some requests fail with a 503 or a reset."""

    num_objects: int = 10_000
    """Objects of one sample."""
    fault_rate: float = 0.01
    """Share of the requests that fail with a 503, and share that fail with a reset."""
    clean_share: float = 0.9
    """Goal, as a share of the rate without faults."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        own = Match(
            ours=self._side(OURS),
            theirs=self._side(OURS, is_clean=True),
            label="clean",
            at_least=self.clean_share,
        )
        return (own, *matches_against(self.rivals, self._side))

    def toy(self) -> Faults:
        """See base class."""
        return replace(self, num_objects=100, num_keys=4, in_flight=4, fault_rate=0.03)

    def _side(self, rival: Rival, *, is_clean: bool = False) -> Side:
        work = self._work(rival, "get_many")
        fault_rate = 0.0 if is_clean else self.fault_rate
        spec = ServerSpec(kind="embedded", fault_rate=fault_rate, objects=ready_objects(work))
        return Side(work=work, server=spec)


SCENARIOS = (
    Faults(
        name="faults",
        rivals=(
            Rival(peer="obstore"),
            Rival(peer="gcloud_aio", share=0.2),
            Rival(peer="google", share=0.05),
        ),
    ),
)

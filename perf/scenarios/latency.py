"""Reads from a server that takes its time to the first byte: latency."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from perf.scenarios._scenario import KIB, Match, Rival, Scenario, Turn, ready_objects
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS", "Latency"]


@dataclass(frozen=True, kw_only=True)
class Latency(Scenario):
    """Reads of whole objects whose first byte is late, at several numbers under way at once."""

    size_bytes: int = 100 * KIB
    """Size of each object."""
    latency_seconds: float = 0.03
    """Time to the first byte."""
    in_flight: tuple[int, ...] = (64, 256, 1024)
    """Reads under way at once, case by case."""
    num_rounds: int = 24
    """Objects of one sample, for each read under way."""
    max_objects: int = 8_000
    """Most objects of one sample."""
    num_keys: int = 64
    """Different objects."""
    bound_share: float = 0.9
    """Share to reach of the lesser of `in flight / latency` and our rate without latency."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return tuple(match for in_flight in self.in_flight for match in self._case(in_flight))

    def toy(self) -> Latency:
        """See base class."""
        return replace(self, in_flight=(4,), num_rounds=4, num_keys=4, latency_seconds=0.01)

    def scaled(self, factor: float) -> Latency:
        """See base class."""
        return replace(
            self,
            num_rounds=max(1, round(self.num_rounds * factor)),
            max_objects=max(1, round(self.max_objects * factor)),
        )

    def _case(self, in_flight: int) -> tuple[Match, ...]:
        case = f"{in_flight} in flight"
        num_objects = min(in_flight * self.num_rounds, self.max_objects)
        ours = self._turn("aioflux", num_objects, in_flight, self.latency_seconds)
        bound = Match(
            case=case,
            ours=ours,
            theirs=self._turn("aioflux", num_objects, in_flight, 0.0),
            label="bound",
            at_least=self.bound_share,
            cap_per_second=in_flight / self.latency_seconds if self.latency_seconds else math.inf,
        )
        against = (
            Match(
                case=case,
                ours=ours,
                theirs=self._turn(
                    rival.peer, rival.num_objects(num_objects), in_flight, self.latency_seconds
                ),
                at_least=rival.at_least,
            )
            for rival in self.rivals
        )
        return (bound, *against)

    def _turn(self, peer: str, num_objects: int, in_flight: int, latency: float) -> Turn:
        work = Work(
            peer=peer,
            operation="get_many",
            url="",
            size_bytes=self.size_bytes,
            num_objects=num_objects,
            num_keys=self.num_keys,
            in_flight=in_flight,
        )
        spec = ServerSpec(latency_seconds=latency, objects=ready_objects(work))
        return Turn(work=work, server=spec)


SCENARIOS = (
    Latency(
        name="latency",
        rivals=(
            Rival(peer="obstore", at_least=1.0, share=1.0),
            Rival(peer="gcloud_aio", at_least=1.0, share=0.5),
            Rival(peer="google", at_least=1.0),
        ),
    ),
)

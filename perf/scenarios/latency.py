"""Reads from a server that takes its time to the first byte: latency."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from perf.scenarios._scenario import KIB, OURS, Match, Rival, Scenario, Turn, duels, ready_objects
from perf.servers import ServerSpec
from perf.work import LOOPLESS, TIMED, Work

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
    max_objects: int = 4_000
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
        turn = partial(self._turn, in_flight)
        bound = Match(
            case=case,
            ours=turn(OURS),
            theirs=turn(OURS, is_prompt=True),
            label="bound",
            at_least=self.bound_share,
            cap_per_second=in_flight / self.latency_seconds if self.latency_seconds else math.inf,
        )
        return (bound, *duels(self._rivals(in_flight), turn, case=case))

    def _rivals(self, in_flight: int) -> tuple[Rival, ...]:
        """Return the rivals of a case: those with a pool of threads in the first one alone.

        They have as many reads under way as threads, whatever they are asked for.
        """
        if in_flight == self.in_flight[0]:
            return self.rivals
        return tuple(rival for rival in self.rivals if rival.peer not in LOOPLESS - TIMED)

    def _turn(self, in_flight: int, rival: Rival, *, is_prompt: bool = False) -> Turn:
        ours = min(in_flight * self.num_rounds, self.max_objects)
        work = Work(
            peer=rival.peer,
            operation="get_many",
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(ours),
            num_keys=self.num_keys,
            in_flight=in_flight,
        )
        latency = 0.0 if is_prompt else self.latency_seconds
        spec = ServerSpec(latency_seconds=latency, objects=ready_objects(work))
        return Turn(work=work, server=spec)


SCENARIOS = (
    Latency(
        name="latency",
        rivals=(
            Rival(peer="obstore", at_least=1.0, share=1.0),
            Rival(peer="gcloud_aio", at_least=1.0, share=0.5),
            Rival(peer="google", at_least=1.0),
            # Tells what the server can do: its timers are late, too.
            Rival(peer="wrk"),
        ),
    ),
)

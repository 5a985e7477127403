"""Reads from a server that delays the first byte of each response: latency."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from perf.scenarios._scenario import (
    KIB,
    OURS,
    Match,
    Rival,
    Scenario,
    Side,
    matches_against,
    ready_objects,
)
from perf.servers import ServerSpec
from perf.work import BLOCKING, TIMED, Work

__all__ = ["SCENARIOS", "Latency"]


@dataclass(frozen=True, kw_only=True)
class Latency(Scenario):
    """Reads of whole objects with latency, with several numbers of requests in flight."""

    size_bytes: int = 100 * KIB
    """Size of each object."""
    latency_seconds: float = 0.03
    """Time to the first byte."""
    in_flight: tuple[int, ...] = (64, 256, 1024)
    """Numbers of requests in flight; each is a case."""
    num_rounds: int = 24
    """Objects of one sample, divided by the number of requests in flight."""
    max_objects: int = 4_000
    """Maximum number of objects of one sample."""
    num_keys: int = 64
    """Different objects."""
    bound_share: float = 0.9
    """Goal, as a share of the bound: `in_flight / latency_seconds` or our rate without latency,
    whichever is lower."""

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
        side = partial(self._side, in_flight)
        bound = Match(
            case=case,
            ours=side(OURS),
            theirs=side(OURS, is_prompt=True),
            label="bound",
            at_least=self.bound_share,
            cap_per_second=in_flight / self.latency_seconds if self.latency_seconds else math.inf,
        )
        return (bound, *matches_against(self._rivals(in_flight), side, case=case))

    def _rivals(self, in_flight: int) -> tuple[Rival, ...]:
        """Return the rivals of a case. Rivals with threads take part only in the first case.

        They have one request in flight for each thread, regardless of `in_flight`.
        """
        if in_flight == self.in_flight[0]:
            return self.rivals
        return tuple(rival for rival in self.rivals if rival.peer not in BLOCKING - TIMED)

    def _side(self, in_flight: int, rival: Rival, *, is_prompt: bool = False) -> Side:
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
        return Side(work=work, server=spec)


SCENARIOS = (
    Latency(
        name="latency",
        rivals=(
            Rival(peer="obstore", at_least=1.0, share=1.0),
            Rival(peer="gcloud_aio", at_least=1.0, share=0.5),
            Rival(peer="google", at_least=1.0),
            # Shows the limit of the server, whose timers are also late.
            Rival(peer="wrk"),
        ),
    ),
)

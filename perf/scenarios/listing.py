"""A complete listing of a prefix, in memory: list-1M."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._scenario import Match, Rival, Scenario, Side, matches_against
from perf.scenarios._sets import on_one_server
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS"]


@dataclass(frozen=True, kw_only=True)
class List(Scenario):
    """Listings of a set, with latency."""

    is_by_name_only = True

    num_objects: int
    """Objects below the prefix; a slower peer lists fewer."""
    size_bytes: int = 1000
    """Size of each object in the listing."""
    latency_seconds: float = 0.02
    """Time to the first byte of a page."""
    in_flight: int = 64
    """Maximum number of pages in flight, for contenders that request pages concurrently."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(matches_against(self.rivals, self._side))

    def toy(self) -> List:
        """See base class."""
        return replace(self, num_objects=1_200, latency_seconds=0.001)

    def _side(self, rival: Rival) -> Side:
        work = Work(
            peer=rival.peer,
            operation="list_all",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            is_set=True,
            in_flight=self.in_flight,
        )
        return Side(work=work, server=ServerSpec(latency_seconds=self.latency_seconds))


SCENARIOS = (
    List(
        name="list-1M",
        num_objects=1_000_000,
        rivals=(Rival(peer="google", at_least=5.0, share=0.1),),
    ),
)

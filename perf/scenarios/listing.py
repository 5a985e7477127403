"""Listings of sets: list-10, list-10k, list-1M; parse-1M, without a server, and parse-1M-http.

parse-1M parses pages that are in memory: one process parses and checks each page, and appends its
columns to one listing. parse-1M-http lists as many objects from a server without added latency. The
server renders pages at the same time, so on few cores its CPU time reduces the rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._scenario import OURS, Match, Promise, Rival, Scenario, Side, matches_against
from perf.scenarios._sets import on_one_server
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["GROUP", "SCENARIOS", "List", "Parse"]

GROUP = "list"


@dataclass(frozen=True, kw_only=True)
class List(Scenario):
    """A complete listing of a prefix, in memory."""

    is_by_name_only = True

    num_objects: int
    """Objects below the prefix; a slower peer lists fewer."""
    size_bytes: int = 1000
    """Size of each object in the listing."""
    latency_seconds: float = 0.02
    """Time to the first byte of a page."""
    in_flight: int = 64
    """Maximum number of pages in flight, for contenders that request pages concurrently."""
    most_requests: int = 0
    """Goal: maximum number of requests of aioflux; 0 without a goal."""
    least_per_second: int = 0
    """Goal: objects per second of aioflux; 0 without a goal."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(
            Match(ours=self._side(OURS), theirs=self._side(rival), at_least=rival.at_least)
            for rival in self.rivals
        )

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        found = []
        if self.most_requests:
            found.append(Promise(figure="requests", at_most=self.most_requests))
        if self.least_per_second:
            found.append(Promise(figure="objects/s", at_least=self.least_per_second))
        return tuple(found)

    def toy(self) -> List:
        """See base class."""
        return replace(
            self,
            num_objects=min(self.num_objects, 1_200),
            latency_seconds=min(self.latency_seconds, 0.001),
            least_per_second=min(self.least_per_second, 1),
        )

    def _side(self, rival: Rival) -> Side:
        work = Work(
            peer=rival.peer,
            operation="list_all",
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            is_set=True,
            in_flight=self.in_flight,
        )
        return Side(work=work, server=ServerSpec(latency_seconds=self.latency_seconds))


@dataclass(frozen=True, kw_only=True)
class Parse(Scenario):
    """Parsing of pages that are in memory."""

    is_by_name_only = True

    num_objects: int
    """Objects in the pages; a slower peer parses fewer."""
    size_bytes: int = 1000
    """Size of each object in the pages."""
    least_per_second: int
    """Goal: objects per second of aioflux."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(matches_against(self.rivals, self._side))

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="objects/s", at_least=self.least_per_second),)

    def toy(self) -> Parse:
        """See base class."""
        return replace(self, num_objects=min(self.num_objects, 1_200), least_per_second=1)

    def _side(self, rival: Rival) -> Side:
        work = Work(
            peer=rival.peer,
            operation="parse_all",
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            is_set=True,
        )
        return Side(work=work, server=ServerSpec())


SCENARIOS = (
    List(
        name="list-10",
        num_objects=10,
        most_requests=1,
        rivals=(
            Rival(peer="google", share=1.0),
            Rival(peer="dataflux"),
            Rival(peer="obstore", share=1.0),
            Rival(peer="gcsfs", share=1.0),
        ),
    ),
    List(
        name="list-10k",
        num_objects=10_000,
        rivals=(
            Rival(peer="google", at_least=2.0, share=1.0),
            Rival(peer="dataflux", at_least=3.0),
            Rival(peer="obstore", share=1.0),
            Rival(peer="gcsfs", share=1.0),
        ),
    ),
    List(
        name="list-1M",
        num_objects=1_000_000,
        rivals=(
            Rival(peer="google", at_least=5.0, share=0.1),
            Rival(peer="dataflux", share=0.1),
            Rival(peer="obstore", share=0.1),
            Rival(peer="gcsfs", share=0.1),
        ),
    ),
    Parse(
        name="parse-1M",
        num_objects=1_000_000,
        least_per_second=500_000,
        rivals=(Rival(peer="google", share=0.1),),
    ),
    List(
        name="parse-1M-http",
        num_objects=1_000_000,
        latency_seconds=0.0,
        rivals=(Rival(peer="google", share=0.1), Rival(peer="obstore", share=0.2)),
    ),
)

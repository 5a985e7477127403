"""Listings of sets: list-10, list-10k, list-1M; parse-1M, without a server, and parse-1M-http.

parse-1M is one process, and nothing else runs beside it: the pages were rendered before, and lie in
its memory. Each is parsed, checked and made columns, which are joined to one listing that is held.
parse-1M-http is the whole listing of as many objects, from a server that is prompt. That server
renders pages meanwhile, so that where there are few CPUs its work is a part of the figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._scenario import OURS, Match, Promise, Rival, Scenario, Turn, duels
from perf.scenarios._sets import on_one_server
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["GROUP", "SCENARIOS", "List", "Parse"]

GROUP = "list"


@dataclass(frozen=True, kw_only=True)
class List(Scenario):
    """All objects below a prefix, held in memory."""

    num_objects: int
    """Objects below it; a slower peer lists fewer, page after page."""
    size_bytes: int = 1000
    """Size that is told of each."""
    latency_seconds: float = 0.02
    """Time to the first byte of a page."""
    in_flight: int = 64
    """Pages under way at once, where a contender asks for several."""
    most_requests: int = 0
    """Requests that ours may send; 0 promises nothing."""
    least_per_second: int = 0
    """Objects that ours must list in a second; 0 promises nothing."""

    @property
    def is_by_name_only(self) -> bool:
        """See base class."""
        return True

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(
            Match(ours=self._turn(OURS), theirs=self._turn(rival), at_least=rival.at_least)
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

    def _turn(self, rival: Rival) -> Turn:
        work = Work(
            peer=rival.peer,
            operation="list_all",
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            is_set=True,
            in_flight=self.in_flight,
        )
        return Turn(work=work, server=ServerSpec(latency_seconds=self.latency_seconds))


@dataclass(frozen=True, kw_only=True)
class Parse(Scenario):
    """Pages that lie in memory, parsed and held by one process."""

    num_objects: int
    """Objects in the pages; a slower peer parses fewer."""
    size_bytes: int = 1000
    """Size that is told of each."""
    least_per_second: int
    """Objects that ours must parse in a second."""

    @property
    def is_by_name_only(self) -> bool:
        """See base class."""
        return True

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(duels(self.rivals, self._turn))

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="objects/s", at_least=self.least_per_second),)

    def toy(self) -> Parse:
        """See base class."""
        return replace(self, num_objects=min(self.num_objects, 1_200), least_per_second=1)

    def _turn(self, rival: Rival) -> Turn:
        work = Work(
            peer=rival.peer,
            operation="parse_all",
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            is_set=True,
        )
        return Turn(work=work, server=ServerSpec())


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

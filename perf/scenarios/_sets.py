"""Base class of the scenarios that read an epoch of a dataset, and their sets of objects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from perf._pairs import warm_up_work
from perf.scenarios._scenario import KIB, Match, Rival, Scenario, Side
from perf.servers import ServerSpec
from perf.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

__all__ = ["OURS", "Epoch", "on_one_server"]

OURS = Rival(peer="aioflux_data")
"""aioflux, through its datasets."""
_COMPOSED_BYTES = 1 << 30
"""Space for composites, which dataflux writes. The server stores one file for each number of
composed objects."""


@dataclass(frozen=True, kw_only=True)
class Epoch(Scenario):
    """An epoch over a set of objects; each object is read once."""

    is_by_name_only = True
    operation: ClassVar[str]
    """`load` reads a map-style dataset, `stream` an iterable dataset."""

    size_bytes: int = 100 * KIB
    """Size of each object."""
    num_objects: int = 20_000
    """Objects of an epoch of aioflux; the epoch of a slower peer has fewer."""
    batch_size: int = 100
    """Objects in a batch."""
    num_workers: int = 2
    """DataLoader workers."""
    latency_seconds: float = 0.02
    """Time to the first byte."""
    connection_bytes_per_second: int = 50_000_000
    """Bandwidth of each connection."""

    def toy(self) -> Self:
        """See base class."""
        return replace(
            self,
            size_bytes=4 * KIB,
            num_objects=24,
            batch_size=4,
            num_workers=1,
            latency_seconds=0.001,
        )

    def _ours(self) -> Work:
        return self._work(OURS, self.operation)

    def _work(self, rival: Rival, operation: str) -> Work:
        return Work(
            peer=rival.peer,
            operation=operation,
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            is_set=True,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
        )

    def _side(self, work: Work) -> Side:
        """Return the work and the server of a contender; `on_one_server` adds the server's sets."""
        spec = ServerSpec(
            written_bytes=_COMPOSED_BYTES,
            latency_seconds=self.latency_seconds,
            connection_bytes_per_second=self.connection_bytes_per_second,
        )
        return Side(work=work, server=spec)


def on_one_server(matches: Iterable[Match]) -> tuple[Match, ...]:
    """Return the matches on one common server with all sets of their works and warm-ups."""
    played = tuple(matches)
    works = [side.work for match in played for side in (match.ours, match.theirs)]
    sets = {
        (each.size_bytes, each.num_objects)
        for work in works
        for whole in (work, warm_up_work(work))
        for each in (whole, whole.warm_up())
    }

    def moved(side: Side) -> Side:
        return replace(side, server=replace(side.server, sets=tuple(sorted(sets))))

    return tuple(
        replace(match, ours=moved(match.ours), theirs=moved(match.theirs)) for match in played
    )

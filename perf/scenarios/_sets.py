"""What scenarios have in common that list or load sets of many objects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perf._pairs import eased
from perf.scenarios._scenario import MIB, Match, Rival, Scenario, Turn
from perf.servers import ServerSpec
from perf.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["OURS", "Sets", "on_one_server"]

OURS = Rival(peer="aioflux_data")
"""Ourselves, through the datasets."""
_COMPOSED_BYTES = 1024 * MIB
"""Room for composites: as many as there are numbers of sources, each kept once."""


@dataclass(frozen=True, kw_only=True)
class Sets(Scenario):
    """Epochs over a set of objects, each of which is read once."""

    size_bytes: int
    """Size of each object."""
    num_objects: int
    """Objects of our epoch; that of a slower peer has fewer."""
    batch_size: int = 100
    """Objects of a batch."""
    num_workers: int = 2
    """DataLoader workers."""
    latency_seconds: float = 0.02
    """Time to the first byte."""
    connection_bytes_per_second: int = 50_000_000
    """Bandwidth of each connection."""
    is_whole: bool = False
    """Whether the consumer is handed the bytes, as tensors, or only how many there are: then what a
    worker sends is no part of what is measured, as with decoders that give far less than they take.
    """

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes if self.size_bytes >= MIB else 0

    @property
    def is_by_name_only(self) -> bool:
        """See base class."""
        return True

    def _work(self, rival: Rival, operation: str) -> Work:
        return Work(
            peer=rival.peer,
            operation=operation,
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            is_set=True,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            is_whole=self.is_whole,
        )

    def _turn(self, work: Work) -> Turn:
        """Return what a contender does, on the server whose sets `on_one_server` fills in."""
        spec = ServerSpec(
            latency_seconds=self.latency_seconds,
            connection_bytes_per_second=self.connection_bytes_per_second,
            written_bytes=_COMPOSED_BYTES,
        )
        return Turn(work=work, server=spec)


def on_one_server(matches: Iterable[Match]) -> tuple[Match, ...]:
    """Have the same server for all, with every set that one of them reads or warms up with."""
    played = tuple(matches)
    works = [turn.work for match in played for turn in (match.ours, match.theirs)]
    sets = {
        (each.size_bytes, each.num_objects)
        for work in works
        for whole in (work, eased(work))
        for each in (whole, whole.warm_up())
    }

    def moved(turn: Turn) -> Turn:
        return replace(turn, server=replace(turn.server, sets=tuple(sorted(sets))))

    return tuple(
        replace(match, ours=moved(match.ours), theirs=moved(match.theirs)) for match in played
    )

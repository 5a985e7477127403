"""Base class of the scenarios that read one epoch of a dataset, and their sets of objects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypedDict

from perf.scenarios._scenario import KIB, MIB, Match
from perf.scenarios._sets import OURS, Sets, on_one_server

if TYPE_CHECKING:
    from typing import Self

    from perf.work import Work

__all__ = ["SETS", "Epoch", "ObjectSet"]


class ObjectSet(TypedDict):
    """Objects of an epoch, and their number in a batch."""

    size_bytes: int
    num_objects: int
    batch_size: int


SETS: dict[str, ObjectSet] = {
    "100KiB": {"size_bytes": 100 * KIB, "num_objects": 20_000, "batch_size": 100},
    "500KiB": {"size_bytes": 500 * KIB, "num_objects": 4_000, "batch_size": 100},
    "3MiB": {"size_bytes": 3 * MIB, "num_objects": 600, "batch_size": 20},
    "150MiB": {"size_bytes": 150 * MIB, "num_objects": 12, "batch_size": 1},
}
"""Sets by the size of their objects; each set has about 2 GB. Batches of large objects are smaller,
so that each of the two workers loads several batches."""


@dataclass(frozen=True, kw_only=True)
class Epoch(Sets):
    """One epoch of an aioflux dataset, compared with each peer."""

    operation: ClassVar[str]
    """`load` reads a map-style dataset, `stream` an iterable dataset."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(self._peer_matches())

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

    def _peer_matches(self) -> list[Match]:
        ours = self._side(self._ours())
        return [
            Match(
                ours=ours,
                theirs=self._side(self._work(rival, self.operation)),
                label=rival.peer.removesuffix("_data"),
                at_least=rival.at_least,
            )
            for rival in self.rivals
        ]

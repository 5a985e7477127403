"""What scenarios that take datasets through an epoch have in common, and the sets of objects."""

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
    """Objects of an epoch, and how many of them are a batch."""

    size_bytes: int
    num_objects: int
    batch_size: int


SETS: dict[str, ObjectSet] = {
    "100KiB": {"size_bytes": 100 * KIB, "num_objects": 20_000, "batch_size": 100},
    "500KiB": {"size_bytes": 500 * KIB, "num_objects": 4_000, "batch_size": 100},
    "3MiB": {"size_bytes": 3 * MIB, "num_objects": 600, "batch_size": 20},
    "150MiB": {"size_bytes": 150 * MIB, "num_objects": 12, "batch_size": 1},
}
"""2 GB each, by the size of the objects. Of large ones there are fewer in a batch, so that both
workers have several."""


@dataclass(frozen=True, kw_only=True)
class Epoch(Sets):
    """One epoch of our dataset, beside that of each peer."""

    operation: ClassVar[str]
    """What contenders do: `load` from a map-style dataset, `stream` from an iterable one."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(self._duels())

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

    def _duels(self) -> list[Match]:
        ours = self._turn(self._ours())
        return [
            Match(
                ours=ours,
                theirs=self._turn(self._work(rival, self.operation)),
                label=rival.peer.removesuffix("_data"),
                at_least=rival.at_least,
            )
            for rival in self.rivals
        ]

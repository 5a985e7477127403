"""An epoch of a map-style dataset in DataLoader workers: loader-100KiB."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from perf.scenarios._scenario import Match, Rival
from perf.scenarios._sets import Epoch, on_one_server

__all__ = ["SCENARIOS"]


@dataclass(frozen=True, kw_only=True)
class Loader(Epoch):
    """One epoch, compared with each peer, and with dataflux with more threads."""

    operation: ClassVar[str] = "load"
    threads: int = 16
    """Value of dataflux's `threads_per_process` (default: 1) in a match of its own."""
    threads_share: float = 0.4
    """Objects that dataflux loads in this match, as a share of ours."""
    least_to_best: float = 3.0
    """Goal of the ratio in this match."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        ours = self._side(self._ours())
        played = [
            Match(
                ours=ours,
                theirs=self._side(self._work(rival, "load")),
                at_least=rival.at_least,
            )
            for rival in self.rivals
        ]
        if any(rival.peer == "dataflux" for rival in self.rivals):
            work = self._work(Rival(peer="dataflux", share=self.threads_share), "load")
            threaded = Match(
                ours=ours,
                theirs=self._side(replace(work, num_threads=self.threads)),
                label=f"dataflux x{self.threads}",
                at_least=self.least_to_best,
            )
            played.append(threaded)
        return on_one_server(played)


SCENARIOS = (
    Loader(
        name="loader-100KiB",
        rivals=(
            Rival(peer="dataflux", at_least=10.0, share=0.15),
            Rival(peer="direct", at_least=40.0, share=0.03),
            Rival(peer="litdata", share=0.5),
        ),
    ),
)

"""Epochs of map-style datasets in DataLoader workers: loader-100KiB, -500KiB, -3MiB, -150MiB."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from perf.scenarios._epochs import SETS, Epoch
from perf.scenarios._scenario import Match, Rival
from perf.scenarios._sets import on_one_server

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GROUP", "SCENARIOS", "Loader"]

GROUP = "loader"


@dataclass(frozen=True, kw_only=True)
class Loader(Epoch):
    """One epoch, compared with each peer, and with dataflux at several numbers of threads."""

    operation: ClassVar[str] = "load"
    threads: tuple[int, ...] = (4, 8, 16)
    """Values of dataflux's `threads_per_process` (default: 1); each is a match."""
    threads_share: float = 0.4
    """Objects that dataflux loads in these matches, as a share of ours."""
    least_to_best: float = 3.0
    """Goal of the ratio in each of these matches."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server((*self._peer_matches(), *self._threads(), self._composed()))

    def toy(self) -> Self:
        """See base class."""
        return replace(super().toy(), threads=(2,))

    def _threads(self) -> list[Match]:
        if not any(rival.peer == "dataflux" for rival in self.rivals):
            return []
        rival = Rival(peer="dataflux", share=self.threads_share)
        ours, work = self._side(self._ours()), self._work(rival, self.operation)
        return [
            Match(
                ours=ours,
                theirs=self._side(replace(work, num_threads=number)),
                label=f"dataflux x{number}",
                at_least=self.least_to_best,
            )
            for number in self.threads
        ]

    def _composed(self) -> Match:
        """Return the match of reads of single objects (the default) against composed reads."""
        work = self._ours()
        return Match(
            ours=self._side(replace(work, compose="off")),
            theirs=self._side(replace(work, compose="on")),
            label="composed",
        )


SCENARIOS = (
    Loader(
        name="loader-100KiB",
        **SETS["100KiB"],
        rivals=(
            Rival(peer="dataflux", at_least=10.0, share=0.15),
            Rival(peer="direct", at_least=40.0, share=0.03),
            Rival(peer="litdata", share=0.5),
            Rival(peer="obstore_data", share=0.5),
            Rival(peer="gcsfs_data", share=0.4),
        ),
    ),
    Loader(
        name="loader-500KiB",
        **SETS["500KiB"],
        rivals=(
            Rival(peer="dataflux", at_least=3.0, share=0.25),
            Rival(peer="direct", at_least=10.0, share=0.1),
            Rival(peer="litdata", share=0.5),
            Rival(peer="obstore_data", share=0.5),
            Rival(peer="gcsfs_data", share=0.4),
        ),
    ),
    Loader(
        name="loader-3MiB",
        **SETS["3MiB"],
        rivals=(
            Rival(peer="dataflux", at_least=3.0, share=0.2),
            Rival(peer="direct", at_least=8.0, share=0.2),
            Rival(peer="litdata", share=0.5),
            Rival(peer="obstore_data", share=0.5),
            Rival(peer="gcsfs_data", share=0.4),
        ),
    ),
    Loader(
        name="loader-150MiB",
        **SETS["150MiB"],
        # A batch is one object, so that more threads have no effect.
        threads=(16,),
        rivals=(
            Rival(peer="dataflux", at_least=3.0, share=0.34),
            Rival(peer="direct", at_least=5.0, share=0.34),
            Rival(peer="litdata", share=0.34),
            Rival(peer="obstore_data", share=0.34),
            Rival(peer="gcsfs_data", share=0.34),
        ),
    ),
)

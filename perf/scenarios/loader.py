"""An epoch of map-style datasets in DataLoader workers: loader-100KiB, -500KiB, -3MiB, -150MiB."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._scenario import KIB, MIB, Match, Rival
from perf.scenarios._sets import OURS, Sets, on_one_server

__all__ = ["GROUP", "SCENARIOS", "Loader"]

GROUP = "loader"


@dataclass(frozen=True, kw_only=True)
class Loader(Sets):
    """One epoch, beside each peer; dataflux also with more threads than its default of one."""

    threads: tuple[int, ...] = (4, 8, 16)
    """`threads_per_process` of dataflux, match by match."""
    threads_share: float = 0.4
    """Share of our objects that dataflux loads with these."""
    least_to_best: float = 3.0
    """Ratio to reach to each of these: so it is reached to the best."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server((*self._duels(), *self._threads(), self._composed()))

    def toy(self) -> Loader:
        """See base class."""
        return replace(
            self,
            size_bytes=4 * KIB,
            num_objects=24,
            batch_size=4,
            num_workers=1,
            latency_seconds=0.001,
            threads=(2,),
        )

    def _duels(self) -> list[Match]:
        ours = self._turn(self._work(OURS, "load"))
        return [
            Match(
                ours=ours,
                theirs=self._turn(self._work(rival, "load")),
                label=rival.peer.removesuffix("_data"),
                at_least=rival.at_least,
            )
            for rival in self.rivals
        ]

    def _threads(self) -> list[Match]:
        if not any(rival.peer == "dataflux" for rival in self.rivals):
            return []
        rival = Rival(peer="dataflux", share=self.threads_share)
        work = self._work(rival, "load")
        return [
            Match(
                ours=self._turn(self._work(OURS, "load")),
                theirs=self._turn(replace(work, num_threads=number)),
                label=f"dataflux x{number}",
                at_least=self.least_to_best,
            )
            for number in self.threads
        ]

    def _composed(self) -> Match:
        """Return what shows the default to be right: reads of objects, and of composites."""
        work = self._work(OURS, "load")
        return Match(
            ours=self._turn(replace(work, compose="off")),
            theirs=self._turn(replace(work, compose="on")),
            label="composed",
        )


SCENARIOS = (
    Loader(
        name="loader-100KiB",
        size_bytes=100 * KIB,
        num_objects=20_000,
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
        size_bytes=500 * KIB,
        num_objects=4_000,
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
        size_bytes=3 * MIB,
        num_objects=600,
        batch_size=20,
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
        size_bytes=150 * MIB,
        num_objects=12,
        batch_size=1,
        # A batch is one object: nothing is left for more threads.
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

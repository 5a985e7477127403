"""An epoch of iterable datasets, one from the cache, and one whose consumer takes its time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from perf.scenarios._epochs import SETS, Epoch
from perf.scenarios._scenario import KIB, Match, Promise, Rival
from perf.scenarios._sets import OURS, Sets, on_one_server

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GROUP", "SCENARIOS", "Again", "Stream", "Wait"]

GROUP = "epoch"


@dataclass(frozen=True, kw_only=True)
class Stream(Epoch):
    """One epoch of an iterable dataset, beside each peer."""

    operation: ClassVar[str] = "stream"


@dataclass(frozen=True, kw_only=True)
class Again(Sets):
    """A second epoch, which finds everything on this machine, beside the first."""

    size_bytes: int = 100 * KIB
    """Size of each object."""
    num_objects: int = 10_000
    """Objects of an epoch: so many that the start of the workers is little of the second one."""
    least_ratio: float = 5.0
    """Ratio to reach of the second epoch's rate by the first one's."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(
            [
                Match(
                    ours=self._turn(self._work(OURS, "load_again")),
                    theirs=self._turn(self._work(OURS, "load_first")),
                    label="first",
                    at_least=self.least_ratio,
                )
            ]
        )

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="requests", at_most=0),)

    def toy(self) -> Again:
        """See base class."""
        return replace(self, size_bytes=4 * KIB, num_objects=24, batch_size=4, num_workers=1)


@dataclass(frozen=True, kw_only=True)
class Wait(Epoch):
    """An epoch whose consumer trains on each batch for a while, beside the same without a pause.

    And beside one that has all objects in memory: what that waits for is torch's own.

    What can be fed is bound by CPUs here, not by the link: workers, consumer and server share two
    of them, and whatever its size each batch costs 2 to 3 ms of CPU in DataLoader's queues. With 4
    objects a batch (0.3 ms for each, and 0.07 of the server's) a step of 5 ms takes about 4 ms of
    the 10 that there are, 18 requests in flight at 20 ms each, and 82 MB/s, which is what two
    connections bring. 4,000 steps are 20 s, of which the start of the workers is 1 to 2 %.
    """

    operation: ClassVar[str] = "stream"
    size_bytes: int = 100 * KIB
    """Size of each object."""
    num_objects: int = 16_000
    """Objects of an epoch."""
    batch_size: int = 4
    """Objects of a batch."""
    step_seconds: float = 0.005
    """Time of a training step, in which the consumer needs no CPU."""
    most_waiting: float = 0.05
    """Share of the epoch that its consumer may wait for batches, for the first one too."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        work = self._ours()
        trained = replace(work, step_seconds=self.step_seconds)
        ours = self._turn(trained)
        return on_one_server(
            [
                Match(
                    ours=ours,
                    theirs=self._turn(work),
                    label="bound",
                    at_least=1 - self.most_waiting,
                    cap_per_second=self.batch_size / self.step_seconds,
                ),
                Match(
                    ours=ours,
                    theirs=self._turn(replace(trained, peer="memory_data")),
                    label="memory",
                ),
            ]
        )

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="waiting", at_most=self.most_waiting),)

    def toy(self) -> Self:
        """See base class."""
        # So few steps that the start of the workers is most of it: no wait is too long.
        return replace(super().toy(), num_workers=self.num_workers, most_waiting=1.0)


SCENARIOS = (
    Stream(
        name="epoch-100KiB",
        **SETS["100KiB"],
        rivals=(
            Rival(peer="dataflux", at_least=8.0, share=0.15),
            Rival(peer="litdata", at_least=1.5, share=0.5),
            Rival(peer="direct", share=0.03),
        ),
    ),
    Stream(
        name="epoch-500KiB",
        **SETS["500KiB"],
        rivals=(
            Rival(peer="dataflux", at_least=8.0, share=0.25),
            Rival(peer="litdata", share=0.5),
            Rival(peer="direct", share=0.1),
        ),
    ),
    Stream(
        name="epoch-3MiB",
        **SETS["3MiB"],
        rivals=(
            Rival(peer="dataflux", at_least=8.0, share=0.2),
            Rival(peer="litdata", share=0.5),
            Rival(peer="direct", share=0.2),
        ),
    ),
    Stream(
        name="epoch-150MiB",
        **SETS["150MiB"],
        rivals=(
            Rival(peer="dataflux", at_least=8.0, share=0.34),
            Rival(peer="litdata", share=0.34),
            Rival(peer="direct", share=0.34),
        ),
    ),
    Again(name="epoch-cached"),
    Wait(name="epoch-wait"),
    Wait(name="epoch-wait-inline", num_workers=0),
)

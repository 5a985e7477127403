"""Epochs of iterable datasets, from a cache, of images, and with a consumer that pauses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from perf.scenarios._scenario import Match, Promise
from perf.scenarios._sets import OURS, Epoch, on_one_server

if TYPE_CHECKING:
    from typing import Self

__all__ = ["SCENARIOS"]


@dataclass(frozen=True, kw_only=True)
class OwnWays(Epoch):
    """One epoch of our iterable dataset: compared with a map-style one, and without workers."""

    operation: ClassVar[str] = "stream"
    least_to_map: float = 0.95
    """Goal of the ratio to a map-style dataset."""
    least_inline: float = 0.8
    """Goal of the ratio of an epoch without workers to one with `num_workers` workers."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        ours, mapped = self._side(self._ours()), self._side(self._work(OURS, "load"))
        inline = self._side(replace(self._ours(), num_workers=0))
        return on_one_server(
            [
                Match(ours=ours, theirs=mapped, label="map", at_least=self.least_to_map),
                Match(ours=inline, theirs=ours, label="workers", at_least=self.least_inline),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class CachedEpoch(Epoch):
    """A second epoch, which reads all objects from the local cache, compared with the first."""

    num_objects: int = 10_000
    """Objects of an epoch: enough that the start of the workers takes little of its time."""
    least_ratio: float = 5.0
    """Goal: rate of the second epoch divided by the rate of the first."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(
            [
                Match(
                    ours=self._side(self._work(OURS, "load_again")),
                    theirs=self._side(self._work(OURS, "load_first")),
                    label="first",
                    at_least=self.least_ratio,
                )
            ]
        )

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="requests", at_most=0),)


@dataclass(frozen=True, kw_only=True)
class Wait(Epoch):
    """An epoch whose consumer pauses after each batch, as for a training step.

    It is compared with an epoch without pauses (the bound), and with a dataset in memory, which
    waits only for torch's own work.

    The parameters fit a machine with two cores that workers, consumer and server share. Each batch
    takes 2 to 3 ms of CPU in DataLoader's queues, regardless of its size. With 4 objects in a batch
    (0.3 ms each, and 0.07 ms of the server), a step of 5 ms takes about 4 of the available 10 ms.
    It needs 18 requests in flight at 20 ms each, and 82 MB/s, which two connections can transfer.
    4,000 steps take 20 s, of which the start of the workers is 1 to 2 %.
    """

    operation: ClassVar[str] = "stream"
    num_objects: int = 16_000
    """Objects of an epoch."""
    batch_size: int = 4
    """Objects in a batch."""
    step_seconds: float = 0.005
    """Duration of a training step, in which the consumer sleeps."""
    num_threads: int = 0
    """Threads of `aioflux.data.loader`; 0 loads through DataLoader."""
    most_waiting: float = 0.05
    """Goal: maximum time that the consumer waits for batches, the first included, as a share of the
    epoch."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        work = self._ours()
        work = replace(work, num_threads=self.num_threads)
        trained = replace(work, step_seconds=self.step_seconds)
        ours = self._side(trained)
        return on_one_server(
            [
                Match(
                    ours=ours,
                    theirs=self._side(work),
                    label="bound",
                    at_least=1 - self.most_waiting,
                    cap_per_second=self.batch_size / self.step_seconds,
                ),
                Match(
                    ours=ours,
                    theirs=self._side(replace(trained, peer="memory_data", num_threads=0)),
                    label="memory",
                ),
            ]
        )

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="waiting", at_most=self.most_waiting),)

    def toy(self) -> Self:
        """See base class."""
        # With so few steps, the start of the workers takes most of the time: allow any wait.
        return replace(super().toy(), num_workers=self.num_workers, most_waiting=1.0)


@dataclass(frozen=True, kw_only=True)
class Images(Epoch):
    """An epoch of images that are decoded in threads, compared with workers and no threads."""

    operation: ClassVar[str] = "stream"
    num_objects: int = 8_000
    """Objects of an epoch."""
    batch_size: int = 64
    """Objects in a batch."""
    num_threads: int = 2
    """Threads of `aioflux.data.loader`."""
    least_to_workers: float = 1.3
    """Goal of the ratio to DataLoader with `num_workers` workers."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        work = replace(self._ours(), is_image=True)
        ours = self._side(replace(work, num_workers=0, num_threads=self.num_threads))
        inline = self._side(replace(work, num_workers=0))
        return on_one_server(
            [
                Match(
                    ours=ours,
                    theirs=self._side(work),
                    label="workers",
                    at_least=self.least_to_workers,
                ),
                Match(ours=ours, theirs=inline, label="inline"),
            ]
        )


SCENARIOS = (
    OwnWays(name="epoch-own"),
    CachedEpoch(name="epoch-cached"),
    Wait(name="epoch-wait-inline", num_workers=0),
    Wait(name="epoch-wait-threads", num_workers=0, num_threads=2),
    Images(name="epoch-images"),
)

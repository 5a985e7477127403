"""Calls that move little data: single samples of a dataset, and small checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from perf._pairs import warm_up_work
from perf.scenarios._scenario import KIB, Match, Promise, Rival, Scenario, Side, matches_against
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS"]

_STEPS = Rival(peer="aioflux_steps")


@dataclass(frozen=True, kw_only=True)
class SingleItems(Scenario):
    """Items of a MapDataset beside `get` of the blocking store, which reads one object at a time.

    The dataset is built, with its listing, before the measured part.
    """

    is_by_name_only = True  # it needs torch

    size_bytes: int = KIB
    """Size of each object."""
    num_objects: int = 4_000
    """Objects of a sample."""
    in_flight: int = 64
    """Objects that are read before the measured part, and requests in flight of the store, which
    has one."""
    batch_size: int = 8
    """Indices in one call of `__getitems__`."""
    least_share: float = 0.625
    """Goal of single items, as a share of the rate of `get`."""
    least_batch_share: float = 1.77
    """Goal of the objects of batches, as a share of the rate of `get`."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return tuple(
            Match(
                case=f"{size} item" if size == 1 else f"{size} items",
                ours=self._side("aioflux_map", "load_items", batch_size=size),
                theirs=self._side("aioflux_sync", "get_one"),
                label="sync.get",
                at_least=goal,
            )
            for size, goal in ((1, self.least_share), (self.batch_size, self.least_batch_share))
        )

    def toy(self) -> Self:
        """See base class."""
        return replace(self, num_objects=32, in_flight=4)

    def _side(self, peer: str, operation: str, *, batch_size: int = 1) -> Side:
        work = Work(
            peer=peer,
            operation=operation,
            size_bytes=self.size_bytes,
            num_objects=self.num_objects,
            in_flight=self.in_flight,
            is_set=True,
            batch_size=batch_size,
        )
        works = (
            each
            for whole in (work, warm_up_work(work))
            for each in (whole, whole.warm_up(), whole.opening(), whole.warm_up().opening())
        )
        sets = {(each.size_bytes, each.num_objects) for each in works}
        return Side(work=work, server=ServerSpec(sets=tuple(sorted(sets))))


@dataclass(frozen=True, kw_only=True)
class Steps(Scenario):
    """Small checkpoints that are saved or loaded by name, one after the other, with latency.

    The checkpointer is opened, and saves or loads once, before the measured part. Closing it is not
    measured, nor is what the last save sends after its return. A peer loads what it saved, so the
    server is the embedded one, which stores uploads.
    """

    is_by_name_only = True  # it needs torch

    operation: str
    """Function of the peers."""
    size_bytes: int = 100_000
    """Size of all tensors of a checkpoint."""
    num_objects: int = 10
    """Checkpoints of a sample."""
    num_keys: int = 4
    """Number of different checkpoints that are loaded."""
    latency_seconds: float = 0.02
    """Time to the first byte."""
    dtype: str = "fp32"
    """Dtype of the tensors."""
    most_requests: int = 0
    """Goal: maximum of the requests of one save or load; 0 without a goal. Requests that the save
    before the measured part sends after its return count, too, so one more is allowed for."""

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        if not self.most_requests:
            return ()
        most = self.most_requests * (self.num_objects + 1)
        return (Promise(figure="requests", at_most=most),)

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return matches_against(self.rivals, self._side, ours=_STEPS)

    def toy(self) -> Self:
        """See base class."""
        return replace(self, num_objects=2, num_keys=1, latency_seconds=0.001)

    def _side(self, rival: Rival) -> Side:
        work = Work(
            peer=rival.peer,
            operation=self.operation,
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            num_keys=self.num_keys,
            in_flight=1,
            dtype=self.dtype,
        )
        spec = ServerSpec(kind="embedded", latency_seconds=self.latency_seconds)
        return Side(work=work, server=spec)


SCENARIOS = (
    SingleItems(name="map-single"),
    Steps(
        name="save-small",
        operation="save_steps",
        most_requests=5,
        rivals=(Rival(peer="gcsfs_steps"),),
    ),
    Steps(
        name="load-small",
        operation="load_steps",
        most_requests=3,
        rivals=(Rival(peer="gcsfs_steps", share=0.2),),
    ),
)

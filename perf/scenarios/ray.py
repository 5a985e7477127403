"""Ray on one node: ray-read and ray-write of Ray Data, and ray-train of Ray Train."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perf.scenarios._scenario import KIB, MIB, Match, Rival, Side, matches_against
from perf.scenarios._sets import on_one_server
from perf.scenarios.checkpoint_async import Staging
from perf.scenarios.objects import ManyObjects
from perf.servers import ServerSpec

if TYPE_CHECKING:
    from typing import Self

__all__ = ["SCENARIOS"]

_OURS = Rival(peer="aioflux_ray")
_MAX_PAIRS, _MIN_LIMIT_SECONDS = 3, 180.0


@dataclass(frozen=True, kw_only=True)
class _OnRay(ManyObjects):
    """A dataset of many objects or blocks on one node of Ray, with two processors."""

    is_by_name_only = True
    max_pairs, min_limit_seconds = _MAX_PAIRS, _MIN_LIMIT_SECONDS

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return matches_against(self.rivals, self._side, ours=_OURS)


@dataclass(frozen=True, kw_only=True)
class RayRead(_OnRay):
    """Read of the bytes of objects into batches of `iter_torch_batches`."""

    operation = "read_ray"
    batch_size: int = 100
    """Objects in a batch."""
    latency_seconds: float = 0.02
    """Time to the first byte."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(super().matches())

    def toy(self) -> Self:
        """See base class."""
        return replace(
            self, size_bytes=4 * KIB, num_objects=24, batch_size=4, latency_seconds=0.001
        )

    def _side(self, rival: Rival) -> Side:
        work = replace(self._work(rival), is_set=True, batch_size=self.batch_size)
        return Side(work=work, server=ServerSpec(latency_seconds=self.latency_seconds))


@dataclass(frozen=True, kw_only=True)
class RayWrite(_OnRay):
    """Write of blocks as Parquet, to the embedded server, which lists what was written."""

    operation = "write_ray"
    is_in_bytes = True

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=100 * KIB, num_objects=4)

    def _side(self, rival: Rival) -> Side:
        room = 8 * self.num_objects * self.size_bytes + 64 * MIB
        return Side(
            work=self._work(rival),
            server=ServerSpec(kind="embedded", written_bytes=room),
        )


@dataclass(frozen=True, kw_only=True)
class RayTrain(Staging):
    """Saves of a state by a training of one worker: the mean time for which one blocks its loop."""

    max_pairs, min_limit_seconds = _MAX_PAIRS, _MIN_LIMIT_SECONDS
    num_steps: int = 100
    """Training steps, of about 10 ms, before each save."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return matches_against(
            self.rivals,
            lambda rival: self._side(rival.peer, "train_ray", num_steps=self.num_steps),
            ours=_OURS,
        )

    def toy(self) -> Self:
        """See base class."""
        return replace(super().toy(), num_steps=5)


SCENARIOS = (
    RayRead(
        name="ray-read",
        num_objects=20_000,
        rivals=(
            Rival(peer="gcsfs_ray", at_least=3.0, share=0.1),
            Rival(peer="download_ray", at_least=2.0),
        ),
    ),
    RayWrite(
        name="ray-write",
        size_bytes=10_000_000,
        num_objects=200,
        rivals=(Rival(peer="gcsfs_ray", at_least=1.5),),
    ),
    RayTrain(
        name="ray-train",
        rivals=(Rival(peer="gcsfs_ray", at_least=10.0),),  # blocked for 10 % of the time
    ),
)

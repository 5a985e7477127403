"""Load of a state from one object, and a read of each of its memory pages: checkpoint_load."""

from __future__ import annotations

from dataclasses import dataclass

from perf.scenarios._scenario import MIB, MemoryGoal, Rival
from perf.scenarios._states import States
from perf.servers import ServerSpec

__all__ = ["GROUP", "SCENARIOS", "LoadState"]

GROUP = "checkpoint_load"


@dataclass(frozen=True, kw_only=True)
class LoadState(States):
    """torch.load of an object, through the file class of each contender."""

    memory_share: float = 1.1
    """Memory limit of a load, as a share of the object's size; 8 MiB are added."""

    @property
    def operation(self) -> str:
        """See base class."""
        return "load_state"

    def memory_goal(self) -> MemoryGoal:
        """See base class."""
        return self._memory(int(self.memory_share * self.size_bytes) + 8 * MIB)

    def _server(self, dtype: str, rate: int | None) -> ServerSpec:
        return ServerSpec(connection_bytes_per_second=rate, states=self._states(dtype))


_LINK = (
    Rival(peer="gcsfs_checkpoint", at_least=5.0),
    Rival(peer="google_checkpoint", at_least=2.0),
    Rival(peer="dataflux_checkpoint"),
)
_UNLIMITED = (
    Rival(peer="gcsfs_checkpoint", at_least=4.0),
    Rival(peer="google_checkpoint", at_least=2.0),
    Rival(peer="dataflux_checkpoint"),
)
SCENARIOS = (
    LoadState(
        name="checkpoint-load-76MB", size_bytes=76_000_000, rivals=_LINK, unlimited=_UNLIMITED
    ),
    LoadState(
        name="checkpoint-load-298MB",
        size_bytes=298_000_000,
        dtypes=("bf16", "fp32"),
        rivals=_LINK,
        unlimited=_UNLIMITED,
    ),
    LoadState(
        name="checkpoint-load-2.5GB", size_bytes=2_500_000_000, rivals=_LINK, unlimited=_UNLIMITED
    ),
)

"""Save of a state as one object: checkpoint_save.

The state is created before the measured part, so that memory above idle does not include it.
"""

from __future__ import annotations

from dataclasses import dataclass

from perf.scenarios._scenario import MIB, MemoryGoal, Rival
from perf.scenarios._states import States
from perf.servers import ServerSpec

__all__ = ["GROUP", "SCENARIOS", "SaveState"]

GROUP = "checkpoint_save"


@dataclass(frozen=True, kw_only=True)
class SaveState(States):
    """torch.save to an object, through the file class of each contender."""

    limit_bytes: int = 160 * MIB
    """Limit of the memory in addition to the state."""

    @property
    def operation(self) -> str:
        """See base class."""
        return "save_state"

    def memory_goal(self) -> MemoryGoal:
        """See base class."""
        return self._memory(self.limit_bytes)

    def _server(self, dtype: str, rate: int | None) -> ServerSpec:
        # The embedded server stores the old object, the parts and the new object at the same time.
        # nginx discards all uploaded parts, because `kept_bytes` is below the size of any part.
        return ServerSpec(
            received_bytes_per_second=rate,
            kept_bytes=1 * MIB,
            written_bytes=3 * self.size_bytes + 64 * MIB,
        )


_LINK = (
    Rival(peer="gcsfs_checkpoint", at_least=5.0),
    Rival(peer="google_checkpoint"),
    Rival(peer="dataflux_checkpoint"),
)
_UNLIMITED = (
    Rival(peer="gcsfs_checkpoint", at_least=8.0),
    Rival(peer="google_checkpoint", at_least=4.0),
    Rival(peer="dataflux_checkpoint"),
)
SCENARIOS = (
    SaveState(
        name="checkpoint-save-76MB", size_bytes=76_000_000, rivals=_LINK, unlimited=_UNLIMITED
    ),
    SaveState(
        name="checkpoint-save-298MB",
        size_bytes=298_000_000,
        dtypes=("bf16", "fp32"),
        rivals=_LINK,
        unlimited=_UNLIMITED,
    ),
    SaveState(
        name="checkpoint-save-2.5GB", size_bytes=2_500_000_000, rivals=_LINK, unlimited=_UNLIMITED
    ),
)

"""A state saved as one object: checkpoint_save.

The state exists before the clock starts, so that memory above idle is what a save takes beside it.
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
    """torch.save to an object, through the file of each contender."""

    limit_bytes: int = 160 * MIB
    """Most memory that may be resident beside the state."""

    @property
    def operation(self) -> str:
        """See base class."""
        return "save_state"

    def memory_goal(self) -> MemoryGoal:
        """See base class."""
        return self._memory(self.limit_bytes)

    def _server(self, dtype: str, rate: int | None) -> ServerSpec:
        # The embedded server keeps the object as it was, its parts, and the whole: at once.
        # nginx drops all pieces that are sent, whatever size each contender gives them.
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

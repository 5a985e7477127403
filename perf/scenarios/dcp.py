"""Saves and loads with torch.distributed.checkpoint, by one process and by four ranks: dcp.

A load reads a checkpoint that the same contender saved, so the scenarios use the embedded server,
which stores uploads. The server is one Python process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from perf.scenarios._scenario import MIB, Match, Rival, Scenario, Side, matches_against
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS"]

_OURS = Rival(peer="aioflux_dcp")


@dataclass(frozen=True, kw_only=True)
class Distributed(Scenario):
    """A save or a load."""

    is_by_name_only = is_in_bytes = True

    operation: str
    """Function of the peers."""
    size_bytes: int = 256 * MIB
    """Size of all tensors of all ranks."""
    world_size: int = 1
    """Ranks that save."""
    dtype: str = "bf16"
    """Dtype of the tensors."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return matches_against(self.rivals, self._side, ours=_OURS)

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=4 * MIB)

    def _side(self, rival: Rival) -> Side:
        work = Work(
            peer=rival.peer,
            operation=self.operation,
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            num_workers=self.world_size,
            dtype=self.dtype,
        )
        return Side(
            work=work, server=ServerSpec(kind="embedded", written_bytes=3 * self.size_bytes)
        )


_SAVE = (Rival(peer="gcsfs_dcp", at_least=4.0),)
_LOAD = (Rival(peer="gcsfs_dcp", at_least=3.0),)
SCENARIOS = (
    Distributed(name="dcp-save-1", operation="save_dcp", rivals=_SAVE),
    Distributed(name="dcp-load-1", operation="load_dcp", rivals=_LOAD),
    Distributed(name="dcp-save-4", operation="save_dcp", world_size=4, rivals=_SAVE),
    Distributed(name="dcp-load-4", operation="load_dcp", world_size=4, rivals=_LOAD),
)

"""torch.load and torch.save of a state through a file over one object: torch_files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from perf.scenarios._scenario import MIB, Match, MemoryGoal, Rival, Scenario, Side, matches_against
from perf.servers import ServerSpec
from perf.work import WARM_UP_BYTES, Work

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GROUP", "SCENARIOS", "TorchFile"]

GROUP = "torch_files"
_OURS = Rival(peer="aioflux_torch")
_WINDOW_BYTES = 64 * MIB
"""`TransferOptions.max_buffered_bytes`."""


@dataclass(frozen=True, kw_only=True)
class TorchFile(Scenario):
    """One state, on a server without a bandwidth limit."""

    is_by_name_only = True

    operation: Literal["load_state", "save_state"]
    """Function of the peers."""
    is_tls: bool = False
    """Whether the server uses TLS 1.3."""
    size_bytes: int = 298_000_000
    """Size of all tensors."""
    dtype: str = "fp32"
    """Dtype of the tensors."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def memory_goal(self) -> MemoryGoal:
        """See base class."""
        state_bytes = self.size_bytes if self.operation == "load_state" else 0
        limit_bytes = int(1.1 * state_bytes) + 2 * _WINDOW_BYTES
        return MemoryGoal(limit_bytes=limit_bytes, is_above_idle=True)

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return matches_against(self.rivals, self._side, ours=_OURS)

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=12 * MIB)

    def _settable(self) -> list[str]:
        return [name for name in super()._settable() if name != "operation"]

    def _side(self, rival: Rival) -> Side:
        work = Work(
            peer=rival.peer,
            operation=self.operation,
            url="",
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            dtype=self.dtype,
        )
        sizes = dict.fromkeys((self.size_bytes, WARM_UP_BYTES))
        if self.operation == "load_state":
            states = tuple((self.dtype, size) for size in sizes)
            return Side(work=work, server=ServerSpec(tls=self.is_tls, states=states))
        # nginx discards all uploaded parts, because `kept_bytes` is below the size of any part.
        room = 3 * self.size_bytes + 64 * MIB
        spec = ServerSpec(tls=self.is_tls, kept_bytes=1 * MIB, written_bytes=room)
        return Side(work=work, server=spec)


_OBSTORE = Rival(peer="obstore_torch")
SCENARIOS = (
    TorchFile(
        name="torch-load-298MB",
        operation="load_state",
        rivals=(Rival(peer="gcsfs_checkpoint", at_least=1.5), _OBSTORE),
    ),
    TorchFile(name="torch-load-298MB-tls", operation="load_state", is_tls=True, rivals=(_OBSTORE,)),
    TorchFile(
        name="torch-save-298MB",
        operation="save_state",
        rivals=(Rival(peer="gcsfs_checkpoint", at_least=2.0), _OBSTORE),
    ),
    TorchFile(name="torch-save-298MB-tls", operation="save_state", is_tls=True, rivals=(_OBSTORE,)),
)

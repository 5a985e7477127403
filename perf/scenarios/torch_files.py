"""torch.load and torch.save of a state through a file over one object: torch_files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from perf.scenarios._scenario import MIB, Match, Promise, Rival, Scenario, Side, matches_against
from perf.servers import ServerSpec
from perf.work import WARM_UP_BYTES, Work

if TYPE_CHECKING:
    from typing import Self

__all__ = ["SCENARIOS", "OneState"]


@dataclass(frozen=True, kw_only=True)
class OneState(Scenario):
    """Save of a state as one object, or load of it and a read of each of its memory pages.

    The state to save is created before the measured part.
    """

    is_by_name_only = is_in_bytes = True

    operation: Literal["load_state", "save_state"]
    """Function of the peers."""
    is_tls: bool = False
    """Whether the server uses TLS 1.3."""
    size_bytes: int = 298_000_000
    """Size of all tensors."""
    dtype: str = "fp32"
    """Dtype of the tensors."""
    spare_bytes: int = 128 * MIB
    """Limit of the memory, in addition to 1.1 times the tensors that are loaded; by default two
    times `TransferOptions.max_buffered_bytes`."""
    case: str = ""
    """Case in results."""
    ours: str = "aioflux_torch"
    """Interface of aioflux that is compared."""

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        loaded_bytes = self.size_bytes if self.operation == "load_state" else 0
        limit_bytes = int(1.1 * loaded_bytes) + self.spare_bytes
        return (Promise(figure="memory", at_most=limit_bytes),)

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        ours = Rival(peer=self.ours)
        return matches_against(self.rivals, self._side, ours=ours, case=self.case)

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=12 * MIB)

    def _side(self, rival: Rival) -> Side:
        work = Work(
            peer=rival.peer,
            operation=self.operation,
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            dtype=self.dtype,
        )
        if self.operation == "load_state":
            sizes = dict.fromkeys((self.size_bytes, WARM_UP_BYTES))
            states = tuple((self.dtype, size) for size in sizes)
            return Side(work=work, server=ServerSpec(tls=self.is_tls, states=states))
        # nginx discards all uploaded parts, because `kept_bytes` is below the size of any part.
        room = 3 * self.size_bytes + 64 * MIB
        spec = ServerSpec(tls=self.is_tls, kept_bytes=1 * MIB, written_bytes=room)
        return Side(work=work, server=spec)


_OBSTORE = Rival(peer="obstore_torch")
SCENARIOS = (
    OneState(
        name="torch-load-298MB",
        operation="load_state",
        rivals=(Rival(peer="gcsfs_checkpoint", at_least=1.5), _OBSTORE),
    ),
    OneState(name="torch-load-298MB-tls", operation="load_state", is_tls=True, rivals=(_OBSTORE,)),
    OneState(
        name="torch-save-298MB",
        operation="save_state",
        rivals=(Rival(peer="gcsfs_checkpoint", at_least=2.0), _OBSTORE),
    ),
    OneState(name="torch-save-298MB-tls", operation="save_state", is_tls=True, rivals=(_OBSTORE,)),
)

"""Cost of checkpoints for a training run: checkpoint_async.

Staging: the time for which `save_async` blocks the training, after a warm-up, compared with one
memory copy of the same size and with `dcp.async_save`. Training: steps per second during continuous
uploads of saves, compared with a run without saves. The training uses one thread; uploads and the
server run on the other cores of the same machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perf.scenarios._scenario import MIB, Match, Rival, Scenario, Side, matches_against
from perf.servers import ServerSpec
from perf.work import Work

if TYPE_CHECKING:
    from typing import Self

__all__ = ["SCENARIOS", "Staging"]

_OURS = Rival(peer="aioflux_async")


@dataclass(frozen=True, kw_only=True)
class _Async(Scenario):
    """Saves of one state."""

    is_by_name_only = is_in_bytes = True

    size_bytes: int = 298_000_000
    """Size of all tensors."""
    dtype: str = "fp32"
    """Dtype of the tensors."""

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=4 * MIB)

    def _side(self, peer: str, operation: str, *, num_steps: int = 1, num_workers: int = 0) -> Side:
        work = Work(
            peer=peer,
            operation=operation,
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            in_flight=num_steps,
            num_workers=num_workers,
            dtype=self.dtype,
        )
        room = 8 * self.size_bytes + 64 * MIB
        return Side(work=work, server=ServerSpec(kind="embedded", written_bytes=room))


@dataclass(frozen=True, kw_only=True)
class Staging(_Async):
    """Time for which one save blocks the training."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return matches_against(
            self.rivals, lambda rival: self._side(rival.peer, "stage"), ours=_OURS
        )


@dataclass(frozen=True, kw_only=True)
class Training(_Async):
    """Training steps per second, with saves and without."""

    num_steps: int = 200
    """Training steps of a sample."""
    least_share: float = 0.85
    """Goal, as a share of the steps per second of a run without saves."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        alone = self._side(_OURS.peer, "train_alone", num_steps=self.num_steps)
        return tuple(
            Match(
                case=staging,
                ours=self._side(
                    _OURS.peer,
                    "train_saving",
                    num_steps=self.num_steps,
                    num_workers=int(staging == "process"),
                ),
                theirs=alone,
                label="no saves",
                at_least=self.least_share,
            )
            for staging in ("thread", "process")
        )

    def toy(self) -> Self:
        """See base class."""
        return replace(super().toy(), num_steps=20)


SCENARIOS = (
    Staging(
        name="checkpoint-async-stage",
        rivals=(
            Rival(peer="memory_copy", at_least=round(1 / 1.5, 2)),
            Rival(peer="stock_async", at_least=15.0),
        ),
    ),
    Training(name="checkpoint-async-train"),
)

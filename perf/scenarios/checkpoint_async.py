"""What a training run loses to its checkpoints: checkpoint_async.

Staging: how long `save_async` holds the training up, warm, beside one copy of as many bytes and
beside `dcp.async_save`. Training: steps per second while one save after the other is uploaded,
beside those of a run that saves nothing. Each process trains on one thread; the uploads and the
server, which is on the same machine here, take what else there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perf.scenarios._scenario import MIB, Match, Rival, Scenario, Turn, duels
from perf.servers import ServerSpec
from perf.work import Work

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GROUP", "SCENARIOS", "Staging", "Training"]

GROUP = "checkpoint_async"
_OURS = Rival(peer="aioflux_async")


@dataclass(frozen=True, kw_only=True)
class _Async(Scenario):
    """One state."""

    size_bytes: int = 298_000_000
    """Size of all tensors."""
    dtype: str = "fp32"
    """Of the tensors."""

    @property
    def is_by_name_only(self) -> bool:
        """See base class."""
        return True

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=4 * MIB)

    def _turn(self, peer: str, operation: str, *, num_steps: int = 1, num_workers: int = 0) -> Turn:
        work = Work(
            peer=peer,
            operation=operation,
            url="",
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            in_flight=num_steps,
            num_workers=num_workers,
            dtype=self.dtype,
        )
        room = 8 * self.size_bytes + 64 * MIB
        return Turn(work=work, server=ServerSpec(kind="embedded", written_bytes=room))


@dataclass(frozen=True, kw_only=True)
class Staging(_Async):
    """The time that one save holds the training up."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return duels(self.rivals, lambda rival: self._turn(rival.peer, "stage"), ours=_OURS)


@dataclass(frozen=True, kw_only=True)
class Training(_Async):
    """Steps per second, with saves and without."""

    num_steps: int = 200
    """Steps of a sample."""
    least_share: float = 0.85
    """Share of the steps per second of a run without saves."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        alone = self._turn(_OURS.peer, "train_alone", num_steps=self.num_steps)
        return tuple(
            Match(
                case=staging,
                ours=self._turn(
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

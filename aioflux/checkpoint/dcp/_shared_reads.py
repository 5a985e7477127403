"""What ranks that load together share: the coordinator reads, and tells the others.

`dcp.load` calls `read_metadata()` on every rank and passes neither its process group nor whether it
uses one, and a collective that not every rank of the group takes part in hangs. What decides is the
object by which the loader itself is about to gather plans: it stands in the frames above, or this
is no collective load.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final, TypeVar

from torch.distributed.checkpoint.utils import _DistWrapper

from aioflux.errors import AiofluxError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Loader", "find_loader"]

T = TypeVar("T")

_MAX_FRAMES: Final = 12
"""How far above the loader is: its step, its logger, and what may wrap a reader."""


class Loader:
    """The loader of `torch.distributed.checkpoint` that is at work above."""

    def __init__(self, ranks: _DistWrapper) -> None:
        self._ranks = ranks

    @property
    def is_collective(self) -> bool:
        """Whether other ranks load, too."""
        return self._ranks.use_dist and self._ranks.get_world_size() > 1

    def share(self, read: Callable[[], T]) -> T:
        """Return what `read` gives on the coordinator, or raise on all ranks what it raises."""
        if not self.is_collective:
            return read()
        outcome: tuple[T | None, Exception | None] | None = None
        if self._ranks.is_coordinator:
            try:
                outcome = read(), None
            except AiofluxError as exc:
                outcome = None, exc
            except Exception as exc:  # may not pickle, and then the other ranks would wait forever
                outcome = None, CheckpointError(f"{type(exc).__name__}: {exc}")
        told = self._ranks.broadcast_object(outcome)
        assert told is not None
        value, error = told
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # what `read` gave


def find_loader() -> Loader | None:
    """Return the loader that called, however many wrappers are between; None where none did."""
    frame: FrameType | None = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            for value in frame.f_locals.values():
                if isinstance(value, _DistWrapper):
                    return Loader(value)
        frame = frame.f_back
    return None

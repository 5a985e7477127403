"""Base class of the scenarios that save or load one state, with and without a bandwidth limit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from perf.scenarios._scenario import MIB, Match, MemoryGoal, Rival, Scenario, Side, matches_against
from perf.work import WARM_UP_BYTES, Work

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from perf.servers import ServerSpec

__all__ = ["OURS", "States"]

OURS = Rival(peer="aioflux_checkpoint")
"""aioflux, through `aioflux.checkpoint`."""


@dataclass(frozen=True, kw_only=True)
class States(Scenario):
    """One state, on a server without a bandwidth limit and on a server that limits connections."""

    is_by_name_only = True

    size_bytes: int
    """Size of all tensors."""
    dtypes: tuple[str, ...] = ("bf16",)
    """Dtypes of the tensors, `bf16` or `fp32`; each is a case."""
    connection_bytes_per_second: int = 100_000_000
    """Bandwidth of each connection in the cases with a limit (`link`)."""
    parts: int = 16
    """Parts or ranges that aioflux has in flight, at most; used for the bound."""
    bound_share: float = 0.9
    """Goal, as a share of the bound: the bandwidth of all connections or our rate without a limit,
    whichever is lower."""
    unlimited: tuple[Rival, ...] = ()
    """Rivals without a limit; `rivals` are the ones with a limit."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def against(self, peers: tuple[str, ...]) -> Self:
        """See base class."""
        chosen = super().against(peers)
        return replace(chosen, unlimited=super(States, self._freed()).against(peers).rivals)

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return tuple(match for dtype in self.dtypes for match in self._cases(dtype))

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=12 * MIB, connection_bytes_per_second=200_000_000)

    def _freed(self) -> Self:
        return replace(self, rivals=self.unlimited)

    def _settable(self) -> list[str]:
        return [name for name in super()._settable() if name != "unlimited"]

    def _cases(self, dtype: str) -> Sequence[Match]:
        paced = partial(self._side, dtype, is_paced=True)
        free = partial(self._side, dtype, is_paced=False)
        bound = Match(
            case=f"{dtype} link",
            ours=paced(OURS),
            theirs=free(OURS),
            label="bound",
            at_least=self.bound_share,
            cap_per_second=self.parts * self.connection_bytes_per_second / self.size_bytes,
        )
        return (
            *matches_against(self.unlimited, free, ours=OURS, case=dtype),
            bound,
            *matches_against(self.rivals, paced, ours=OURS, case=f"{dtype} link"),
        )

    def _side(self, dtype: str, rival: Rival, *, is_paced: bool) -> Side:
        work = Work(
            peer=rival.peer,
            operation=self.operation,
            url="",
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            dtype=dtype,
        )
        rate = self.connection_bytes_per_second if is_paced else None
        return Side(work=work, server=self._server(dtype, rate))

    @property
    @abstractmethod
    def operation(self) -> str:
        """Function of the peers."""

    @abstractmethod
    def _server(self, dtype: str, rate: int | None) -> ServerSpec:
        """Return the server of a case."""

    def _states(self, dtype: str) -> tuple[tuple[str, int], ...]:
        """Return the states that reads need on the server, with the state of the warm-up."""
        return tuple((dtype, size) for size in dict.fromkeys((self.size_bytes, WARM_UP_BYTES)))

    def _memory(self, limit_bytes: int) -> MemoryGoal:
        return MemoryGoal(limit_bytes=limit_bytes, is_above_idle=True)

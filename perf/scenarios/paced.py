"""Read of one object of 1 GiB from a server that limits the bandwidth of each connection: paced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from perf.scenarios._scenario import (
    MIB,
    OURS,
    Match,
    Rival,
    Scenario,
    Side,
    matches_against,
    ready_objects,
)
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS", "Paced"]


@dataclass(frozen=True, kw_only=True)
class Paced(Scenario):
    """Read of one large object with a bandwidth limit, compared with a read without a limit."""

    size_bytes: int = 1024 * MIB
    """Size of the object."""
    connection_bytes_per_second: int = 50_000_000
    """Bandwidth of each connection."""
    range_size_bytes: int = 16 * MIB
    """Size of a range."""
    in_flight: tuple[int, ...] = (8, 16)
    """Numbers of ranges in flight, each on a separate connection; each number is a case."""
    bound_share: float = 0.9
    """Goal, as a share of the bound: the bandwidth of all connections or our rate without a limit,
    whichever is lower."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return tuple(match for in_flight in self.in_flight for match in self._case(in_flight))

    def toy(self) -> Paced:
        """See base class."""
        return replace(
            self,
            size_bytes=4 * MIB,
            range_size_bytes=MIB,
            in_flight=(2,),
            connection_bytes_per_second=20_000_000,
        )

    def _case(self, in_flight: int) -> tuple[Match, ...]:
        case = f"{in_flight} connections"
        side = partial(self._side, in_flight)
        bound = Match(
            case=case,
            ours=side(OURS),
            theirs=side(OURS, is_unlimited=True),
            label="bound",
            at_least=self.bound_share,
            cap_per_second=in_flight * self.connection_bytes_per_second / self.size_bytes,
        )
        return (bound, *matches_against(self.rivals, side, case=case))

    def _side(self, in_flight: int, rival: Rival, *, is_unlimited: bool = False) -> Side:
        work = Work(
            peer=rival.peer,
            operation="get_one",
            url="",
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            in_flight=in_flight,
            range_size_bytes=self.range_size_bytes,
        )
        pace = None if is_unlimited else self.connection_bytes_per_second
        spec = ServerSpec(
            kind="embedded", connection_bytes_per_second=pace, objects=ready_objects(work)
        )
        return Side(work=work, server=spec)


SCENARIOS = (Paced(name="paced"),)

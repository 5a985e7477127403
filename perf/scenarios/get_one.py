"""Read of one object of 1 GiB: object-1GiB, object-1GiB-tls and object-1GiB-tls-3-loops."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import OneObject
from perf.scenarios._scenario import MIB, Rival, Side, ready_objects
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "GetOne"]


@dataclass(frozen=True, kw_only=True)
class GetOne(OneObject):
    """Read of one large object with the fastest method of each contender."""

    range_size_bytes: int = 16 * MIB
    """Size of a range, if the contender reads ranges."""
    is_tls: bool = False
    """Whether the server uses TLS 1.3."""
    num_loops: int = 1
    """Event loops of aioflux."""

    def toy(self) -> GetOne:
        """See base class."""
        return replace(self, size_bytes=4 * MIB, range_size_bytes=MIB, in_flight=2)

    def _side(self, rival: Rival) -> Side:
        work = self._work(rival, "get_one", self.range_size_bytes)
        if rival.peer == "aioflux":
            work = replace(work, num_threads=self.num_loops)
        return Side(work=work, server=ServerSpec(tls=self.is_tls, objects=ready_objects(work)))


_RIVALS = (
    Rival(peer="obstore", at_least=1.1),
    Rival(peer="gcloud_aio", at_least=1.4),
    Rival(peer="transfer_manager", at_least=2.0),
)
SCENARIOS = (
    GetOne(name="object-1GiB", rivals=_RIVALS),
    GetOne(name="object-1GiB-tls", is_tls=True, rivals=_RIVALS),
    GetOne(name="object-1GiB-tls-3-loops", is_tls=True, num_loops=3, rivals=_RIVALS[:1]),
)

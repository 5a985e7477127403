"""First read of a fresh process, with the start of the interpreter and all imports: startup."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import ManyObjects
from perf.scenarios._scenario import KIB, Rival, Side, ready_objects
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "Startup"]


@dataclass(frozen=True, kw_only=True)
class Startup(ManyObjects):
    """Processes one after the other, each of which reads one object.

    The inverse of the rate is the wall time of a process, and the CPU time of an object is that of
    a process.
    """

    size_bytes: int = KIB
    """Size of each object."""
    num_objects: int = 20
    """Processes of aioflux in one sample; a slower peer starts fewer."""
    in_flight: int = 1
    """Processes at the same time, always 1."""

    def toy(self) -> Startup:
        """See base class."""
        return replace(self, num_objects=2, num_keys=1)

    def _side(self, rival: Rival) -> Side:
        work = self._work(rival, "first_get")
        return Side(work=work, server=ServerSpec(objects=ready_objects(work)))


SCENARIOS = (
    Startup(
        name="startup",
        rivals=(
            Rival(peer="obstore", share=1.0),
            Rival(peer="gcsfs", at_least=3.0, share=0.2),
            Rival(peer="google", at_least=2.0, share=0.2),
        ),
    ),
)

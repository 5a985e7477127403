"""`get_many` of objects of one size: get-1KiB, get-100KiB, get-100KiB-tls, get-1MiB."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf.scenarios._objects import ManyObjects
from perf.scenarios._scenario import KIB, MIB, Rival, Side, ready_objects
from perf.servers import ServerSpec

__all__ = ["SCENARIOS", "GetMany"]


@dataclass(frozen=True, kw_only=True)
class GetMany(ManyObjects):
    """Concurrent reads of whole objects."""

    is_tls: bool = False
    """Whether the server uses TLS 1.3."""

    def toy(self) -> GetMany:
        """See base class."""
        return replace(self, num_objects=32, num_keys=4, in_flight=4)

    def _side(self, rival: Rival) -> Side:
        work = self._work(rival, "get_many")
        return Side(work=work, server=ServerSpec(tls=self.is_tls, objects=ready_objects(work)))


SCENARIOS = (
    GetMany(
        name="get-1KiB",
        size_bytes=KIB,
        num_objects=6_000,
        rivals=(
            Rival(peer="obstore", at_least=2.5),
            Rival(peer="gcloud_aio", at_least=3.0),
            Rival(peer="google", at_least=15.0),
            Rival(peer="wrk", at_least=0.5),
        ),
    ),
    GetMany(
        name="get-100KiB",
        size_bytes=100 * KIB,
        num_objects=3_000,
        rivals=(
            Rival(peer="obstore", at_least=1.8, share=1.0),
            Rival(peer="gcloud_aio", at_least=3.0),
            Rival(peer="google", at_least=8.0, share=0.05),
            Rival(peer="gcsfs"),
            Rival(peer="aiohttp"),
            Rival(peer="requests"),
            Rival(peer="wrk", at_least=0.5),
        ),
    ),
    GetMany(
        name="get-100KiB-tls",
        size_bytes=100 * KIB,
        num_objects=3_000,
        is_tls=True,
        rivals=(
            Rival(peer="obstore", at_least=1.2, share=1.0),
            Rival(peer="gcloud_aio", at_least=1.5, share=0.5),
        ),
    ),
    GetMany(
        name="get-1MiB",
        size_bytes=MIB,
        num_objects=600,
        rivals=(
            Rival(peer="obstore", at_least=1.1, share=1.0),
            Rival(peer="gcloud_aio", at_least=1.4, share=0.5),
            Rival(peer="transfer_manager", at_least=2.0, share=0.08),
        ),
    ),
)

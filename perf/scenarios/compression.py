"""Compressed checkpoints: their size, the speed of compression, and the time of saves and loads.

Saves and loads use a link with a fixed number of connections and a bandwidth limit for each. A
connection that waits for the CPU does not use its bandwidth. A compressed save or load is compared
with an uncompressed one on the same link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perf.scenarios._scenario import MIB, Match, Promise, Rival, Scenario, Side, matches_against
from perf.servers import ServerSpec
from perf.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GROUP", "SCENARIOS", "Compression"]

GROUP = "compression"
_OURS = Rival(peer="aioflux_zstd")


@dataclass(frozen=True, kw_only=True)
class Compression(Scenario):
    """Compression, decompression, save and load of one kind of tensors."""

    is_by_name_only = True

    kind: str
    """One of `perf.weights.KINDS`."""
    most_stored: float
    """Goal: maximum compressed size, as a share of the original size."""
    size_bytes: int = 512 * MIB
    """Size of all tensors."""
    link_bytes_per_second: int = 400_000_000
    """Bandwidth of all connections of the link."""
    in_flight: int = 4
    """Number of connections of the link."""
    most_longer: float = 0.09
    """Goal: additional time of a compressed save, as a share of the uncompressed save."""
    has_link: bool = True
    """Whether to measure saves and loads, too."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="stored", at_most=self.most_stored),)

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return (
            *matches_against(self.rivals, self._in_memory("compress"), ours=_OURS, case="compress"),
            *matches_against(
                self.rivals, self._in_memory("decompress"), ours=_OURS, case="decompress"
            ),
            *(self._on_link() if self.has_link else ()),
        )

    def toy(self) -> Compression:
        """See base class."""
        return replace(self, size_bytes=4 * MIB)

    def _in_memory(self, operation: str) -> _SideOfEach:
        return _SideOfEach(self._work(operation), ServerSpec())

    def _on_link(self) -> Iterator[Match]:
        rate = self.link_bytes_per_second // self.in_flight
        # nginx discards large uploaded parts, so loads use the embedded server, which stores them.
        room = 3 * self.size_bytes + 64 * MIB
        servers = {
            "save": ServerSpec(received_bytes_per_second=rate, written_bytes=room),
            "load": ServerSpec(
                kind="embedded", connection_bytes_per_second=rate, written_bytes=room
            ),
        }
        for operation, at_least in (("save", 1 / (1 + self.most_longer)), ("load", 1.0)):
            ours, theirs = (
                Side(work=self._work(f"{operation}_{how}"), server=servers[operation])
                for how in ("compressed", "plain")
            )
            yield Match(
                case=f"{operation}, link",
                ours=ours,
                theirs=theirs,
                label="uncompressed",
                at_least=round(at_least, 2),
            )

    def _work(self, operation: str) -> Work:
        return Work(
            peer=_OURS.peer,
            operation=operation,
            url="",
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            in_flight=self.in_flight,
            dtype=self.kind,
        )


@dataclass(frozen=True)
class _SideOfEach:
    """Returns the side of any contender with the same work and server."""

    work: Work
    server: ServerSpec

    def __call__(self, rival: Rival) -> Side:
        return Side(work=replace(self.work, peer=rival.peer), server=self.server)


_RIVALS = (Rival(peer="torch_zstd"), Rival(peer="zstd_plain"))
SCENARIOS = (
    Compression(name="compression-bf16", kind="bf16", most_stored=0.69, rivals=_RIVALS),
    Compression(name="compression-fp32", kind="fp32", most_stored=0.85, rivals=_RIVALS),
    Compression(
        name="compression-master", kind="master", most_stored=0.35, rivals=_RIVALS, has_link=False
    ),
    Compression(
        name="compression-adam", kind="adam_v", most_stored=0.85, rivals=_RIVALS, has_link=False
    ),
)

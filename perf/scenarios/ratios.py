"""Ratios of record: reads, writes and checkpoints beside other clients, and how costs grow.

Reads are compared with peers that do the same work: with verified bytes against obstore with a
crc32c over the bytes that it returned, and without (`unverified`) against obstore and `raw`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from perf.scenarios._scenario import (
    KIB,
    MIB,
    OURS,
    Match,
    Promise,
    Rival,
    Scenario,
    Side,
    matches_against,
)
from perf.scenarios._sets import on_one_server
from perf.scenarios.checkpoint_async import Staging
from perf.scenarios.objects import GetMany, GetOne, ManyObjects, OneObject, PutOne
from perf.scenarios.torch_files import OneState
from perf.servers import ServerSpec
from perf.work import Work

__all__ = ["SCENARIOS"]

_UNVERIFIED, _CHECKPOINT = "aioflux_unverified", "aioflux_checkpoint"
_LARGE_PAIRS = 3
"""Maximum number of pairs of an object of 1 GiB."""


@dataclass(frozen=True, kw_only=True)
class _Named(Scenario):
    """A scenario that runs only by name."""

    is_by_name_only = True


@dataclass(frozen=True, kw_only=True)
class _Get(_Named, GetMany):
    """Reads of whole objects; matches of aioflux without verification are a case."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes if self.size_bytes >= MIB else 0

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return tuple(
            replace(match, case="unverified") if match.ours.work.peer == _UNVERIFIED else match
            for match in super().matches()
        )


@dataclass(frozen=True, kw_only=True)
class _Large(_Named, OneObject):
    """Read or write of one large object."""

    max_pairs = _LARGE_PAIRS


@dataclass(frozen=True, kw_only=True)
class _GetOne(GetOne, _Large):
    """Read of one large object."""


@dataclass(frozen=True, kw_only=True)
class _PutOne(PutOne, _Large):
    """Write of one large object."""


@dataclass(frozen=True, kw_only=True)
class _GetRange(_Large):
    """Reads of all ranges of one large object, each into memory of its own."""

    operation = "get_range"

    def toy(self) -> _GetRange:
        """See base class."""
        size = min(self.range_size_bytes, MIB)
        return replace(self, size_bytes=4 * MIB, range_size_bytes=size, in_flight=2)


@dataclass(frozen=True, kw_only=True)
class _FirstSave(Staging):
    """Time for which the first save of a process blocks the training."""

    limit_ms: float = 60.0
    """Goal, in milliseconds."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        first = self._side("aioflux_first_save", "stage")
        return tuple(replace(match, ours=first) for match in super().matches())

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="ms", at_most=self.limit_ms),)


@dataclass(frozen=True, kw_only=True)
class _Opening(_Named, ManyObjects):
    """Clients that are opened one after the other; each reads one object and is closed."""

    operation = "open_get"
    size_bytes: int = KIB
    """Size of the object."""
    num_objects: int = 40
    """Clients."""
    in_flight: int = 1
    """Requests at the same time, always 1."""
    is_tls: bool = False
    """Whether the server uses TLS 1.3."""

    def toy(self) -> _Opening:
        """See base class."""
        return replace(self, num_objects=3, num_keys=1)


@dataclass(frozen=True, kw_only=True)
class _Growth(_Named):
    """Rate, CPU time and memory for many objects, compared with a tenth of them; one pair."""

    max_pairs, min_limit_seconds = 1, 300.0
    num_objects: int
    """Objects of the larger sample."""
    size_bytes: int = KIB
    """Size of each object."""
    least_share: float = 0.9
    """Goal, as a share of the rate of the smaller sample."""

    def _grown(self, work: Work, server: ServerSpec, case: str = "") -> Match:
        count = max(1, work.num_objects // 10)
        return Match(
            case=case,
            ours=Side(work=work, server=server),
            theirs=Side(work=replace(work, num_objects=count), server=server),
            label=f"{count:,} objects",
            at_least=self.least_share,
        )


@dataclass(frozen=True, kw_only=True)
class _ListGrowth(_Growth):
    """A listing in memory, and a MapDataset, of a set on a server without latency."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return on_one_server(
            self._grown(
                Work(
                    peer=peer,
                    operation="list_all",
                    size_bytes=self.size_bytes,
                    num_objects=self.num_objects,
                    is_set=True,
                ),
                ServerSpec(),
                case,
            )
            for case, peer in (("list", "aioflux"), ("MapDataset", "aioflux_map"))
        )

    def toy(self) -> _ListGrowth:
        """See base class."""
        return replace(self, num_objects=1_200)


@dataclass(frozen=True, kw_only=True)
class _GetGrowth(_Growth):
    """Reads of many small objects."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        many = GetMany(name="", size_bytes=self.size_bytes, num_objects=self.num_objects)
        (match,) = matches_against((OURS,), many._side)  # noqa: SLF001  the same scenario
        return (self._grown(match.ours.work, match.ours.server),)

    def toy(self) -> _GetGrowth:
        """See base class."""
        return replace(self, num_objects=300)


def _rivals(
    *,
    verified: tuple[float, float],
    crc32c_at_most: float,
    unverified: tuple[float, float] | None = None,
    raw_cpu: float | None = None,
    share: float = 1.0,
    in_flight: int | None = None,
) -> tuple[Rival, ...]:
    """Return the rivals of reads.

    Args:
        verified: Goals of the rate and of the CPU time against obstore with a crc32c.
        crc32c_at_most: Goal of the CPU time of verified reads, as a share of unverified reads.
        unverified: Goals of both against obstore, without verification.
        raw_cpu: Goal of the CPU time against `raw`, without verification.
        share: Share of our objects that obstore moves.
        in_flight: Requests in flight of obstore and wrk.
    """
    least, cpu = unverified or (None, None)
    common = Rival(peer="obstore_crc32c", share=share, in_flight=in_flight)
    return (
        replace(common, at_least=verified[0], cpu_at_most=verified[1]),
        Rival(peer=_UNVERIFIED, cpu_at_most=crc32c_at_most),
        replace(common, peer="obstore", ours=_UNVERIFIED, at_least=least, cpu_at_most=cpu),
        Rival(peer="raw", ours=_UNVERIFIED, cpu_at_most=raw_cpu),
        Rival(peer="wrk", in_flight=in_flight),
    )


@dataclass(frozen=True, kw_only=True)
class _Load(OneState):
    """Load of a state by `aioflux.checkpoint.load`."""

    operation: Literal["load_state"] = "load_state"
    spare_bytes: int = 8 * MIB
    """Limit of the memory, in addition to 1.1 times the tensors."""
    case: str = "fp32"
    ours: str = _CHECKPOINT


@dataclass(frozen=True, kw_only=True)
class _LargeLoad(_Load):
    """Load of a state of 1 GiB."""

    max_pairs = _LARGE_PAIRS
    size_bytes: int = 1024 * MIB
    """Size of all tensors."""


_PLAIN, _TLS = 1.2, 1.06
"""Goals of the CPU time of a verified read, as a share of that of an unverified one."""
_RANGES = (Rival(peer="obstore_ranges", at_least=1.2),)
_PUT = (
    Rival(peer="obstore", at_least=1.2, memory_at_most=1.0),
    Rival(peer="obstore_crc32c"),
    Rival(peer=_UNVERIFIED),
)
SCENARIOS = (
    _Get(
        name="ratio-get-1KiB",
        size_bytes=KIB,
        num_objects=20_000,
        rivals=_rivals(verified=(3.0, 0.25), crc32c_at_most=_PLAIN, share=0.3),
    ),
    _Get(
        name="ratio-get-100KiB",
        num_objects=8_000,
        rivals=_rivals(verified=(1.8, 0.45), crc32c_at_most=_PLAIN, share=0.7),
    ),
    _Get(
        name="ratio-get-1MiB",
        size_bytes=MIB,
        num_objects=1_200,
        rivals=_rivals(verified=(1.5, 0.5), crc32c_at_most=_PLAIN),
    ),
    _Get(
        name="ratio-get-16MiB",
        size_bytes=16 * MIB,
        num_objects=80,
        num_keys=16,
        rivals=_rivals(
            verified=(1.5, 0.55), crc32c_at_most=_PLAIN, unverified=(1.2, 0.8), in_flight=8
        ),
    ),
    _Get(
        name="ratio-get-100KiB-tls",
        num_objects=4_000,
        is_tls=True,
        rivals=_rivals(verified=(1.3, 0.6), crc32c_at_most=_TLS, share=0.8),
    ),
    _Get(
        name="ratio-get-1MiB-tls",
        size_bytes=MIB,
        num_objects=700,
        is_tls=True,
        rivals=_rivals(verified=(1.1, 1.0), crc32c_at_most=_TLS),
    ),
    _Get(
        name="ratio-get-16MiB-tls",
        size_bytes=16 * MIB,
        num_objects=40,
        num_keys=16,
        is_tls=True,
        rivals=_rivals(
            verified=(1.05, 1.0),
            crc32c_at_most=_TLS,
            unverified=(1.1, 0.95),
            raw_cpu=1.1,
            in_flight=8,
        ),
    ),
    _GetRange(
        name="ratio-get-range-64KiB",
        range_size_bytes=64 * KIB,
        in_flight=64,
        rivals=(Rival(peer="obstore", at_least=1.3),),
    ),
    _GetRange(
        name="ratio-get-range-1MiB",
        range_size_bytes=MIB,
        in_flight=64,
        rivals=(Rival(peer="obstore", at_least=1.5),),
    ),
    _GetRange(
        name="ratio-get-range-8MiB",
        range_size_bytes=8 * MIB,
        rivals=(Rival(peer="obstore", at_least=1.0),),
    ),
    _GetOne(name="ratio-get-1GiB", rivals=_RANGES),
    _GetOne(name="ratio-get-1GiB-tls", is_tls=True, rivals=_RANGES),
    _LargeLoad(name="ratio-load-1GiB", rivals=_RANGES),
    _LargeLoad(name="ratio-load-1GiB-tls", is_tls=True, rivals=_RANGES),
    _PutOne(name="ratio-put-1GiB", rivals=_PUT),
    _PutOne(name="ratio-put-1GiB-tls", is_tls=True, rivals=_PUT),
    _Load(name="ratio-load-298MB", rivals=(Rival(peer="gcsfs_checkpoint", at_least=4.0),)),
    OneState(
        name="ratio-save-298MB",
        operation="save_state",
        case="fp32",
        ours=_CHECKPOINT,
        spare_bytes=160 * MIB,
        rivals=(
            Rival(peer="gcsfs_checkpoint", at_least=4.0),
            Rival(peer="google_checkpoint", at_least=4.0),
        ),
    ),
    Staging(
        name="ratio-save-async",
        rivals=(Rival(peer="memory_copy", at_least=round(1 / 1.5, 2)),),
    ),
    _FirstSave(name="ratio-save-async-first", rivals=(Rival(peer="memory_copy"),)),
    _Opening(name="opening", rivals=(Rival(peer="obstore", share=1.0), Rival(peer="gcsfs"))),
    _Opening(
        name="opening-tls",
        is_tls=True,
        rivals=(Rival(peer="obstore", share=1.0), Rival(peer="gcsfs")),
    ),
    _GetGrowth(name="gets-1M", num_objects=1_000_000),
    _ListGrowth(name="list-10M", num_objects=10_000_000),
)

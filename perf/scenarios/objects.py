"""Reads and writes of many objects of one size, and of one large object."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

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
    ready_objects,
)
from perf.servers import ServerSpec
from perf.work import Work

if TYPE_CHECKING:
    from typing import Self

__all__ = ["SCENARIOS", "GetMany", "GetOne", "ManyObjects", "OneObject", "PutOne"]


@dataclass(frozen=True, kw_only=True)
class _Objects(Scenario):
    """A scenario with one match for each rival."""

    operation: ClassVar[str]
    """Function of the peers."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return matches_against(self.rivals, self._side)

    @abstractmethod
    def _work(self, rival: Rival) -> Work:
        """Return the work of a contender."""

    def _side(self, rival: Rival) -> Side:
        """Return the work and the server of a contender, by default of reads."""
        work = self._work(rival)
        is_tls = getattr(self, "is_tls", False)
        return Side(work=work, server=ServerSpec(tls=is_tls, objects=ready_objects(work)))


@dataclass(frozen=True, kw_only=True)
class ManyObjects(_Objects):
    """Reads or writes of many objects of one size, `in_flight` at a time."""

    size_bytes: int = 100 * KIB
    """Size of each object."""
    num_objects: int = 3_000
    """Objects that aioflux moves in one sample; a slower peer moves fewer."""
    num_keys: int = 64
    """Number of different objects; they are moved repeatedly."""
    in_flight: int = 64
    """Maximum number of requests in flight."""

    def toy(self) -> Self:
        """See base class."""
        return replace(self, num_objects=32, num_keys=4, in_flight=4)

    def _work(self, rival: Rival) -> Work:
        return Work(
            peer=rival.peer,
            operation=self.operation,
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            num_keys=self.num_keys,
            in_flight=rival.in_flight or self.in_flight,
        )


@dataclass(frozen=True, kw_only=True)
class GetMany(ManyObjects):
    """Concurrent reads of whole objects."""

    operation = "get_many"
    is_tls: bool = False
    """Whether the server uses TLS 1.3."""


@dataclass(frozen=True, kw_only=True)
class PutMany(ManyObjects):
    """Concurrent writes of whole objects."""

    operation = "put_many"

    def _side(self, rival: Rival) -> Side:
        room = 2 * self.size_bytes * (self.num_keys + self.in_flight) + 64 * MIB
        return Side(work=self._work(rival), server=ServerSpec(written_bytes=room))


@dataclass(frozen=True, kw_only=True)
class Startup(ManyObjects):
    """Fresh processes one after the other, each of which reads one object, with all imports.

    The inverse of the rate is the wall time of a process, and the CPU time of an object is that of
    a process.
    """

    operation = "first_get"
    size_bytes: int = KIB
    """Size of each object."""
    num_objects: int = 20
    """Processes of aioflux in one sample; a slower peer starts fewer."""
    in_flight: int = 1
    """Processes at the same time, always 1."""

    def toy(self) -> Self:
        """See base class."""
        return replace(self, num_objects=2, num_keys=1)


@dataclass(frozen=True, kw_only=True)
class Faults(ManyObjects):
    """Reads of whole objects; some requests fail with a 503 or a reset.

    A sample fails if it does not read all bytes.
    """

    operation = "get_many"
    num_objects: int = 10_000
    """Objects of one sample."""
    fault_rate: float = 0.01
    """Share of the requests that fail with a 503, and share that fail with a reset."""
    clean_share: float = 0.9
    """Goal, as a share of the rate without faults."""

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        ours = self._side(OURS)
        clean = replace(ours, server=replace(ours.server, fault_rate=0.0))
        own = Match(ours=ours, theirs=clean, label="clean", at_least=self.clean_share)
        return (own, *super().matches())

    def toy(self) -> Self:
        """See base class."""
        return replace(super().toy(), num_objects=100, fault_rate=0.03)

    def _side(self, rival: Rival) -> Side:
        side = super()._side(rival)
        server = replace(side.server, kind="embedded", fault_rate=self.fault_rate)
        return replace(side, server=server)


@dataclass(frozen=True, kw_only=True)
class OneObject(_Objects):
    """Read or write of one large object, in concurrent ranges or parts."""

    is_in_bytes = True
    size_bytes: int = 1024 * MIB
    """Size of the object."""
    range_size_bytes: int = 16 * MIB
    """Size of a range or part, if the contender reads or writes such."""
    in_flight: int = 8
    """Maximum number of ranges or parts in flight."""
    is_tls: bool = False
    """Whether the server uses TLS 1.3."""

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=4 * MIB, range_size_bytes=MIB, in_flight=2)

    def _work(self, rival: Rival) -> Work:
        return Work(
            peer=rival.peer,
            operation=self.operation,
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            in_flight=self.in_flight,
            range_size_bytes=self.range_size_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class GetOne(OneObject):
    """Read of one large object with the fastest method of each contender."""

    operation = "get_one"
    num_loops: int = 1
    """Event loops of aioflux."""

    def _work(self, rival: Rival) -> Work:
        num_loops = self.num_loops if rival.peer == "aioflux" else 0
        return replace(super()._work(rival), num_threads=num_loops)


@dataclass(frozen=True, kw_only=True)
class GetInto(OneObject):
    """Read of one large object into an allocated buffer."""

    operation = "get_into"
    spare_bytes: int = 32 * MIB
    """Limit of the memory in addition to the buffer."""

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="memory", at_most=self.size_bytes + self.spare_bytes),)


@dataclass(frozen=True, kw_only=True)
class PutOne(OneObject):
    """Upload of one large object in parts; its bytes are created before the measured part."""

    operation = "put_one"
    in_flight: int = 4
    """Maximum number of parts in flight."""
    limit_bytes: int = 256 * MIB
    """Limit of the memory in addition to the caller's bytes."""

    def promises(self) -> tuple[Promise, ...]:
        """See base class."""
        return (Promise(figure="memory", at_most=self.limit_bytes),)

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=12 * MIB, range_size_bytes=5 * MIB, in_flight=2)

    def _side(self, rival: Rival) -> Side:
        # The server stores the old object, the parts and the new object at the same time.
        room = 3 * self.size_bytes + 64 * MIB
        server = ServerSpec(tls=self.is_tls, written_bytes=room)
        return Side(work=self._work(rival), server=server)


_LARGE = (
    Rival(peer="obstore", at_least=1.1),
    Rival(peer="gcloud_aio", at_least=1.4),
    Rival(peer="transfer_manager", at_least=2.0),
)
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
        rivals=(
            Rival(peer="obstore", at_least=1.8, share=1.0),
            Rival(peer="gcloud_aio", at_least=3.0),
            Rival(peer="google", at_least=8.0, share=0.05),
            Rival(peer="wrk", at_least=0.5),
        ),
    ),
    GetMany(
        name="get-100KiB-tls",
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
    GetOne(name="object-1GiB", rivals=_LARGE),
    GetOne(name="object-1GiB-tls", is_tls=True, rivals=_LARGE),
    GetOne(name="object-1GiB-tls-3-loops", is_tls=True, num_loops=3, rivals=_LARGE[:1]),
    GetInto(name="get-into", rivals=(Rival(peer="obstore", at_least=1.2),)),
    PutOne(
        name="put-1GiB",
        rivals=(
            Rival(peer="obstore", at_least=1.2),
            Rival(peer="gcloud_aio", at_least=2.0),
            Rival(peer="transfer_manager", at_least=2.0),
        ),
    ),
    PutMany(
        name="put-many",
        rivals=(Rival(peer="obstore", at_least=1.5), Rival(peer="gcloud_aio", at_least=3.0)),
    ),
    Startup(
        name="startup",
        rivals=(
            Rival(peer="obstore", share=1.0),
            Rival(peer="gcsfs", at_least=3.0, share=0.2),
            Rival(peer="google", at_least=2.0, share=0.2),
        ),
    ),
    Faults(
        name="faults",
        rivals=(
            Rival(peer="obstore"),
            Rival(peer="gcloud_aio", share=0.2),
            Rival(peer="google", share=0.05),
        ),
    ),
)

"""S3 and Azure beside the libraries that people use there: the groups s3 and az.

SeaweedFS and Azurite answer at once and at full speed, and share the machine with the contenders.
What is told of memory and of CPU time is the client's alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from perf.scenarios._epochs import Epoch
from perf.scenarios._scenario import KIB, MIB, Match, Rival, Scenario, Turn, duels
from perf.scenarios.checkpoint_load import LoadState
from perf.scenarios.checkpoint_save import SaveState
from perf.scenarios.dcp import Distributed
from perf.scenarios.get_many import GetMany
from perf.scenarios.get_one import GetOne
from perf.scenarios.put_many import PutMany
from perf.scenarios.put_one import PutOne
from perf.servers import ServerSpec
from perf.work import Work

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GROUP", "SCENARIOS", "Lines", "Nebula"]

GROUP = "clouds"
_OURS_OF_LINES = Rival(peer="aioflux_lines")
_OURS_OF_NEBULA = Rival(peer="aioflux_nebula")


class _Named:
    """A scenario that is run only where it is named: its server is not on every machine."""

    is_by_name_only = True


class _Get(_Named, GetMany):
    """Reads of whole objects."""


class _GetOne(_Named, GetOne):
    """The read of one large object."""


class _Put(_Named, PutMany):
    """Writes of whole objects."""


class _PutOne(_Named, PutOne):
    """The write of one large object."""


@dataclass(frozen=True, kw_only=True)
class _Map(Epoch):
    """One epoch of a map-style dataset, at full speed."""

    operation: ClassVar[str] = "load"
    latency_seconds: float = 0.0
    """Time to the first byte: there is none to be added."""


class _Whole:
    """A state without a link: these servers pace none."""

    def matches(self) -> tuple[Match, ...]:
        """Return the matches without a limit."""
        found: tuple[Match, ...] = super().matches()  # type: ignore[misc]
        return tuple(match for match in found if not match.case.endswith("link"))


class _Save(_Whole, SaveState):
    """torch.save to an object."""


class _Load(_Whole, LoadState):
    """torch.load from an object."""


@dataclass(frozen=True, kw_only=True)
class Lines(Scenario):
    """Lines of shards of text, in batches, through the names of the S3 IO DataPipes."""

    size_bytes: int = 156_000_000
    """Size of a shard: 100,000 lines of 1,560 bytes."""
    num_objects: int = 4
    """Shards of an epoch."""
    batch_size: int = 512
    """Lines of a batch."""
    num_workers: int = 0
    """DataLoader workers; 0 is the process that consumes."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    @property
    def is_by_name_only(self) -> bool:
        """See base class."""
        return True

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        ours = self._turn(_OURS_OF_LINES)
        by_loader = self._turn(_OURS_OF_LINES, "lines_loader")
        return (
            *duels(self.rivals, self._turn, ours=_OURS_OF_LINES),
            Match(ours=ours, theirs=by_loader, label="loader's batches"),
        )

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=100_000, num_objects=2)

    def _turn(self, rival: Rival, operation: str = "lines") -> Turn:
        work = Work(
            peer=rival.peer,
            operation=operation,
            url="",
            size_bytes=self.size_bytes,
            num_objects=rival.num_objects(self.num_objects),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
        )
        warm_up = work.warm_up()
        shards = {(each.size_bytes, each.num_objects) for each in (work, warm_up)}
        # A pair that warms up takes a tenth of the shards, and one at least.
        shards |= {(self.size_bytes, max(1, round(0.1 * work.num_objects)))}
        return Turn(work=work, server=ServerSpec(kind="embedded", lines=tuple(sorted(shards))))


@dataclass(frozen=True, kw_only=True)
class Nebula(Scenario):
    """How long a save by the names of Nebula holds training up, beside torch.save to the place."""

    size_bytes: int = 1024 * MIB
    """Size of all tensors."""
    dtype: str = "bf16"
    """Of the tensors."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    @property
    def is_by_name_only(self) -> bool:
        """See base class."""
        return True

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return duels(self.rivals, self._turn, ours=_OURS_OF_NEBULA)

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=4 * MIB)

    def _turn(self, rival: Rival) -> Turn:
        is_ours = rival.peer == _OURS_OF_NEBULA.peer
        work = Work(
            peer=rival.peer,
            operation="stage" if is_ours else "save_state",
            url="",
            size_bytes=self.size_bytes,
            num_objects=1,
            num_keys=1,
            dtype=self.dtype,
        )
        room = 8 * self.size_bytes + 64 * MIB
        return Turn(work=work, server=ServerSpec(kind="embedded", written_bytes=room))


def _set(size_bytes: int, num_objects: int) -> dict[str, Any]:
    return {"size_bytes": size_bytes, "num_objects": num_objects, "num_workers": 0}


_FSSPEC = (
    Rival(peer="s3fs_lines", at_least=3.0, share=0.25),
    Rival(peer="s3torchconnector_data", at_least=1.0),
)
SCENARIOS: tuple[Scenario, ...] = (
    _Get(
        name="s3-get-100KiB",
        scheme="s3",
        size_bytes=100 * KIB,
        rivals=(
            Rival(peer="obstore", at_least=1.5, share=1.0),
            Rival(peer="aiobotocore", at_least=3.0, share=0.3),
            Rival(peer="boto3", share=0.1),
            Rival(peer="s3fs", share=0.2),
        ),
    ),
    _Get(
        name="s3-get-1MiB",
        scheme="s3",
        size_bytes=MIB,
        num_objects=600,
        rivals=(
            Rival(peer="obstore", at_least=1.5, share=1.0),
            Rival(peer="aiobotocore", at_least=3.0, share=0.5),
            Rival(peer="boto3", share=0.2),
            Rival(peer="s3fs", share=0.4),
        ),
    ),
    _Map(
        name="s3-map-100KiB",
        scheme="s3",
        **_set(100 * KIB, 2_000),
        rivals=(Rival(peer="s3torchconnector_data", at_least=1.2, share=0.2),),
    ),
    _Map(
        name="s3-map-1MiB",
        scheme="s3",
        **_set(MIB, 400),
        rivals=(Rival(peer="s3torchconnector_data", at_least=1.2, share=0.3),),
    ),
    Lines(name="s3-lines-0", scheme="s3", rivals=_FSSPEC),
    Lines(name="s3-lines-4", scheme="s3", num_workers=4, num_objects=8, rivals=_FSSPEC),
    _Save(
        name="s3-save-1GiB",
        scheme="s3",
        size_bytes=1024 * MIB,
        unlimited=(Rival(peer="s3torchconnector_checkpoint", at_least=1.2),),
    ),
    _Load(
        name="s3-load-1GiB",
        scheme="s3",
        size_bytes=1024 * MIB,
        unlimited=(Rival(peer="s3torchconnector_checkpoint", at_least=1.2),),
    ),
    Distributed(
        name="s3-dcp-save",
        scheme="s3",
        operation="save_dcp",
        size_bytes=1024 * MIB,
        rivals=(Rival(peer="s3torchconnector_dcp", at_least=1.2),),
    ),
    Distributed(
        name="s3-dcp-load",
        scheme="s3",
        operation="load_dcp",
        size_bytes=1024 * MIB,
        rivals=(Rival(peer="s3torchconnector_dcp", at_least=1.2),),
    ),
    _Get(
        name="az-get-1MiB",
        scheme="az",
        size_bytes=MIB,
        num_objects=300,
        num_keys=16,
        in_flight=16,
        rivals=(Rival(peer="azure_blob", at_least=1.5), Rival(peer="obstore")),
    ),
    _GetOne(
        name="az-get-256MiB",
        scheme="az",
        size_bytes=256 * MIB,
        rivals=(Rival(peer="azure_blob", at_least=1.5), Rival(peer="obstore")),
    ),
    _PutOne(
        name="az-put-256MiB",
        scheme="az",
        size_bytes=256 * MIB,
        rivals=(Rival(peer="azure_blob", at_least=1.5), Rival(peer="obstore")),
    ),
    Nebula(
        name="nebula-1GiB",
        rivals=(Rival(peer="gcsfs_checkpoint", at_least=50.0), Rival(peer="aioflux_torch_save")),
    ),
)

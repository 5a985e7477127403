"""S3 and Azure, compared with other clients for them: the group clouds.

SeaweedFS and Azurite respond without added latency or bandwidth limits, and share the machine with
the contenders. Memory and CPU time are figures of the client alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from perf.scenarios._epochs import Epoch
from perf.scenarios._scenario import KIB, MIB, Match, Rival, Scenario, Side, matches_against
from perf.scenarios.checkpoint_load import LoadState
from perf.scenarios.checkpoint_save import SaveState
from perf.scenarios.dcp import Distributed
from perf.scenarios.get_many import GetMany
from perf.scenarios.get_one import GetOne
from perf.scenarios.put_many import PutMany
from perf.scenarios.put_one import PutOne
from perf.scenarios.startup import Startup
from perf.servers import ServerSpec
from perf.work import Work

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GROUP", "SCENARIOS", "Lines", "Nebula"]

GROUP = "clouds"
_OURS_OF_LINES = Rival(peer="aioflux_lines")
_OURS_OF_NEBULA = Rival(peer="aioflux_nebula")


class _Named:
    """Mixin of scenarios that run only by name, because few machines have their server."""

    is_by_name_only = True


class _Get(_Named, GetMany):
    """Reads of whole objects."""


class _GetOne(_Named, GetOne):
    """The read of one large object."""


class _Put(_Named, PutMany):
    """Writes of whole objects."""


class _PutOne(_Named, PutOne):
    """The write of one large object."""


class _Startup(_Named, Startup):
    """The first read of a fresh process."""


@dataclass(frozen=True, kw_only=True)
class _Map(Epoch):
    """One epoch of a map-style dataset, without added latency."""

    operation: ClassVar[str] = "load"
    latency_seconds: float = 0.0
    """Latency that the server adds."""


class _Unlimited:
    """Mixin that removes the cases with a bandwidth limit, which these servers do not support."""

    def matches(self) -> tuple[Match, ...]:
        """Return the matches without a limit."""
        found: tuple[Match, ...] = super().matches()  # type: ignore[misc]
        return tuple(match for match in found if not match.case.endswith("link"))


class _Save(_Unlimited, SaveState):
    """torch.save to an object."""


class _Load(_Unlimited, LoadState):
    """torch.load from an object."""


@dataclass(frozen=True, kw_only=True)
class Lines(Scenario):
    """Batches of text lines, read with the interface of the S3 IO DataPipes."""

    is_by_name_only = True

    size_bytes: int = 156_000_000
    """Size of a shard: 100,000 lines of 1,560 bytes."""
    num_objects: int = 4
    """Shards of an epoch."""
    batch_size: int = 512
    """Lines of a batch."""
    num_workers: int = 0
    """DataLoader workers; with 0 the consumer reads in its own process."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        ours = self._side(_OURS_OF_LINES)
        by_loader = self._side(_OURS_OF_LINES, "lines_loader")
        return (
            *matches_against(self.rivals, self._side, ours=_OURS_OF_LINES),
            Match(ours=ours, theirs=by_loader, label="loader's batches"),
        )

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=100_000, num_objects=2)

    def _side(self, rival: Rival, operation: str = "lines") -> Side:
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
        # The warm-up pair reads a tenth of the shards, at least one.
        shards |= {(self.size_bytes, max(1, round(0.1 * work.num_objects)))}
        return Side(work=work, server=ServerSpec(kind="embedded", lines=tuple(sorted(shards))))


@dataclass(frozen=True, kw_only=True)
class Nebula(Scenario):
    """Time for which a save with Nebula's interface blocks training, compared with torch.save."""

    is_by_name_only = True

    size_bytes: int = 1024 * MIB
    """Size of all tensors."""
    dtype: str = "bf16"
    """Dtype of the tensors."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return self.size_bytes

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        return matches_against(self.rivals, self._side, ours=_OURS_OF_NEBULA)

    def toy(self) -> Self:
        """See base class."""
        return replace(self, size_bytes=4 * MIB)

    def _side(self, rival: Rival) -> Side:
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
        return Side(work=work, server=ServerSpec(kind="embedded", written_bytes=room))


def _set(size_bytes: int, num_objects: int) -> dict[str, Any]:
    return {"size_bytes": size_bytes, "num_objects": num_objects, "num_workers": 0}


_FSSPEC = (
    Rival(peer="s3fs_lines", at_least=3.0, share=0.25),
    Rival(peer="s3torchconnector_data", at_least=1.0),
)
SCENARIOS: tuple[Scenario, ...] = (
    _Startup(
        name="s3-startup",
        scheme="s3",
        rivals=(Rival(peer="obstore", share=1.0), Rival(peer="s3torchconnector", share=0.1)),
    ),
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
        rivals=(Rival(peer="gcsfs_checkpoint", at_least=50.0), Rival(peer="aioflux_torch")),
    ),
)

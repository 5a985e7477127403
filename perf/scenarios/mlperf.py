"""Workloads of MLPerf Storage (v1.0 and v2.0, H100), with emulated accelerators: mlperf.

The figures are those of mlcommons/storage, configs/dlio/workload/*_h100.yaml. Differences:

* All samples of a workload have the mean size: 3D U-Net's standard deviation is 68 MB, and
  CosmoFlow's 71 KB.
* Samples are not decoded: an object or record is the sample, without the frames of npz and
  tfrecord. MLPerf's readers decode them, and then discard the sample for a constant item of the
  resized size; the items are the same here.
* 3D U-Net has batches of one sample instead of 7, with a seventh of the step, to save time and
  memory.
* Readers are DataLoader workers for all peers (MLPerf: 4, 8 and 4 for each accelerator, of which a
  submission may choose another number), and a thread of `aioflux.data.loader` for aioflux, which
  MLPerf's rules allow in the open division. The case `DataLoader` is aioflux in such workers.

The rate is MLPerf's metric: samples per second of the largest number of accelerators with the
required utilization. One sample of this scenario is a search of about 10 s, so run
`python -m perf mlperf --pairs 1`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perf.scenarios._scenario import KIB, Match, Rival
from perf.scenarios._sets import OURS, Sets, on_one_server
from perf.scenarios.checkpoint_load import LoadState
from perf.scenarios.checkpoint_save import SaveState

if TYPE_CHECKING:
    from typing import Self

    from perf.scenarios._scenario import Side
    from perf.work import Work

__all__ = ["GROUP", "SCENARIOS", "Training"]

GROUP = "mlperf"


@dataclass(frozen=True, kw_only=True)
class Training(Sets):
    """Largest number of emulated accelerators that one client core feeds."""

    item_bytes: int
    """Size of an item of a batch."""
    step_seconds: float
    """Duration of a step of one accelerator, which takes one batch."""
    utilization: float
    """Required accelerator utilization."""
    record_bytes: int = 0
    """Size of a record, for objects of many records; 0 if one object is one sample."""
    trial_seconds: float = 1.0
    """Duration of each run of the search, without its start."""
    is_paced: bool = False
    """Whether the server has a latency, and connections have a limit. Without them, the client's
    core is the limit."""

    @property
    def displayed_bytes(self) -> int:
        """See base class."""
        return 0

    def matches(self) -> tuple[Match, ...]:
        """See base class."""
        in_workers = replace(self._match(OURS), label="DataLoader")
        return on_one_server((*map(self._match, self.rivals), in_workers))

    def played(self) -> tuple[Match, ...]:
        """Return all matches on one server: nginx has the paths of S3, too."""
        return self.matches() if self.scheme == "gs" else super().played()

    def toy(self) -> Self:
        """See base class. One rival, because each process takes seconds to start."""
        return replace(
            self,
            rivals=self.rivals[:1],
            size_bytes=32 * KIB,
            num_objects=200,
            record_bytes=4 * KIB if self.record_bytes else 0,
            item_bytes=KIB,
            batch_size=2,
            num_workers=1,
            trial_seconds=0.02,
            step_seconds=0.01,
        )

    def _work(self, rival: Rival, operation: str) -> Work:
        return replace(
            super()._work(rival, operation),
            num_objects=self.num_objects,
            step_seconds=self.step_seconds,
            utilization=self.utilization,
            trial_seconds=self.trial_seconds,
            record_bytes=self.record_bytes,
            item_bytes=self.item_bytes,
            scheme="s3" if rival.peer.startswith("s3") else "gs",
        )

    def _match(self, rival: Rival) -> Match:
        ours = replace(self._work(OURS, "load"), num_workers=0, num_threads=1)
        return Match(
            ours=self._side(ours),
            theirs=self._side(self._work(rival, "load")),
            label=rival.peer.removesuffix("_data"),
        )

    def _side(self, work: Work) -> Side:
        side = super()._side(work)
        if self.is_paced:
            return side
        server = replace(side.server, latency_seconds=0.0, connection_bytes_per_second=None)
        return replace(side, server=server)


_RIVALS = (
    Rival(peer="gcsfs_data"),
    Rival(peer="obstore_data"),
    Rival(peer="dataflux"),
    Rival(peer="s3torchconnector_data"),
)
_STATES = (Rival(peer="gcsfs_checkpoint"),)
SCENARIOS = (
    Training(
        name="mlperf-unet3d",
        size_bytes=146_600_628,
        num_objects=2_000,
        batch_size=1,
        item_bytes=2_097_152,
        step_seconds=0.323 / 7,
        utilization=0.9,
        rivals=_RIVALS,
    ),
    Training(
        name="mlperf-resnet50",
        size_bytes=1251 * 114_660,
        record_bytes=114_660,
        num_objects=1_024,
        batch_size=400,
        item_bytes=150_528,
        step_seconds=0.224,
        utilization=0.9,
        rivals=_RIVALS,
    ),
    Training(
        name="mlperf-cosmoflow",
        size_bytes=2_828_486,
        num_objects=20_000,
        batch_size=1,
        item_bytes=2_828_486,
        step_seconds=0.0035,
        utilization=0.7,
        rivals=_RIVALS,
    ),
    SaveState(
        name="mlperf-write",
        size_bytes=300_000_000,
        dtypes=("fp32",),
        rivals=_STATES,
        unlimited=_STATES,
    ),
    LoadState(
        name="mlperf-read",
        size_bytes=300_000_000,
        dtypes=("fp32",),
        rivals=_STATES,
        unlimited=_STATES,
    ),
)

"""gcs-torch-dataflux: its map-style dataset in DataLoader workers, with defaults.

In one match, `threads_per_process` has another value.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from perf.peers._loading import Datasets, decode

try:
    from dataflux_pytorch import (  # type: ignore[import-not-found]
        dataflux_mapstyle_dataset,
    )
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        f"{exc.name} is missing (pip install -e '.[perf-loading]')", name=exc.name
    ) from exc

if TYPE_CHECKING:
    from perf.work import Work

_PROJECT = "perf"


def _dataset(work: Work) -> Any:
    # The library's clients in all processes use the server, without credentials.
    os.environ["STORAGE_EMULATOR_HOST"] = work.url
    threads = {"threads_per_process": work.num_threads} if work.num_threads else {}
    config = dataflux_mapstyle_dataset.Config(prefix=work.prefix, **threads)
    return dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
        _PROJECT, work.bucket, config, decode(work)
    )


_DATASETS = Datasets(_dataset)
prepare = _DATASETS.prepare
load = _DATASETS.epoch

"""The names of `dataflux_pytorch.lightning` over aioflux. It needs `lightning`.

    from aioflux.compat.dataflux.lightning import DatafluxLightningCheckpoint

is the only line that changes. `DatafluxFSDPStrategy`, which the old library has in its `demo`, is
included.
"""

from __future__ import annotations

from aioflux.compat.dataflux.lightning.dataflux_lightning_checkpoint import (
    DatafluxLightningAsyncCheckpoint,
    DatafluxLightningCheckpoint,
)
from aioflux.compat.dataflux.lightning.gcs_filesystem import (
    GCSDistributedReader,
    GCSDistributedWriter,
)
from aioflux.compat.dataflux.lightning.strategies import DatafluxFSDPStrategy

__all__ = [
    "DatafluxFSDPStrategy",
    "DatafluxLightningAsyncCheckpoint",
    "DatafluxLightningCheckpoint",
    "GCSDistributedReader",
    "GCSDistributedWriter",
]

"""The API of `dataflux_pytorch.lightning`, implemented with aioflux. Needs `lightning`.

    from aioflux.compat.dataflux.lightning import DatafluxLightningCheckpoint

A program changes only this import. The package includes `DatafluxFSDPStrategy`, which the old
library has in its `demo`.
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

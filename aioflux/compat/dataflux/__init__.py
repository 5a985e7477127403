"""The API of `dataflux_pytorch` (gcs-torch-dataflux 1.4.0), implemented with aioflux.

    from aioflux.compat.dataflux import dataflux_mapstyle_dataset

A program changes only this import. The docstring of each class lists the differences from the old
library. google-cloud-storage is needed only to pass a client, and `lightning` only for
`aioflux.compat.dataflux.lightning`.
"""

from __future__ import annotations

from aioflux.compat.dataflux import (
    dataflux_checkpoint,
    dataflux_iterable_dataset,
    dataflux_mapstyle_dataset,
)

__all__ = ["dataflux_checkpoint", "dataflux_iterable_dataset", "dataflux_mapstyle_dataset"]

"""The names of `dataflux_pytorch` (gcs-torch-dataflux 1.4.0) over aioflux.

    from aioflux.compat.dataflux import dataflux_mapstyle_dataset

is the only line that changes. What the old library got wrong is right here, and the docstring of
each class says what that is. google-cloud-storage is needed by those alone who pass a client, and
`lightning` by those who import `aioflux.compat.dataflux.lightning`.
"""

from __future__ import annotations

from aioflux.compat.dataflux import (
    dataflux_checkpoint,
    dataflux_iterable_dataset,
    dataflux_mapstyle_dataset,
)

__all__ = ["dataflux_checkpoint", "dataflux_iterable_dataset", "dataflux_mapstyle_dataset"]

"""Ray over aioflux: datasets, writes that commit exactly once, and checkpoints of Ray Train.

    dataset = read_objects("gs://bucket/train", records=jsonl())
    write_objects(dataset.map(clean), "gs://bucket/cleaned", format="parquet")

    with RayCheckpointer(every=100) as checkpoints: ...  # in the training function

The package needs Ray 2.60 or a later release of Ray 2:
`pip install 'aioflux-storage[ray]'`.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

from aioflux._values.distribution import pip_install as _pip_install

_NEEDS = f"aioflux.integrations.ray needs Ray Data 2.60 or later, below 3: {_pip_install('ray')}"
try:
    import ray as _ray
    import ray.data
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(_NEEDS, name=exc.name) from exc
if not (2, 60) <= tuple(map(int, re.findall(r"\d+", _ray.__version__)[:2])) < (3,):
    raise ImportError(f"{_NEEDS}; this is Ray {_ray.__version__}")

from aioflux.integrations.ray._read import read_objects  # noqa: E402
from aioflux.integrations.ray._write import write_objects  # noqa: E402

if TYPE_CHECKING:
    from aioflux.integrations.ray._storage import storage_filesystem
    from aioflux.integrations.ray._train import RayCheckpointer

__all__ = ["RayCheckpointer", "read_objects", "storage_filesystem", "write_objects"]

_OF_TRAIN = {"RayCheckpointer": "_train", "storage_filesystem": "_storage"}
"""Names of Ray Train and Ray Tune, each with its module. `read_objects` does not import them."""


def __getattr__(name: str) -> Any:
    if name not in _OF_TRAIN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_OF_TRAIN[name]}"), name)

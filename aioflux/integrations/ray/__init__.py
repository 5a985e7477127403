"""Ray Data over aioflux: datasets of the objects below a uri, and writes that commit exactly once.

    dataset = read_objects("gs://bucket/train", records=jsonl())
    write_objects(dataset.map(clean), "gs://bucket/cleaned", format="parquet")

The package needs Ray 2.60 or a later release of Ray 2: `pip install "aioflux[ray]"`.
"""

from __future__ import annotations

import re

try:
    import ray as _ray
    import ray.data
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "aioflux.integrations.ray needs Ray Data: pip install 'aioflux[ray]'", name=exc.name
    ) from exc

if not (2, 60) <= tuple(map(int, re.findall(r"\d+", _ray.__version__)[:2])) < (3,):
    raise ImportError(
        f"aioflux.integrations.ray needs Ray 2.60 or a later release of Ray 2, not "
        f"{_ray.__version__}: pip install 'aioflux[ray]'"
    )

from aioflux.integrations.ray._read import read_objects
from aioflux.integrations.ray._write import write_objects

__all__ = ["read_objects", "write_objects"]

"""Ray Data over aioflux: datasets of the objects below a uri, and writes that commit exactly once.

    dataset = read_objects("gs://bucket/train", records=jsonl())
    write_objects(dataset.map(clean), "gs://bucket/cleaned", format="parquet")

The package needs Ray 2.60 or a later release of Ray 2: `pip install "aioflux[ray]"`.
"""

from __future__ import annotations

import re

_NEEDS = (
    "aioflux.integrations.ray needs Ray Data 2.60 or later, below 3: pip install 'aioflux[ray]'"
)
try:
    import ray as _ray
    import ray.data
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(_NEEDS, name=exc.name) from exc
if not (2, 60) <= tuple(map(int, re.findall(r"\d+", _ray.__version__)[:2])) < (3,):
    raise ImportError(f"{_NEEDS}; this is Ray {_ray.__version__}")

from aioflux.integrations.ray._read import read_objects  # noqa: E402
from aioflux.integrations.ray._write import write_objects  # noqa: E402

__all__ = ["read_objects", "write_objects"]

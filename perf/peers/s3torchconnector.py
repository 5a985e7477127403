"""s3torchconnector: one object of a map-style dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perf.access import REGION
from perf.peers._fresh import first_gets

if TYPE_CHECKING:
    from perf.work import Work

_FIRST_GET = f"""
import sys
from s3torchconnector import S3ClientConfig, S3MapDataset

url, uri, bucket, key = sys.argv[1:]
dataset = S3MapDataset.from_objects(
    f"{{uri}}/{{key}}",
    region={REGION!r},
    endpoint=url,
    s3client_config=S3ClientConfig(force_path_style=True),
)
print(len(dataset[0].read()))
"""


async def first_get(work: Work) -> int:
    """Read every key in a fresh process and return the bytes received."""
    return first_gets(_FIRST_GET, work)

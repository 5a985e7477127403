"""google-cloud-storage's transfer_manager, with threads or processes, whichever was faster.

It transfers large objects between the service and files, so this module uses a file in memory.
"""

from __future__ import annotations

import io
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from google.cloud.storage import transfer_manager  # type: ignore[import-untyped]

from perf._meter import steady
from perf.peers._parts import one_by_one, part_size_bytes
from perf.peers.google import NUM_THREADS, open_bucket
from perf.work import MIB, body_of

if TYPE_CHECKING:
    from perf.work import Work

_SMALL = {
    "worker_type": transfer_manager.THREAD,
    "max_workers": NUM_THREADS,
    "raise_exception": True,
}
"""Options for many small objects."""
NUM_UPLOADS = 8
"""Threads that write one object: its default, which was the fastest value."""


class _File:
    """A file in memory with the first bytes of an object; it exists as long as this instance."""

    def __init__(self, size_bytes: int = 0) -> None:
        self._descriptor = os.memfd_create("perf")
        # The processes of the manager's pool can open this path, too.
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        block = body_of(min(size_bytes, MIB))
        with self.path.open("wb") as file:
            for at in range(0, size_bytes, MIB):
                file.write(block[: size_bytes - at])

    def __del__(self) -> None:
        os.close(self._descriptor)


@lru_cache(maxsize=2)  # and the object that opens the connections
def _source(size_bytes: int) -> _File:
    return _File(size_bytes)


def prepare(work: Work) -> None:
    """Create the file of the object to write."""
    if work.operation == "put_one":
        _source(work.size_bytes)


async def get_many(work: Work) -> int:
    bucket = open_bucket(work)

    async def read(work: Work) -> int:
        pairs = [(bucket.blob(key), io.BytesIO()) for key in work.each_key()]
        transfer_manager.download_many(pairs, **_SMALL)
        return sum(body.getbuffer().nbytes for _, body in pairs)

    return await steady(read, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, each in ranges, and return the bytes received.

    Uses one process for each CPU; threads took twice as long.
    """
    if work.ca_file:
        # Each of its processes builds a client, whose CA file can be set only in the environment.
        os.environ["REQUESTS_CA_BUNDLE"] = work.ca_file
    bucket = open_bucket(work)

    file = _File()

    async def read(key: str, work: Work) -> int:
        transfer_manager.download_chunks_concurrently(
            bucket.blob(key),
            file.path,
            chunk_size=work.range_size_bytes,
            worker_type=transfer_manager.PROCESS,
            max_workers=os.cpu_count() or 1,
        )
        return file.path.stat().st_size

    return await one_by_one(read, work)


async def put_one(work: Work) -> int:
    """Write one object after the other in parts, from a file, and return the bytes sent."""
    bucket = open_bucket(work)

    async def write(key: str, work: Work) -> int:
        source = _source(work.size_bytes)
        transfer_manager.upload_chunks_concurrently(
            source.path,
            bucket.blob(f"put/{key}"),
            chunk_size=part_size_bytes(work),
            worker_type=transfer_manager.THREAD,
            max_workers=NUM_UPLOADS,
        )
        return source.path.stat().st_size

    return await one_by_one(write, work)

"""google-cloud-storage's transfer_manager, with threads: for it they were faster than processes.

It moves large objects between the service and files, so there is one here, in memory.
"""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from google.cloud.storage import transfer_manager  # type: ignore[import-untyped]

from perf.peers._parts import part_size_bytes, pieces
from perf.peers.google import NUM_THREADS, open_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.work import Work

NUM_WORKERS = 8
"""Its own default, which was best here."""


@contextmanager
def _file() -> Iterator[Path]:
    descriptor = os.memfd_create("perf")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    bucket = open_bucket(work)
    pairs = [(bucket.blob(key), io.BytesIO()) for key in work.each_key()]
    transfer_manager.download_many(
        pairs, worker_type=transfer_manager.THREAD, max_workers=NUM_THREADS, raise_exception=True
    )
    return sum(body.getbuffer().nbytes for _, body in pairs)


async def get_one(work: Work) -> int:
    """Read one object after the other, each in ranges, and return the bytes received."""
    bucket, total = open_bucket(work), 0
    with _file() as path:
        for key in work.each_key():
            transfer_manager.download_chunks_concurrently(
                bucket.blob(key),
                path,
                chunk_size=work.range_size_bytes,
                worker_type=transfer_manager.THREAD,
                max_workers=NUM_WORKERS,
            )
            total += path.stat().st_size
    return total


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    bucket, body = open_bucket(work), work.body()
    pairs = [(io.BytesIO(body), bucket.blob(f"put/{key}")) for key in work.each_key()]
    transfer_manager.upload_many(
        pairs, worker_type=transfer_manager.THREAD, max_workers=NUM_THREADS, raise_exception=True
    )
    return sum(int(blob.size) for _, blob in pairs)


async def put_one(work: Work) -> int:
    """Write one object after the other in parts, from a file, and return the bytes sent."""
    bucket, total = open_bucket(work), 0
    with _file() as path:
        with path.open("wb") as file:
            for piece in pieces(work):
                file.write(piece)
        for key in work.each_key():
            transfer_manager.upload_chunks_concurrently(
                path,
                bucket.blob(f"put/{key}"),
                chunk_size=part_size_bytes(work),
                worker_type=transfer_manager.THREAD,
                max_workers=NUM_WORKERS,
            )
            total += path.stat().st_size
    return total

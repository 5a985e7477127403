"""boto3: a pool of threads, and boto3's own transfers of large objects."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import boto3  # type: ignore[import-untyped]
from boto3.s3.transfer import TransferConfig  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]

from perf._meter import steady
from perf.peers._parts import part_size_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Work

_MAX_THREADS = 32
"""More threads make it slower, because they share one interpreter."""


def _open(work: Work) -> Any:
    config = Config(
        max_pool_connections=work.in_flight,
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", endpoint_url=work.url, config=config)


async def _in_threads(one: Callable[[str], int], work: Work) -> int:
    with ThreadPoolExecutor(min(work.in_flight, _MAX_THREADS)) as pool:

        async def move(work: Work) -> int:
            return sum(pool.map(one, work.each_key()))

        return await steady(move, work)


def _transfers(work: Work) -> Any:
    return TransferConfig(multipart_chunksize=part_size_bytes(work), max_concurrency=work.in_flight)


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    client = _open(work)

    def one(key: str) -> int:
        return len(client.get_object(Bucket=work.bucket, Key=key)["Body"].read())

    return await _in_threads(one, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, in ranges, and return the bytes received."""
    client = _open(work)

    async def read(work: Work) -> int:
        total = 0
        for key in work.each_key():
            target = io.BytesIO()
            client.download_fileobj(work.bucket, key, target, Config=_transfers(work))
            total += target.tell()
        return total

    return await steady(read, work)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    client, data = _open(work), work.body()

    def one(key: str) -> int:
        client.put_object(Bucket=work.bucket, Key=f"put/{key}", Body=data)
        return len(data)

    return await _in_threads(one, work)


async def put_one(work: Work) -> int:
    """Write one object after the other in parallel parts and return the bytes sent."""
    client = _open(work)

    async def write(work: Work) -> int:
        data, total = work.body(), 0
        for key in work.each_key():
            source = io.BytesIO(data)
            client.upload_fileobj(source, work.bucket, f"put/{key}", Config=_transfers(work))
            total += len(data)
        return total

    return await steady(write, work)

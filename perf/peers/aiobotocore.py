"""aiobotocore: botocore over aiohttp, with one connection for each request in flight."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiobotocore.config import AioConfig  # type: ignore[import-not-found, import-untyped]
from aiobotocore.session import get_session  # type: ignore[import-not-found, import-untyped]

from perf._meter import steady
from perf.peers._parts import fill, part_size_bytes, put_into
from perf.work import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from perf.work import Work


@asynccontextmanager
async def _open(work: Work) -> AsyncIterator[Any]:
    config = AioConfig(
        max_pool_connections=work.in_flight,
        s3={"addressing_style": "path"},
        # Faster.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    async with get_session().create_client("s3", endpoint_url=work.url, config=config) as client:
        yield client


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    async with _open(work) as client:

        async def one(key: str) -> int:
            answer = await client.get_object(Bucket=work.bucket, Key=key)
            async with answer["Body"] as body:
                return len(await body.read())

        return await bounded(one, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, in ranges, each into memory of its own."""
    async with _open(work) as client:

        async def read(key: str, start: int, end: int, view: memoryview) -> int:
            answer = await client.get_object(
                Bucket=work.bucket, Key=key, Range=f"bytes={start}-{end - 1}"
            )
            async with answer["Body"] as body:
                return put_into(view, await body.read())

        return await fill(read, work, again=False)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    data = work.body()
    async with _open(work) as client:

        async def one(key: str) -> int:
            await client.put_object(Bucket=work.bucket, Key=f"put/{key}", Body=data)
            return len(data)

        return await bounded(one, work)


async def put_one(work: Work) -> int:
    """Write one object after the other in parallel parts and return the bytes sent."""
    async with _open(work) as client:

        async def write(work: Work) -> int:
            data, step, total = memoryview(work.body()), part_size_bytes(work), 0
            for key in work.each_key():
                total += await _put_parts(client, work, f"put/{key}", data, step)
            return total

        return await steady(write, work)


async def _put_parts(client: Any, work: Work, key: str, data: memoryview, step: int) -> int:
    target = {"Bucket": work.bucket, "Key": key}
    upload = await client.create_multipart_upload(**target)
    limit = asyncio.Semaphore(work.in_flight)

    async def part(number: int, start: int) -> dict[str, Any]:
        async with limit:
            body = bytes(data[start : start + step])
            response = await client.upload_part(
                **target, UploadId=upload["UploadId"], PartNumber=number, Body=body
            )
            return {"ETag": response["ETag"], "PartNumber": number}

    starts = range(0, len(data), step)
    parts = await asyncio.gather(*(part(at + 1, start) for at, start in enumerate(starts)))
    await client.complete_multipart_upload(
        **target, UploadId=upload["UploadId"], MultipartUpload={"Parts": parts}
    )
    return len(data)

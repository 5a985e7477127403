"""google-cloud-storage, with a pool of threads, and with checksums (the default)."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import requests.adapters
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage  # type: ignore[import-untyped]

from perf._meter import steady
from perf.pages import pages
from perf.peers._fresh import first_gets
from perf.peers._parts import put_into, ranges

if TYPE_CHECKING:
    from perf.work import Work

NUM_THREADS = 16
"""More threads were not faster, because they wait for each other."""


_FIRST_GET = """
import sys
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

url, uri, bucket, key = sys.argv[1:]
client = storage.Client(
    project="perf",
    credentials=AnonymousCredentials(),
    client_options={"api_endpoint": url},
)
print(len(client.bucket(bucket).blob(key).download_as_bytes()))
"""


def open_bucket(work: Work, num_connections: int = NUM_THREADS) -> storage.Bucket:
    """Return the bucket, with one connection for each thread, so that connections are reused."""
    client = storage.Client(
        project="perf",
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
        client_options={"api_endpoint": work.url},
    )
    session = client._http  # noqa: SLF001  the documented way to set the size of its pool
    session.mount(work.url, requests.adapters.HTTPAdapter(pool_maxsize=num_connections))
    # Do not look up proxies, ~/.netrc and CA files in the environment for each request.
    session.trust_env = False
    if work.ca_file:
        session.verify = work.ca_file
    return client.bucket(work.bucket)


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    bucket = open_bucket(work)
    with ThreadPoolExecutor(NUM_THREADS) as threads:

        async def read(work: Work) -> int:
            bodies = threads.map(lambda key: bucket.blob(key).download_as_bytes(), work.each_key())
            return sum(len(body) for body in bodies)

        return await steady(read, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, each in one request, and return the bytes received."""
    bucket = open_bucket(work)

    async def read(work: Work) -> int:
        return sum(len(bucket.blob(key).download_as_bytes()) for key in work.each_key())

    return await steady(read, work)


async def get_into(work: Work) -> int:
    """Read one object after the other into the same memory and return the bytes received."""
    bucket, view = open_bucket(work), memoryview(bytearray(work.size_bytes))
    with ThreadPoolExecutor(NUM_THREADS) as threads:

        def read(key: str, start: int, end: int) -> int:
            data = bucket.blob(key).download_as_bytes(start=start, end=end - 1)
            return put_into(view[start:end], data)

        async def move(work: Work) -> int:
            total = 0
            for key in work.each_key():
                total += sum(threads.map(lambda span, key=key: read(key, *span), ranges(work)))
            return total

        return await steady(move, work)


async def list_all(work: Work) -> int:
    """List a set page by page, and return the bytes of its objects."""
    blobs = list(open_bucket(work).list_blobs(prefix=work.prefix))
    return sum(blob.size for blob in blobs)


async def parse_all(work: Work) -> int:
    """Parse pages as `list_blobs` does, and return the bytes of all objects."""
    bucket, blobs = open_bucket(work), []
    for body in pages(work):
        for item in json.loads(body)["items"]:
            blob = bucket.blob(item["name"])
            blob._set_properties(item)  # noqa: SLF001  as in `list_blobs`
            blobs.append(blob)
    return sum(blob.size for blob in blobs)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    bucket = open_bucket(work)
    body = work.body()

    def one(key: str) -> int:
        bucket.blob(f"put/{key}").upload_from_string(body)
        return len(body)

    with ThreadPoolExecutor(NUM_THREADS) as threads:

        async def write(work: Work) -> int:
            return sum(threads.map(one, work.each_key()))

        return await steady(write, work)


async def put_one(work: Work) -> int:
    """Write one object after the other by a resumable upload and return the bytes sent."""
    bucket = open_bucket(work)

    async def write(work: Work) -> int:
        body, total = io.BytesIO(work.body()), 0
        for key in work.each_key():
            blob = bucket.blob(f"put/{key}", chunk_size=work.range_size_bytes)
            blob.upload_from_file(body, rewind=True, size=work.size_bytes)
            total += blob.size
        return total

    return await steady(write, work)


async def first_get(work: Work) -> int:
    """Read every key in a fresh process and return the bytes received."""
    return first_gets(_FIRST_GET, work)

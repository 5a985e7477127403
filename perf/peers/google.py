"""google-cloud-storage, with a pool of 16 threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import requests.adapters
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

if TYPE_CHECKING:
    from perf.work import Work

NUM_THREADS = 16


def _bucket(work: Work) -> storage.Bucket:
    client = storage.Client(
        project="perf",
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": work.url},
    )
    # As many connections as threads, so that none is opened anew for each request.
    client._http.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=NUM_THREADS))  # noqa: SLF001
    return client.bucket(work.bucket)


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    bucket = _bucket(work)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        bodies = threads.map(lambda key: bucket.blob(key).download_as_bytes(), work.each_key())
        return sum(len(body) for body in bodies)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    bucket = _bucket(work)
    body = work.body()

    def one(key: str) -> int:
        bucket.blob(f"put/{key}").upload_from_string(body)
        return len(body)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return sum(threads.map(one, work.each_key()))

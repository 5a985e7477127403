"""google-cloud-storage, with a pool of threads, and with checksums (the default)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import requests.adapters
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage  # type: ignore[import-untyped]

from perf._meter import steady
from perf.peers._fresh import first_gets

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
    bucket = open_bucket(work)
    with ThreadPoolExecutor(NUM_THREADS) as threads:

        async def read(work: Work) -> int:
            bodies = threads.map(lambda key: bucket.blob(key).download_as_bytes(), work.each_key())
            return sum(len(body) for body in bodies)

        return await steady(read, work)


async def list_all(work: Work) -> int:
    """List a set page by page, and return the bytes of its objects."""
    blobs = list(open_bucket(work).list_blobs(prefix=work.prefix))
    return sum(blob.size for blob in blobs)


async def first_get(work: Work) -> int:
    return first_gets(_FIRST_GET, work)

"""The library requests with the XML API and a pool of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import requests
import requests.adapters

from perf._meter import steady
from perf.peers._parts import memory_of, ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.work import Work

NUM_THREADS = 16
"""More threads were not faster, because they wait for each other."""


def _open(work: Work) -> requests.Session:
    session = requests.Session()
    session.mount(work.url, requests.adapters.HTTPAdapter(pool_maxsize=NUM_THREADS))
    # Do not look up proxies and ~/.netrc for each request.
    session.trust_env = False
    if work.ca_file:
        session.verify = work.ca_file
    return session


async def get_many(work: Work) -> int:
    """Read every key and return the bytes received."""
    root = f"{work.url}/{work.bucket}/"
    with _open(work) as session, ThreadPoolExecutor(NUM_THREADS) as threads:

        def one(key: str) -> int:
            response = session.get(root + key)
            response.raise_for_status()
            return len(response.content)

        return await _in_threads(threads, one, work)


async def get_one(work: Work) -> int:
    """Read one object after the other, in ranges, each into memory of its own."""
    return await _read(work, again=False)


async def get_into(work: Work) -> int:
    """Read one object after the other into the same memory, in ranges."""
    return await _read(work, again=True)


async def _read(work: Work, *, again: bool) -> int:
    root = f"{work.url}/{work.bucket}/"
    with _open(work) as session, ThreadPoolExecutor(NUM_THREADS) as threads:

        def read(key: str, view: memoryview, start: int, end: int) -> int:
            headers, at = {"Range": f"bytes={start}-{end - 1}"}, start
            with session.get(root + key, headers=headers, stream=True) as response:
                response.raise_for_status()
                # urllib3 reads directly into this memory.
                while count := response.raw.readinto(view[at:end]):
                    at += count
            return at - start

        async def move(work: Work) -> int:
            total = 0
            for key, view in zip(work.each_key(), memory_of(work, again=again), strict=False):
                one = partial(read, key, view)
                total += sum(threads.map(lambda span, one=one: one(*span), ranges(work)))
            return total

        return await steady(move, work)


async def put_many(work: Work) -> int:
    """Write every key and return the bytes sent."""
    root, body = f"{work.url}/{work.bucket}/put/", work.body()
    with _open(work) as session, ThreadPoolExecutor(NUM_THREADS) as threads:

        def one(key: str) -> int:
            session.put(root + key, data=body).raise_for_status()
            return len(body)

        return await _in_threads(threads, one, work)


async def _in_threads(threads: ThreadPoolExecutor, one: Callable[[str], int], work: Work) -> int:
    async def move(work: Work) -> int:
        return sum(threads.map(one, work.each_key()))

    return await steady(move, work)

"""What ends an iteration from outside: nothing hangs, and nothing is lost in silence."""

from __future__ import annotations

import asyncio

import pytest

import aioflux
from aioflux.testing import GCSServer


@pytest.fixture
def server():
    with GCSServer(buckets=("bucket",)) as served:
        for at in range(40):
            served.put("bucket", f"{at:03}", b"%d" % at)
        yield served


def opened(server: GCSServer) -> aioflux.Store:
    options = aioflux.TransferOptions(max_in_flight=4)
    return aioflux.open_store("gs://bucket", endpoint_url=server.url, transfer=options)


KEYS = [f"{at:03}" for at in range(40)]


async def test_workers_that_another_client_cancels_end_the_iteration(server: GCSServer) -> None:
    async with opened(server) as store:
        _ = [key async for key, _ in store.get_many(KEYS)]
        me = asyncio.current_task()

        def cancel_all() -> None:
            for task in asyncio.all_tasks():
                if task is not me:
                    task.cancel()

        with server.faults.inject("objects.media", delay_seconds=3600):
            loop = asyncio.get_running_loop()

            def cancel_when_all_wait() -> None:
                if server.faults.injected["delay"] < 4:
                    loop.call_later(0.01, cancel_when_all_wait)
                else:
                    cancel_all()

            cancel_when_all_wait()
            async with asyncio.timeout(100) as limit:
                with pytest.raises(asyncio.CancelledError):
                    _ = [key async for key, _ in store.get_many(KEYS)]
            assert not limit.expired()
        assert store.stats.num_in_flight == 0


@pytest.mark.parametrize("error", [ValueError("x"), GeneratorExit()])
async def test_keys_that_fail_are_not_requested_again(
    server: GCSServer, error: BaseException
) -> None:
    num_asked = 0

    class Keys:
        def __iter__(self):
            return self

        def __next__(self) -> str:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 20:
                raise error
            return KEYS[num_asked - 1]

    async with opened(server) as store:
        _ = [key async for key, _ in store.get_many(KEYS)]
        got: list[str] = []

        async def read() -> None:
            async for key, _ in store.get_many(Keys()):
                got.append(key)

        with pytest.raises((ValueError, RuntimeError)):
            await read()
        assert got == KEYS[: len(got)]
        assert num_asked == 20


async def test_empty_objects_are_no_bytes_sent(server: GCSServer) -> None:
    for at in range(10):
        server.put("bucket", f"empty/{at}", b"")
    async with opened(server) as store:
        _ = [key async for key, _ in store.get_many(KEYS)]
        got = [data async for _, data in store.get_many(f"empty/{at}" for at in range(10))]
        assert got == [b""] * 10
        assert store.stats.bytes_sent == 0

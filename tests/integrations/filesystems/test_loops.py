"""Loops, threads and processes: one filesystem works on all of them."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.asyn import get_loop, sync
from fsspec.generic import GenericFileSystem
from google.oauth2.credentials import Credentials

import aioflux
from aioflux.integrations.fsspec import GSFileSystem, register

if TYPE_CHECKING:
    from aioflux.testing import GCSServer


def module_token() -> str:
    return "secret"


async def test_blocking_calls_work_beside_a_running_loop(fs: GSFileSystem, bucket: str) -> None:
    """As in a notebook."""
    fs.pipe_file(f"{bucket}/a", b"data")
    with fs.open(f"{bucket}/a") as file:
        assert file.read() == b"data"


async def test_coroutines_run_on_the_loop_that_awaits_them(shared: GCSServer, bucket: str) -> None:
    async with GSFileSystem(endpoint_url=shared.url, asynchronous=True) as fs:
        await fs._pipe_file(f"{bucket}/a", b"data")
        assert await fs._cat_file(f"{bucket}/a") == b"data"
        assert await fs._ls(bucket, detail=False) == [f"{bucket}/a"]
        store = fs._store(fs._split(bucket))
        assert [each for each, _ in store._sessions.open_sessions()] == [asyncio.get_running_loop()]
    assert store._sessions.open_sessions() == []


def test_several_loops_one_after_the_other(shared: GCSServer, bucket: str) -> None:
    fs = GSFileSystem(endpoint_url=shared.url, asynchronous=True)

    async def work(number: int) -> bytes:
        async with fs:
            await fs._pipe_file(f"{bucket}/a", b"%d" % number)
            return await fs._cat_file(f"{bucket}/a")

    assert [asyncio.run(work(number)) for number in range(3)] == [b"0", b"1", b"2"]


def test_an_asynchronous_one_serves_blocking_calls(shared: GCSServer, bucket: str) -> None:
    fs = GSFileSystem(endpoint_url=shared.url, asynchronous=True)
    fs.pipe_file(f"{bucket}/a", b"data")
    assert fs.cat(f"{bucket}/a") == b"data"


def test_a_loop_of_the_caller(shared: GCSServer, bucket: str) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        fs = GSFileSystem(endpoint_url=shared.url, loop=loop)
        assert fs.loop is loop
        fs.pipe_file(f"{bucket}/a", b"data")
        assert list(fs.walk(bucket)) == [(bucket, [], ["a"])]
        assert loop in fs._store(fs._split(bucket))._sessions
        sync(loop, fs.aclose)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_fsspec_may_run_coroutines_on_the_loop_of_blocking_calls(
    fs: GSFileSystem, bucket: str
) -> None:
    fs.pipe_file(f"{bucket}/a", b"data")
    assert sync(fs.loop, fs._cat_file, f"{bucket}/a") == b"data"


def test_no_thread_of_fsspec_is_started(shared: GCSServer, bucket: str) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    before = names()
    GSFileSystem(endpoint_url=shared.url, skip_instance_cache=True).touch(f"{bucket}/a")
    assert "fsspecIO" in before or "fsspecIO" not in names()


def test_fsspec_may_use_it_on_its_own_loop(shared: GCSServer, bucket: str) -> None:
    register()
    fs = GSFileSystem(endpoint_url=shared.url)
    fs.pipe_file(f"{bucket}/a", b"data")
    generic = GenericFileSystem(
        default_method="options",
        storage_options={
            "aiogs": {"endpoint_url": shared.url},
        },
    )
    generic.cp(f"aiogs://{bucket}/a", f"aiogs://{bucket}/b")
    assert shared.get(bucket, "b") == b"data"
    sync(get_loop(), fs.aclose)


def test_many_threads_share_one(fs: GSFileSystem, bucket: str) -> None:
    def work(number: int) -> bytes:
        path = f"{bucket}/{number}"
        with fs.open(path, "wb") as file:
            file.write(b"%d" % number)
        return fs.cat_file(path)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(40))) == [b"%d" % number for number in range(40)]


def read_in_child(fs: GSFileSystem, path: str, queue: Any) -> None:
    try:
        with fs.open(path) as file:
            queue.put((fs.cat_file(path), file.read()))
    except BaseException as exc:
        queue.put(exc)
        raise


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.more)])
def test_a_child_process_uses_it(fs: GSFileSystem, bucket: str, method: str) -> None:
    """fsspec rejects a fork of an asynchronous filesystem."""
    fs.pipe_file(f"{bucket}/a", b"data")
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=read_in_child, args=(fs, f"{bucket}/a", queue))
    child.start()
    assert queue.get(timeout=120) == (b"data", b"data")
    child.join()
    assert child.exitcode == 0
    assert fs.cat_file(f"{bucket}/a") == b"data"


def test_a_pickle_keeps_the_options(shared: GCSServer, bucket: str) -> None:
    transfer = aioflux.TransferOptions(max_in_flight=5)
    fs = GSFileSystem(
        endpoint_url=shared.url, transfer=transfer, credentials=module_token, batch_size=7
    )
    copy = pickle.loads(pickle.dumps(fs))
    assert copy == fs
    copy.clear_instance_cache()
    copy = pickle.loads(pickle.dumps(copy))
    assert copy.options["transfer"] == transfer
    assert copy.batch_size == 7


def test_credentials_are_not_pickled(shared: GCSServer) -> None:
    fs = GSFileSystem(endpoint_url=shared.url, credentials=Credentials("secret"))
    with pytest.raises(TypeError, match="holds credentials and cannot be pickled"):
        pickle.dumps(fs)
    assert "secret" not in repr(fs)


def test_equal_options_are_one_filesystem(shared: GCSServer) -> None:
    fs = GSFileSystem(endpoint_url=shared.url)
    assert fs is GSFileSystem(endpoint_url=shared.url)
    assert fs != GSFileSystem(endpoint_url="http://127.0.0.1:9")
    assert fs.fsid == f"aiogs({shared.url})"

"""What a store leaves behind when it is left early, refused or taken along."""

from __future__ import annotations

import asyncio
import functools
import gc
import multiprocessing
import os
import pickle

import pytest

import aioflux
from aioflux.options import CleanupTimeouts
from aioflux.testing import GCSServer

NUM_OBJECTS = 300
SECRET = "ya29.planted"


def give_token(token: str = SECRET) -> str:
    return token


@pytest.fixture(scope="module")
def server():
    with GCSServer(buckets=("bucket",)) as running:
        for at in range(NUM_OBJECTS):
            running.put("bucket", f"k/{at:03}", b"x" * 100)
        yield running


async def test_a_store_closes_while_connections_are_being_opened(server):
    """Leaving after the first object of many ends at once; it must not wait on a set event."""
    for _ in range(20):
        async with (
            asyncio.timeout(100),
            aioflux.open_store("gs://bucket/k", endpoint_url=server.url) as store,
        ):
            async for key, data in store.get_many(store.list()):
                assert (key, len(data)) == ("000", 100)
                break


@pytest.mark.parametrize("num_lost", [1, 2])
async def test_a_delete_whose_answer_was_lost_has_deleted(server, num_lost):
    """On a kept-alive connection too, where a client may resend by itself."""
    async with aioflux.open_store("gs://bucket/d", endpoint_url=server.url) as store:
        for at in range(3):
            await store.put(f"{at}", b"1")
        await store.delete("0")
        with server.faults.inject("objects.delete", lost=True, times=num_lost):
            await store.delete("1")
        with server.faults.inject("objects.delete", lost=True, times=num_lost):
            assert (await store.delete_many(["2"])).deleted == ("2",)
        assert await store.list_all() == []


async def test_an_error_carries_no_token_anywhere(server):
    """Neither in its text nor in what it came from: tracebacks show both."""
    uri, options = "gs://bucket", {"endpoint_url": server.url, "credentials": give_token}
    async with aioflux.open_store(uri, **options) as store:
        calls = [store.head("no"), store.get("no"), store.delete("no"), store.compose("c", ["no"])]
        for call in calls:
            with pytest.raises(aioflux.NotFoundError) as raised:
                await call
            error: BaseException | None = raised.value
            while error is not None:
                assert SECRET not in repr(error) + str(error) + repr(vars(error))
                error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "provider",
    [functools.partial(give_token, SECRET), lambda: SECRET],
    ids=["partial", "lambda"],
)
def test_a_store_with_a_provider_that_could_hold_a_token_does_not_pickle(provider):
    """Only a function of a module, which pickles as its name, goes along."""
    store = aioflux.open_store("gs://bucket", credentials=provider)
    with pytest.raises((TypeError, pickle.PicklingError), match="pickle"):
        pickle.dumps(store)
    named = aioflux.open_store("gs://bucket", credentials=give_token)
    assert SECRET.encode() not in pickle.dumps(named)


async def test_delete_many_deletes_what_was_listed_and_nothing_else():
    """Metadata pins the generation, and one string is no list of keys."""
    async with aioflux.open_store("memory://closing-delete-many") as store:
        stale = await store.put("a", b"old")
        await store.put("a", b"new")
        result = await store.delete_many([stale])
        assert result.deleted == ()
        assert set(result.errors) == {"a"}
        with pytest.raises(TypeError, match="iterable of strings"):
            await store.delete_many("a")
        assert await store.get("a") == b"new"


async def test_an_endpoint_with_a_path_is_refused():
    """Some requests would keep the path and some would drop it."""
    store = aioflux.open_store("gs://bucket", endpoint_url="http://127.0.0.1:9/proxy")
    with pytest.raises(ValueError, match="has a path"):
        await store.get("a")


async def test_requests_under_way_at_close_end_in_an_error_of_ours(server):
    """They name their object, and nothing foreign leaves the package."""
    store = aioflux.open_store("gs://bucket/k", endpoint_url=server.url)
    calls = [asyncio.ensure_future(store.get(f"{at:03}")) for at in range(100)]
    calls += [asyncio.ensure_future(store.head(f"{at:03}")) for at in range(100)]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert done
    await store.aclose()
    async with asyncio.timeout(100):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    assert errors
    assert {type(each) for each in errors} <= {aioflux.StorageError, aioflux.TransientError}


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("mode", ["overwrite", "create"])
@pytest.mark.parametrize("end", ["kept", "dropped"])
async def test_a_store_that_is_closed_takes_its_open_writers_along(server, end, mode):
    """Also one whose clean-up has just begun, because nobody holds it any more."""
    options = aioflux.TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=10 << 20)
    open_store = functools.partial(
        aioflux.open_store, "gs://bucket/w", endpoint_url=server.url, transfer=options
    )
    async with open_store() as store:
        writing = store.open_writer("big", mode=mode)
        writer = await writing.__aenter__()
        await writer.write(bytes(11 << 20))
        assert server.stats.open_uploads == 1
        if end == "dropped":
            del writing
            gc.collect()
    assert server.stats.open_uploads == 0
    assert server.keys("bucket", "w/") == []
    with pytest.raises(aioflux.StorageError, match="its store was closed"):
        await writer.write(b"more")


async def upload_is_open(server):
    async with asyncio.timeout(100):
        while not server.stats.open_uploads:  # noqa: ASYNC110 - it happens in the server
            await asyncio.sleep(0.01)


async def test_a_writer_whose_store_was_closed_does_not_end_as_if_it_had_written(server):
    options = aioflux.TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=10 << 20)
    store = aioflux.open_store("gs://bucket/e", endpoint_url=server.url, transfer=options)

    async def write() -> None:
        async with store.open_writer("big") as writer:
            await writer.write(bytes(11 << 20))
            await store.aclose()

    with pytest.raises(aioflux.StorageError, match="gs://bucket/e/big: its store was closed"):
        await write()
    assert server.stats.open_uploads == 0


async def test_a_large_put_whose_store_is_closed_raises(server):
    options = aioflux.TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=10 << 20)
    store = aioflux.open_store("gs://bucket/e", endpoint_url=server.url, transfer=options)
    with server.faults.inject("multipart.part", delay_seconds=1e3):
        putting = asyncio.create_task(store.put("big", bytes(40 << 20)))
        await upload_is_open(server)
        await store.aclose()
        with pytest.raises(aioflux.StorageError, match="its store was closed"):
            await putting
    assert server.stats.open_uploads == 0


async def test_an_upload_that_is_heard_of_while_its_store_closes_sends_no_part(server):
    """Its parts would be begun after those there were had been cancelled, and waited for."""
    options = aioflux.TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=10 << 20)
    store = aioflux.open_store("gs://bucket/e", endpoint_url=server.url, transfer=options)
    with (
        server.faults.inject("multipart.create", delay_seconds=0.2),
        server.faults.inject("multipart.part", delay_seconds=1e3),
    ):
        putting = asyncio.create_task(store.put("big", bytes(40 << 20)))
        await upload_is_open(server)
        async with asyncio.timeout(100):
            await store.aclose()
            with pytest.raises(aioflux.StorageError, match="its store was closed"):
                await putting
    assert server.stats.open_uploads == 0


async def test_an_upload_that_is_being_completed_is_not_said_to_be_gone(server):
    options = aioflux.TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=10 << 20)
    store = aioflux.open_store("gs://bucket/e", endpoint_url=server.url, transfer=options)
    with server.faults.inject("multipart.complete", delay_seconds=1e3):
        putting = asyncio.create_task(store.put("whole", bytes(11 << 20)))
        async with asyncio.timeout(100):
            while "e/whole" not in server.keys("bucket"):  # noqa: ASYNC110 - it happens in the server
                await asyncio.sleep(0.01)
        await store.aclose()
        with pytest.raises(aioflux.StorageError, match=r"was closed.*may have been published"):
            await putting


async def test_closing_a_store_does_not_wait_for_another(server):
    """Its clean-up may hang on a service that no longer answers."""
    cleanup = CleanupTimeouts(total_seconds=1e3, abort_wait_seconds=0.1, close_seconds=0.2)
    options = aioflux.TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=10 << 20)
    stuck = aioflux.open_store(
        "gs://bucket/e",
        endpoint_url=server.url,
        transfer=options,
        timeouts=aioflux.Timeouts(cleanup=cleanup),
    )
    with server.faults.inject("multipart.abort", delay_seconds=1e3):

        async def write() -> None:
            async with stuck.open_writer("big") as writer:
                await writer.write(bytes(11 << 20))
                await asyncio.Event().wait()

        writing = asyncio.create_task(write())
        await upload_is_open(server)
        writing.cancel()
        async with asyncio.timeout(100) as limit:
            with pytest.raises(asyncio.CancelledError):
                await writing
            assert not limit.expired()
            async with aioflux.open_store("memory://idle") as idle:
                await idle.put("a", b"1")
    await stuck.aclose()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_hook_does_not_end_the_loop_that_all_stores_share(kind):
    def leave(progress):
        raise kind

    with (
        aioflux.sync.open_store("memory://hooked", progress=leave) as store,
        pytest.raises(RuntimeError, match=f"the progress hook raised {kind.__name__}"),
    ):
        store.put("a", b"1")
    with aioflux.sync.open_store("memory://hooked") as store:
        assert store.get("a") == b"1"


def test_what_was_opened_before_a_fork_does_not_speak_in_the_child(server):
    """It would write on the parent's connection, and the parent get another's bytes."""
    store = aioflux.open_store("gs://bucket/k", endpoint_url=server.url)

    async def play() -> None:
        session = store._sessions.current()
        await store.get("000")
        child = multiprocessing.get_context("fork").Process(target=speak, args=(session,))
        child.start()
        await asyncio.to_thread(child.join, 200)
        assert child.exitcode == 7
        assert len(await store.get("001")) == 100
        await store.aclose()

    asyncio.run(play())


def speak(session) -> None:
    call = session.call("000", session.service.head, "000")
    try:
        call.send(None)
    except RuntimeError as exc:
        os._exit(7 if "before a fork" in str(exc) else 1)
    os._exit(2)

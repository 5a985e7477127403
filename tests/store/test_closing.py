"""What a store leaves behind when it is left early, refused or taken along."""

from __future__ import annotations

import asyncio
import functools
import gc
import pickle

import pytest

import aioflux
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
            asyncio.timeout(10),
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
        with pytest.raises(TypeError, match="several keys"):
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
    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    assert errors
    assert {type(each) for each in errors} <= {aioflux.StorageError, aioflux.TransientError}


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
    with pytest.raises(ValueError, match="closed writer"):
        await writer.write(b"more")

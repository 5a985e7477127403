"""Servers that treat conditions in their own way: no write is void in silence, none is refused."""

from __future__ import annotations

import asyncio
import multiprocessing
import uuid
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from botocore.credentials import Credentials

import aioflux
from aioflux import (
    AlreadyExistsError,
    PreconditionFailedError,
    S3Access,
    TransferOptions,
    UnsupportedError,
)
from aioflux.integrations.fsspec import S3FileSystem
from aioflux.testing.faults import Fault, FlakyStore
from tests.servers.process_state import forget_servers

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers.conditions import ConditionsGateway
    from tests.servers.moto import Moto

PART = 5 * 1024 * 1024
IGNORED = "ignore:.* does not compare .* when it writes:RuntimeWarning"


@pytest.fixture(autouse=True)
def _forget() -> None:
    forget_servers()


class Door:
    """An empty prefix, and what is in it past the store."""

    def __init__(self, moto: Moto) -> None:
        self._client = moto.door()
        self.prefix = f"{uuid.uuid4().hex}/"
        self.keys_of_moto = Credentials(moto.access_key, moto.secret_key)

    def settings(self, server: ConditionsGateway, **access: Any) -> dict[str, Any]:
        credentials = S3Access(credentials=self.keys_of_moto, checksums=False, **access)
        return {"endpoint_url": server.url, "credentials": credentials}

    def open(self, server: ConditionsGateway, **access: Any) -> aioflux.Store:
        server.requests.clear()
        return aioflux.open_store(self.uri, **self.settings(server, **access))

    @property
    def uri(self) -> str:
        return f"s3://bucket/{self.prefix}"

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket="bucket", Key=self.prefix + key, Body=data)

    def get(self, key: str) -> bytes:
        answer = self._client.get_object(Bucket="bucket", Key=self.prefix + key)
        with answer["Body"] as body:
            data: bytes = body.read()
        return data

    def keys(self) -> list[str]:
        found = self._client.list_objects_v2(Bucket="bucket", Prefix=self.prefix)
        return [each["Key"].removeprefix(self.prefix) for each in found.get("Contents", [])]

    def has(self, key: str) -> bool:
        return key in self.keys()

    def num_uploads(self) -> int:
        found = self._client.list_multipart_uploads(Bucket="bucket", Prefix=self.prefix)
        return len(found.get("Uploads", []))


@pytest.fixture
def door(moto: Moto) -> Door:
    return Door(moto)


# --- a server that ignores conditions ------------------------------------------------------------

WRITES: dict[str, Callable[[aioflux.Store, str], Any]] = {
    "create": lambda store, seen: store.put("a", b"new", mode="create"),
    "replace": lambda store, seen: store.put("a", b"new", if_generation_match=seen),
    "create large": lambda store, seen: store.put("a", bytes(PART + 1), mode="create"),
    "replace large": lambda store, seen: store.put("a", bytes(PART + 1), if_generation_match=seen),
    "copy": lambda store, seen: store.copy("source", "a", mode="create"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_a_condition_that_is_ignored_is_refused(
    ignoring_server: ConditionsGateway, door: Door, write: Callable[[aioflux.Store, str], Any]
) -> None:
    """Before anything is sent, by an error that names the server and what to do."""
    door.put("source", b"source")
    door.put("a", b"old")
    transfer = TransferOptions(part_size_bytes=PART, max_buffered_bytes=2 * PART)
    settings = door.settings(ignoring_server)
    async with aioflux.open_store(door.uri, transfer=transfer, **settings) as store:
        seen = (await store.head("a")).generation
        with pytest.raises(UnsupportedError, match="require_conditions=False") as failure:
            await write(store, seen)
        assert ignoring_server.url in str(failure.value)
        assert failure.value.uri.endswith("/a")
        await store.put("b", b"without")
    assert door.get("a") == b"old"
    assert door.keys() == ["a", "b", "source"]
    assert door.num_uploads() == 0


async def test_racing_creators_share_one_probe(
    ignoring_server: ConditionsGateway, door: Door
) -> None:
    """Each has a store of its own; none is told that it won."""
    stores = [door.open(ignoring_server) for _ in range(20)]
    results = await asyncio.gather(
        *(store.put("lock", b"%d" % at, mode="create") for at, store in enumerate(stores)),
        return_exceptions=True,
    )
    await asyncio.gather(*(store.aclose() for store in stores))
    assert {type(result) for result in results} == {UnsupportedError}
    assert door.keys() == []
    num_requests = len(ignoring_server.requests)
    assert num_requests < 12
    async with aioflux.open_store(door.uri, **door.settings(ignoring_server)) as store:
        with pytest.raises(UnsupportedError):
            await store.put("lock", b"", mode="create")
    assert len(ignoring_server.requests) == num_requests


async def _create(door: Door, server: ConditionsGateway) -> None:
    async with aioflux.open_store(door.uri, **door.settings(server)) as store:
        await store.put("child", b"1", mode="create")


async def test_a_forked_child_knows_what_its_parent_tried(
    ceph_like_server: ConditionsGateway, door: Door
) -> None:
    async with door.open(ceph_like_server) as store:
        await store.put("parent", b"1", mode="create")
        ceph_like_server.requests.clear()
        child = multiprocessing.get_context("fork").Process(
            target=lambda: asyncio.run(_create(door, ceph_like_server))
        )
        child.start()
        await asyncio.to_thread(child.join)
    assert child.exitcode == 0
    assert ceph_like_server.requests == ["PUT"]
    assert door.keys() == ["child", "parent"]


async def test_what_is_allowed_is_warned_of_once(
    ignoring_server: ConditionsGateway, door: Door
) -> None:
    """One writer at a time is served as it asks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with door.open(ignoring_server, require_conditions=False) as store:
            assert await store.check_conditions() == ["create", "replace", "delete"]
            first = await store.put("a", b"1", mode="create")
            with pytest.raises(AlreadyExistsError):
                await store.put("a", b"2", mode="create")
            await store.put("a", b"2", if_generation_match=first.generation)
            with pytest.raises(PreconditionFailedError):
                await store.put("a", b"3", if_generation_match=first.generation)
    assert [each.category for each in caught] == [RuntimeWarning]
    assert f"{ignoring_server.url}/bucket" in str(caught[0].message)
    assert door.get("a") == b"2"


async def test_a_cancelled_write_leaves_nothing_of_its_probe(
    ceph_like_server: ConditionsGateway, door: Door
) -> None:
    """Nor does the probe itself, which the end of a loop cancels."""
    hang = Fault(kind="hang")
    drawn = iter([None, hang])

    def draw(operation: str) -> Fault | None:
        return next(drawn, None) if operation == "put" else None

    plain = door.open(ceph_like_server)
    store = FlakyStore(
        door.uri,
        draw=draw,
        transfer=plain.transfer,
        retry=plain.retry,
        timeouts=aioflux.Timeouts(),
        **door.settings(ceph_like_server),
    )
    writer = asyncio.create_task(store.put("a", b"1", mode="create"))
    await hang.reached.wait()
    assert len(door.keys()) == 1
    writer.cancel()
    for task in asyncio.all_tasks() - {asyncio.current_task(), writer}:
        task.cancel()
    await store.aclose()
    assert door.keys() == []


async def test_listings_and_clean_know_the_object_of_a_probe(
    ceph_like_server: ConditionsGateway, door: Door
) -> None:
    """Such as a process leaves that was killed in the middle."""
    hang = Fault(kind="hang")
    store = FlakyStore(
        door.uri,
        draw=lambda operation: hang if operation == "delete" else None,
        transfer=TransferOptions(),
        retry=aioflux.RetryPolicy(max_attempts=1),
        timeouts=aioflux.Timeouts(),
        **door.settings(ceph_like_server),
    )
    writer = asyncio.create_task(store.put("a", b"1", mode="create"))
    await hang.reached.wait()
    [left] = door.keys()
    async with aioflux.open_store(door.uri, **door.settings(ceph_like_server)) as other:
        assert await other.list_all() == []
        found = await other.clean(older_than_seconds=0, dry_run=True)
        assert list(found.removed) == [left]
    hang.released.set()
    await writer
    await store.aclose()


# --- a server that refuses a correct ETag in quotes, and deletes without a condition -------------


async def test_a_generation_can_be_replaced_again_and_again(
    ceph_like_server: ConditionsGateway, door: Door
) -> None:
    """And what is stale is refused. A replacement costs one request."""
    async with door.open(ceph_like_server) as store:
        assert await store.check_conditions() == ["delete"]
        meta = await store.put("a", b"0", mode="create")
        for number in range(1, 4):
            ceph_like_server.requests.clear()
            stale, meta = (
                meta,
                await store.put("a", b"%d" % number, if_generation_match=meta.generation),
            )
            assert ceph_like_server.requests == ["PUT"]
            with pytest.raises(PreconditionFailedError):
                await store.put("a", b"stale", if_generation_match=stale.generation)
    assert door.get("a") == b"3"
    assert door.keys() == ["a"]


def test_files_are_appended_to(ceph_like_server: ConditionsGateway, door: Door) -> None:
    fs = S3FileSystem(skip_instance_cache=True, **door.settings(ceph_like_server))
    for number in range(3):
        with fs.open(f"bucket/{door.prefix}log", "ab") as file:
            file.write(b"%d" % number)
    assert door.get("log") == b"012"


# --- deletes -------------------------------------------------------------------------------------


@pytest.fixture(params=["ignoring_server", "ceph_like_server"])
def careless_server(request: pytest.FixtureRequest) -> ConditionsGateway:
    """A server that deletes whatever is there."""
    server: ConditionsGateway = request.getfixturevalue(request.param)
    return server


@pytest.mark.parametrize("num_objects", [1, 9], ids=["single", "page"])
async def test_a_newer_object_is_not_deleted(
    careless_server: ConditionsGateway, door: Door, num_objects: int
) -> None:
    """Nothing is written to find out that a look is needed."""
    for number in range(num_objects):
        door.put(f"{number}", b"old")
    async with door.open(careless_server) as store:
        metas = await store.list_all()
        door.put("0", b"newer")
        with pytest.raises(PreconditionFailedError, match="replaced since its generation was read"):
            await store.delete(metas[0])
        result = await store.delete_many(metas)
        assert set(result.errors) == {"0"}
        assert isinstance(result.errors["0"], PreconditionFailedError)
        assert len(result.deleted) == num_objects - 1
    assert door.get("0") == b"newer"
    assert door.keys() == ["0"]
    assert "PUT" not in careless_server.requests


async def test_a_delete_costs_one_look(careless_server: ConditionsGateway, door: Door) -> None:
    door.put("a", b"1")
    door.put("b", b"1")
    async with door.open(careless_server) as store:
        await store.delete(await store.head("a"))
        assert careless_server.requests == ["HEAD", "HEAD", "DELETE"]
        careless_server.requests.clear()
        await store.delete("b")
        assert careless_server.requests == ["HEAD", "DELETE"]
    assert door.keys() == []


async def test_a_page_whose_answer_was_lost_is_not_sent_again(
    careless_server: ConditionsGateway, door: Door
) -> None:
    """What was written since is not what was to be deleted."""
    lost = iter([Fault(kind="lose")])

    def draw(operation: str) -> Fault | None:
        if operation == "delete" and (fault := next(lost, None)):
            return fault
        if not door.has("3"):
            door.put("3", b"newer")
        return None

    for number in range(9):
        door.put(f"{number}", b"old")
    store = FlakyStore(
        door.uri,
        draw=draw,
        transfer=TransferOptions(),
        retry=aioflux.RetryPolicy(initial_seconds=1e-3),
        timeouts=aioflux.Timeouts(),
        **door.settings(careless_server),
    )
    async with store:
        result = await store.delete_many(await store.list_all())
    assert len(result.deleted) == 9
    assert door.keys() == ["3"]
    assert door.get("3") == b"newer"


async def test_where_deletes_are_compared_nothing_more_is_sent(moto: Moto, door: Door) -> None:
    """Once a conditional write has shown that they are."""
    from tests.servers.conditions import ConditionsGateway

    with ConditionsGateway(moto.url, "compares_conditions") as server:
        async with door.open(server) as store:
            assert await store.check_conditions() == []
            meta = await store.put("a", b"1")
            server.requests.clear()
            await store.delete(meta)
            assert server.requests == ["DELETE"]
            assert door.keys() == []

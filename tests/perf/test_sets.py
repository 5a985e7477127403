"""Sets of many objects: both servers list them alike, and give and compose what they list."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from obstore.store import GCSStore

import aioflux
from perf._meter import _num_requests
from perf.peers.google import open_bucket
from perf.servers import BUCKET, Server, ServerSpec, contents, open_server
from perf.servers._nginx import missing
from perf.work import Work, set_key, set_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE, COUNT = 1000, 2100
PREFIX = set_prefix(SIZE, COUNT)
KEYS = [set_key(SIZE, COUNT, index) for index in range(COUNT)]
needs_nginx = pytest.mark.skipif(bool(missing()), reason=missing() or "nginx is here")
KINDS = [pytest.param("nginx", marks=needs_nginx), pytest.param("embedded")]


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with open_server(ServerSpec(kind=request.param, sets=((SIZE, COUNT), (7, 3)))) as server:
        yield server


def work(server: Server) -> Work:
    return Work(
        peer="",
        operation="",
        url=server.url,
        counter=server.counter,
        size_bytes=SIZE,
        num_objects=COUNT,
        is_set=True,
    )


def names(server: Server, **query: str | int) -> list[str]:
    return [blob.name for blob in open_bucket(work(server)).list_blobs(**query)]


def test_keys_of_a_set_are_sorted_and_its_own() -> None:
    assert sorted(KEYS) == KEYS
    assert list(work(Server(url="", kind="nginx")).each_key()) == KEYS
    assert set_prefix(SIZE, 10) != set_prefix(SIZE, 100)


async def test_store_lists_all_and_reads_what_it_listed(server: Server) -> None:
    async with aioflux.open_store(f"gs://{BUCKET}", endpoint_url=server.url) as store:
        metas = await store.list_all(PREFIX)
        assert [meta.key for meta in metas] == KEYS
        assert {meta.size for meta in metas} == {SIZE}
        read = {key: data async for key, data in store.get_many([metas[0], metas[-1]])}
        assert read == {KEYS[0]: contents(SIZE), KEYS[-1]: contents(SIZE)}
        head = await store.head(KEYS[7])
        assert (head.size, head.crc32c) == (SIZE, metas[7].crc32c)
        with pytest.raises(aioflux.NotFoundError):
            await store.head(set_key(SIZE, COUNT, COUNT))


@pytest.mark.parametrize(
    ("query", "first", "end"),
    [
        ({"prefix": PREFIX}, 0, COUNT),
        ({"prefix": PREFIX, "page_size": 500}, 0, COUNT),
        ({"prefix": PREFIX + "00020"}, 2000, COUNT),
        ({"prefix": PREFIX + "0000042.bin"}, 42, 43),
        ({"prefix": PREFIX + "x"}, 0, 0),
        ({"prefix": PREFIX, "start_offset": KEYS[5], "end_offset": KEYS[9]}, 5, 9),
        ({"prefix": PREFIX, "start_offset": PREFIX + "0001000.", "page_size": 7}, 1000, COUNT),
        ({"prefix": PREFIX, "start_offset": PREFIX + "00010005"}, 1001, COUNT),
        ({"prefix": PREFIX, "end_offset": PREFIX + "00009"}, 0, 900),
        ({"prefix": PREFIX, "start_offset": KEYS[9], "end_offset": KEYS[5]}, 0, 0),
        ({"prefix": PREFIX, "end_offset": "0"}, 0, 0),
        ({"prefix": "nothing/"}, 0, 0),
    ],
)
def test_each_range_of_a_set_is_listed(
    server: Server, query: dict[str, str | int], first: int, end: int
) -> None:
    assert names(server, **query) == KEYS[first:end]


def test_pages_are_as_long_as_they_are_requested_to_be(server: Server) -> None:
    for asked, expected in ((None, 1000), (7, 7), (5000, COUNT)):
        size = "" if asked is None else f"&maxResults={asked}"
        url = f"{server.url}/storage/v1/b/{BUCKET}/o?prefix={PREFIX}{size}&fields=items(name)"
        with urllib.request.urlopen(url) as answer:
            items = json.loads(answer.read())["items"]
        assert len(items) == expected
        assert items[0] == {"name": KEYS[0]}


def test_the_xml_api_lists_a_set_too(server: Server) -> None:
    options = {"base_url": server.url, "bearer_token": "none", "skip_signature": True}
    store = GCSStore(BUCKET, config=options, client_options={"allow_http": True})
    found = [meta for page in store.list(PREFIX) for meta in page]
    assert [meta["path"] for meta in found] == KEYS
    assert {meta["size"] for meta in found} == {SIZE}


def test_objects_of_a_set_are_composed_read_and_deleted(server: Server) -> None:
    bucket = open_bucket(work(server))
    sources = [bucket.blob(key) for key in KEYS[:5]]
    composite = bucket.blob("made-composed-objects/one")
    for _ in range(2):
        composite.compose(sources)
        # Its client compares the checksum that comes with the bytes.
        assert composite.download_as_bytes() == 5 * contents(SIZE)
        composite.delete()
    assert not composite.exists()
    assert bucket.test_iam_permissions(["storage.objects.create"]) == ["storage.objects.create"]


@needs_nginx
def test_what_cannot_be_composed_is_refused() -> None:
    def compose(server: Server, keys: list[str]) -> int:
        body = json.dumps({"sourceObjects": [{"name": key} for key in keys]}).encode()
        url = f"{server.url}/storage/v1/b/{BUCKET}/o/made-composed-objects%2Ftwo/compose"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, data=body, method="POST"))
        with caught.value as answer:
            return answer.code

    with open_server(ServerSpec(sets=((SIZE, COUNT), (7, 3)))) as server:
        assert compose(server, [set_key(SIZE, COUNT, COUNT)]) == 404
        assert compose(server, [KEYS[0], set_key(7, 3, 0)]) == 400
        assert compose(server, KEYS[:33]) == 400


def test_requests_are_counted(server: Server) -> None:
    before = _num_requests(work(server))
    for _ in range(3):
        with urllib.request.urlopen(
            f"{server.url}/storage/v1/b/{BUCKET}/o?prefix={PREFIX}"
        ) as page:
            page.read()
    assert _num_requests(work(server)) - before - 1 == 3
    assert _num_requests(Work(peer="", operation="", url="", size_bytes=1, num_objects=1)) == 0


def test_a_server_has_one_file_for_all_sets_of_a_size() -> None:
    spec = ServerSpec(sets=((5, 10), (5, 1000), (6, 2)), objects=((6, 3),), written_bytes=0)
    assert dict(spec.files) == {5: 1, 6: 3}
    assert spec.num_bytes == 5 + 18


@needs_nginx
@pytest.mark.parametrize("size", [200_000, 2_000_000], ids=["one piece", "several"])
def test_nginx_paces_an_object_of_whatever_size(size: int) -> None:
    spec = ServerSpec(
        latency_seconds=0.05, connection_bytes_per_second=5_000_000, sets=((size, 2),)
    )
    with open_server(spec) as server:
        assert server.kind == "nginx"
        begun = time.monotonic()
        with urllib.request.urlopen(f"{server.url}/{BUCKET}/{set_key(size, 2, 1)}") as answer:
            assert answer.read() == contents(size)
        assert time.monotonic() - begun > 0.05 + 0.9 * size / 5_000_000

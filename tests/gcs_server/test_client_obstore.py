"""obstore's GCSStore, unmodified: it speaks the XML API only."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import GCSStore

from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1024 * 1024
KEYS = [
    "plain",
    "a/b/c.bin",
    "sp ace +plus",
    "100%25",
    "%2F",
    "käse/\u732b/\U0001f600",
    "q?x=1&y#z",
]


@pytest.fixture(params=["memory", "root"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GCSServer]:
    root = tmp_path / "root" if request.param == "root" else None
    with GCSServer(buckets=["bucket"], root=root) as running:
        yield running


@pytest.fixture
def store(server: GCSServer) -> GCSStore:
    return GCSStore(
        "bucket",
        base_url=server.url,
        bearer_token="x",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=10)},
    )


@pytest.mark.parametrize("key", KEYS)
def test_put_head_and_get_agree_for_any_key(server, store, key):
    """An object is found under the key that was put, with its attributes."""
    result = obstore.put(store, key, b"data", attributes={"Content-Type": "x/y", "colour": "red"})
    assert server.keys("bucket") == [key]
    assert server.get("bucket", key) == b"data"
    meta = obstore.head(store, key)
    assert (meta["path"], meta["size"], meta["e_tag"]) == (key, 4, result["e_tag"])
    got = obstore.get(store, key)
    assert bytes(got.bytes()) == b"data"
    assert got.attributes == {"Content-Type": "x/y", "colour": "red"}


def test_an_empty_object_is_an_object(store):
    """Zero bytes are put and read back."""
    obstore.put(store, "empty", b"")
    assert obstore.head(store, "empty")["size"] == 0
    assert bytes(obstore.get(store, "empty").bytes()) == b""


def test_ranges_are_read(server, store):
    """One range, several ranges, a suffix and an offset give the bytes they name."""
    data = bytes(range(256))
    server.put("bucket", "key", data)
    assert bytes(obstore.get_range(store, "key", start=10, end=20)) == data[10:20]
    several = obstore.get_ranges(store, "key", starts=[0, 100, 250], ends=[5, 130, 256])
    assert [bytes(part) for part in several] == [data[0:5], data[100:130], data[250:]]
    options = {"suffix": 7, "offset": 249}
    for name, count in options.items():
        got = obstore.get(store, "key", options={"range": {name: count}})
        assert bytes(got.bytes()) == data[249:]


def test_create_rejects_to_replace(server, store):
    """mode="create" is x-goog-if-generation-match: 0."""
    obstore.put(store, "key", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "key", b"second", mode="create")
    assert server.get("bucket", "key") == b"first"


def test_update_needs_the_generation_that_was_read(server, store):
    """A put that names a version replaces that generation only."""
    version = obstore.put(store, "key", b"1", use_multipart=False)
    obstore.put(store, "key", b"2", mode=version, use_multipart=False)
    with pytest.raises(PreconditionError):
        obstore.put(store, "key", b"3", mode=version, use_multipart=False)
    assert server.get("bucket", "key") == b"2"


def test_conditional_reads_are_judged(server, store):
    """If-Match, If-None-Match and dates decide whether bytes are sent."""
    server.put("bucket", "key", b"data")
    meta = obstore.head(store, "key")
    past = datetime(2020, 1, 1, tzinfo=UTC)
    assert obstore.get(store, "key", options={"if_match": meta["e_tag"]}).bytes() == b"data"
    assert obstore.get(store, "key", options={"if_modified_since": past}).bytes() == b"data"
    with pytest.raises(PreconditionError):
        obstore.get(store, "key", options={"if_match": '"other"'})
    with pytest.raises(obstore.exceptions.NotModifiedError):
        obstore.get(store, "key", options={"if_none_match": meta["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.get(store, "key", options={"if_unmodified_since": past})


@pytest.mark.parametrize("size", [11 * MIB, 5 * MIB, 3], ids=["parts", "one part", "small"])
def test_a_multipart_put_is_the_whole(server, store, size):
    """Parts put side by side make one object of the same bytes, and leave no upload."""
    data = bytes(range(251)) * (size // 251 + 1)
    obstore.put(store, "key", data[:size], use_multipart=True, chunk_size=5 * MIB)
    assert server.get("bucket", "key") == data[:size]
    assert server.state.multipart_uploads == {}


def test_listing_follows_pages_in_order(server, store):
    """A listing of more than one page holds each key once, in order."""
    keys = [f"dir/{number:05}" for number in range(1100)]
    for key in [*keys, "other"]:
        server.put("bucket", key, b"x")
    found = [meta["path"] for page in obstore.list(store, "dir") for meta in page]
    assert found == keys
    later = [
        meta["path"] for page in obstore.list(store, "dir", offset=keys[1050]) for meta in page
    ]
    assert later == keys[1051:]


def test_listing_with_a_delimiter_gives_prefixes(server, store):
    """list_with_delimiter gives objects at one level and the prefixes below it."""
    for key in ["a/1", "a/b/2", "a/b/3", "a/c/4", "z"]:
        server.put("bucket", key, b"x")
    result = obstore.list_with_delimiter(store, "a")
    assert [meta["path"] for meta in result["objects"]] == ["a/1"]
    assert result["common_prefixes"] == ["a/b", "a/c"]


def test_copy_and_rename_keep_bytes(server, store):
    """A copy leaves its source; a rename does not."""
    server.put("bucket", "sp ace/%41", b"data")
    obstore.copy(store, "sp ace/%41", "copy")
    obstore.rename(store, "copy", "moved")
    assert server.keys("bucket") == ["moved", "sp ace/%41"]
    assert server.get("bucket", "moved") == b"data"
    with pytest.raises(AlreadyExistsError):
        obstore.copy(store, "moved", "sp ace/%41", overwrite=False)


def test_delete_of_many_and_of_none(server, store):
    """Deleted objects are gone, and reading one is FileNotFoundError."""
    for key in ["a", "b", "c"]:
        server.put("bucket", key, b"x")
    obstore.delete(store, ["a", "b"])
    assert server.keys("bucket") == ["c"]
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "a")


def test_writer_and_reader_stream(server, store):
    """A buffered writer's parts come back through a buffered reader."""
    data = bytes(range(256)) * (12 * MIB // 256)
    with obstore.open_writer(store, "key", buffer_size=5 * MIB) as writer:
        for start in range(0, len(data), 700_000):
            writer.write(data[start : start + 700_000])
    assert server.get("bucket", "key") == data
    reader = obstore.open_reader(store, "key", buffer_size=MIB)
    reader.seek(3 * MIB)
    assert bytes(reader.read(1000)) == data[3 * MIB : 3 * MIB + 1000]


async def test_async_calls_work_side_by_side(server, store):
    """The asynchronous face reads what it wrote."""
    await obstore.put_async(store, "key", b"data")
    got = await obstore.get_async(store, "key")
    assert bytes(await got.bytes_async()) == b"data"

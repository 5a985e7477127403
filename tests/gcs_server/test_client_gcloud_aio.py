"""gcloud-aio-storage, unmodified."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import aiohttp
import pytest
from gcloud.aio.storage import Storage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aioflux.testing import GCSServer

KEYS = ["plain", "a/b/c.bin", "sp ace +plus", "100%25", "%2F", "käse/\u732b"]


@pytest.fixture
async def client(shared: GCSServer) -> AsyncIterator[Storage]:
    async with aiohttp.ClientSession() as session:
        yield Storage(session=session, api_root=shared.url)


@pytest.mark.parametrize("key", KEYS)
async def test_a_simple_upload_makes_the_round_trip(client, name, key):
    made = await client.upload(name, key, b"data", force_resumable_upload=False)
    assert (made["name"], made["size"]) == (key, "4")
    assert await client.download(name, key) == b"data"
    assert (await client.download_metadata(name, key)) == made
    await client.delete(name, key)
    with pytest.raises(aiohttp.ClientResponseError) as failure:
        await client.download(name, key)
    assert failure.value.status == 404


@pytest.mark.parametrize("data", [b"", b"\r\n--", bytes(100_000)], ids=["empty", "lines", "large"])
async def test_a_multipart_upload_brings_its_metadata(shared, client, name, data):
    metadata = {"metadata": {"colour": "red"}, "Content-Disposition": "inline"}
    made = await client.upload(name, "key", data, content_type="x/y", metadata=metadata)
    assert shared.get(name, "key") == data
    assert (made["contentType"], made["contentDisposition"]) == ("x/y", "inline")
    assert made["metadata"] == {"colour": "red"}


@pytest.mark.parametrize("size", [0, 10, 1_000_000])
async def test_a_resumable_upload_arrives(shared, client, name, size):
    data = os.urandom(size)
    made = await client.upload(
        name,
        "a/key",
        data,
        content_type="x/y",
        metadata={"metadata": {"colour": "red"}},
        force_resumable_upload=True,
    )
    assert shared.get(name, "a/key") == data
    assert (made["contentType"], made["metadata"]) == ("x/y", {"colour": "red"})


async def test_a_zipped_upload_is_decompressed_on_its_way_back(shared, client, name):
    made = await client.upload(name, "key", b"data" * 100, zipped=True)
    assert made["contentEncoding"] == "gzip"
    assert len(shared.get(name, "key")) < 400
    assert await client.download(name, "key") == b"data" * 100


async def test_a_download_takes_ranges_and_preconditions(shared, client, name):
    shared.put(name, "key", b"0123456789")
    assert await client.download(name, "key", headers={"Range": "bytes=2-4"}) == b"234"
    with pytest.raises(aiohttp.ClientResponseError) as failure:
        await client.delete(name, "key", params={"ifGenerationMatch": "1"})
    assert failure.value.status == 412


async def test_a_download_streams(shared, client, name):
    data = os.urandom(1_000_000)
    shared.put(name, "key", data)
    stream = await client.download_stream(name, "key")
    assert stream.content_length == 1_000_000
    pieces = []
    while piece := await stream.read(65_536):
        pieces.append(piece)
    assert b"".join(pieces) == data


async def test_files_go_up_and_down(client, name, tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(os.urandom(1000))
    await client.upload_from_filename(name, "key", str(source))
    await client.download_to_filename(name, "key", str(copy))
    assert copy.read_bytes() == source.read_bytes()


async def test_objects_are_listed(shared, client, name):
    for key in ("a/1", "a/2", "b"):
        shared.put(name, key, b"")
    page = await client.list_objects(name, params={"maxResults": "2", "prefix": ""})
    assert [item["name"] for item in page["items"]] == ["a/1", "a/2"]
    token = page["nextPageToken"]
    page = await client.list_objects(name, params={"pageToken": token})
    assert [item["name"] for item in page["items"]] == ["b"]


async def test_a_copy_of_several_calls_is_followed(shared, client, name):
    data = os.urandom(3 << 20)
    shared.put(name, "a/source", data)
    params = {"maxBytesRewrittenPerCall": str(1 << 20)}
    done = await client.copy(name, "a/source", name, new_name="b/copy", params=params)
    assert done["resource"]["name"] == "b/copy"
    assert shared.get(name, "b/copy") == data


async def test_compose_joins(shared, client, name):
    shared.put(name, "a", b"one ")
    shared.put(name, "b", b"two")
    made = await client.compose(name, "dir/whole", ["a", "b"], content_type="x/y")
    assert (made["componentCount"], made["contentType"]) == (2, "x/y")
    assert shared.get(name, "dir/whole") == b"one two"


async def test_metadata_is_patched(shared, client, name):
    shared.put(name, "a/key", b"data")
    made = await client.patch_metadata(name, "a/key", {"metadata": {"colour": "red"}})
    assert (made["metageneration"], made["metadata"]) == ("2", {"colour": "red"})


async def test_a_bucket_has_blobs_and_metadata(shared, client, name):
    bucket = client.get_bucket(name)
    await bucket.new_blob("dir/key").upload(b"data")
    shared.put(name, "other", b"")
    assert await bucket.list_blobs() == ["dir/key", "other"]
    assert await bucket.list_blobs(prefix="d") == ["dir/key"]
    assert await bucket.list_blobs(delimiter="/") == ["other", "dir/"]
    assert await bucket.list_blobs(match_glob="**y") == ["dir/key"]
    assert await bucket.blob_exists("dir/key")
    assert not await bucket.blob_exists("none")
    blob = await bucket.get_blob("dir/key")
    assert (blob.size, await blob.download()) == (4, b"data")
    assert (await bucket.get_metadata())["name"] == name


async def test_buckets_are_listed(client, name):
    assert name in [bucket.name for bucket in await client.list_buckets("p")]

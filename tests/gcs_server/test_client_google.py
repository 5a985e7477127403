"""google-cloud-storage, unmodified, on the JSON API."""

from __future__ import annotations

import gzip
import os
from typing import TYPE_CHECKING

import pytest
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage import transfer_manager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer

STEP = 256 * 1024
KEYS = [
    "plain",
    "a/b/c.bin",
    "dots/../up",
    "sp ace +plus",
    "100%25",
    "%2F",
    "käse/\u732b",
    "x" * 1024,
]


@pytest.fixture(scope="module")
def client(shared: GCSServer) -> Iterator[storage.Client]:
    options = {"api_endpoint": shared.url}
    credentials = AnonymousCredentials()
    client = storage.Client(project="p", credentials=credentials, client_options=options)
    yield client
    client.close()


@pytest.fixture
def bucket(client: storage.Client, name: str) -> storage.Bucket:
    return client.bucket(name)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_makes_the_round_trip(bucket, key):
    bucket.blob(key).upload_from_string(b"data", checksum="crc32c")
    assert [blob.name for blob in bucket.list_blobs()] == [key]
    blob = bucket.get_blob(key)
    assert blob.name == key
    assert blob.download_as_bytes(checksum="crc32c") == b"data"
    blob.delete()
    assert bucket.get_blob(key) is None


@pytest.mark.parametrize("checksum", ["md5", "crc32c", "auto", None])
@pytest.mark.parametrize("size", [0, 1, 3 * STEP + 7], ids=["empty", "byte", "large"])
def test_an_upload_in_one_request_arrives(shared, bucket, checksum, size):
    data = os.urandom(size)
    blob = bucket.blob("key")
    blob.metadata = {"colour": "röt"}
    blob.cache_control = "no-store"
    blob.upload_from_string(data, content_type="x/y", checksum=checksum, if_generation_match=0)
    assert shared.get(bucket.name, "key") == data
    blob.reload()
    assert (blob.size, blob.content_type) == (size, "x/y")
    assert (blob.metadata, blob.cache_control) == ({"colour": "röt"}, "no-store")


@pytest.mark.parametrize("checksum", ["md5", "crc32c", None])
@pytest.mark.parametrize("size", [STEP, 2 * STEP, 2 * STEP + 7], ids=["one", "two", "odd"])
def test_a_resumable_upload_arrives(shared, bucket, tmp_path, checksum, size):
    path = tmp_path / "source"
    path.write_bytes(os.urandom(size))
    blob = bucket.blob("dir/key", chunk_size=STEP)
    blob.upload_from_filename(path, checksum=checksum, if_generation_match=0)
    assert shared.get(bucket.name, "dir/key") == path.read_bytes()
    with pytest.raises(exceptions.PreconditionFailed):
        blob.upload_from_filename(path, if_generation_match=0)


@pytest.mark.parametrize("size", [0, 10, STEP, STEP + 1])
def test_a_stream_of_unknown_size_arrives(shared, bucket, size):
    data = os.urandom(size)
    with bucket.blob("key", chunk_size=STEP).open("wb", ignore_flush=True) as writer:
        writer.write(data)
    assert shared.get(bucket.name, "key") == data


def test_a_download_takes_ranges(bucket, tmp_path):
    data = os.urandom(3 * STEP)
    blob = bucket.blob("key", chunk_size=STEP)
    blob.upload_from_string(data)
    assert blob.download_as_bytes(start=5, end=9) == data[5:10]
    blob.download_to_filename(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    with blob.open("rb", chunk_size=1000) as reader:
        reader.seek(-7, os.SEEK_END)
        assert reader.read() == data[-7:]


def test_a_gzip_object_is_downloaded_plain_and_raw(bucket):
    blob = bucket.blob("key")
    blob.content_encoding = "gzip"
    packed = gzip.compress(b"data" * 100)
    blob.upload_from_string(packed, content_type="text/plain")
    assert blob.download_as_bytes() == b"data" * 100
    assert blob.download_as_bytes(raw_download=True) == packed


def test_errors_have_their_classes(bucket):
    with pytest.raises(exceptions.NotFound, match="No such object"):
        bucket.blob("none").download_as_bytes()
    with pytest.raises(exceptions.NotFound):
        bucket.blob("none").delete()
    blob = bucket.blob("key")
    blob.upload_from_string(b"data")
    with pytest.raises(exceptions.PreconditionFailed):
        blob.download_as_bytes(if_generation_match=1)
    with pytest.raises(exceptions.RequestRangeNotSatisfiable):
        blob.download_as_bytes(start=4)
    with pytest.raises(exceptions.BadRequest):
        bucket.blob("x" * 1025).upload_from_string(b"data")


def test_a_listing_has_pages_prefixes_and_offsets(shared, bucket):
    for number in range(25):
        shared.put(bucket.name, f"a/{number:02}", b"")
    shared.put(bucket.name, "b", b"")
    pages = list(bucket.list_blobs(page_size=10).pages)
    assert [page.num_items for page in pages] == [10, 10, 6]
    grouped = bucket.list_blobs(delimiter="/", page_size=1)
    assert [blob.name for blob in grouped] == ["b"]
    assert grouped.prefixes == {"a/"}
    some = bucket.list_blobs(start_offset="a/03", end_offset="a/06", fields="items(name)")
    assert [blob.name for blob in some] == ["a/03", "a/04", "a/05"]
    some = bucket.list_blobs(match_glob="a/*{3,7}", max_results=3)
    assert [blob.name for blob in some] == ["a/03", "a/07", "a/13"]


def test_compose_rewrite_copy_and_move(shared, bucket):
    sources = [bucket.blob("a"), bucket.blob("b")]
    for blob, data in zip(sources, (b"one ", b"two"), strict=True):
        blob.upload_from_string(data)
    generations = [blob.generation for blob in sources]
    whole = bucket.blob("whole")
    whole.content_type = "x/y"
    whole.compose(sources, if_generation_match=0, if_source_generation_match=generations)
    assert (whole.component_count, whole.md5_hash) == (2, None)
    assert whole.download_as_bytes(checksum="crc32c") == b"one two"
    copy = bucket.copy_blob(whole, bucket, "copy", if_source_generation_match=whole.generation)
    token, rewritten, total = bucket.blob("again").rewrite(copy)
    assert (token, rewritten, total) == (None, 7, 7)
    moved = bucket.move_blob(copy, "moved", if_generation_match=0)
    assert moved.content_type == "x/y"
    renamed = bucket.rename_blob(moved, "renamed")
    assert renamed.download_as_bytes() == b"one two"
    assert shared.keys(bucket.name) == ["a", "again", "b", "renamed", "whole"]


def test_update_storage_class_keeps_the_rest(bucket):
    blob = bucket.blob("key")
    blob.metadata = {"a": "b"}
    blob.upload_from_string(b"data", content_type="x/y")
    blob.update_storage_class("NEARLINE")
    blob.reload()
    assert (blob.storage_class, blob.content_type, blob.metadata) == ("NEARLINE", "x/y", {"a": "b"})


def test_patch_and_update_change_metadata(bucket):
    blob = bucket.blob("key")
    blob.upload_from_string(b"data")
    blob.metadata = {"a": "1", "b": "2"}
    blob.patch(if_metageneration_match=1)
    blob.metadata = {"a": None}
    blob.patch()
    assert blob.metadata == {"b": "2"}
    blob.content_language = "de"
    blob.update()
    assert (blob.content_language, blob.metageneration) == ("de", 4)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_batch_deletes_and_patches(shared, client, bucket, num_requests):
    blobs = [bucket.blob(f"{number}/ä %2F") for number in range(num_requests)]
    for blob in blobs:
        blob.upload_from_string(b"data")
    with client.batch():
        for blob in blobs:
            blob.content_type = "x/y"
            blob.patch()
    assert {bucket.get_blob(blob.name).content_type for blob in blobs} == {"x/y"}
    with client.batch():
        for blob in blobs:
            blob.delete()
    assert shared.keys(bucket.name) == []


def test_a_batch_reports_what_failed(client, bucket):
    with pytest.raises(exceptions.NotFound), client.batch():
        bucket.delete_blob("none")


def test_download_many_fetches_every_object(shared, bucket, tmp_path):
    data = {f"dir/{number}": os.urandom(1000 * number) for number in range(12)}
    for key, content in data.items():
        shared.put(bucket.name, key, content)
    results = transfer_manager.download_many_to_path(
        bucket, list(data), destination_directory=str(tmp_path), worker_type="thread", max_workers=4
    )
    assert results == [None] * 12
    assert {key: (tmp_path / key).read_bytes() for key in data} == data


def test_download_chunks_concurrently_joins_ranges(shared, bucket, tmp_path):
    data = os.urandom(5 * STEP + 3)
    shared.put(bucket.name, "key", data)
    transfer_manager.download_chunks_concurrently(
        bucket.blob("key"), str(tmp_path / "copy"), chunk_size=STEP, worker_type="thread"
    )
    assert (tmp_path / "copy").read_bytes() == data


def test_buckets_are_made_listed_patched_and_deleted(client):
    made = client.create_bucket("made-by-the-client", location="EU")
    assert client.bucket("made-by-the-client").exists()
    assert "made-by-the-client" in [bucket.name for bucket in client.list_buckets(page_size=1)]
    made.labels = {"a": "b"}
    made.patch()
    assert client.get_bucket("made-by-the-client").labels == {"a": "b"}
    assert made.test_iam_permissions(["storage.objects.get"]) == ["storage.objects.get"]
    with pytest.raises(exceptions.Conflict):
        client.create_bucket("made-by-the-client")
    made.blob("key").upload_from_string(b"data")
    with pytest.raises(exceptions.Conflict):
        made.delete()
    made.delete(force=True)
    assert client.lookup_bucket("made-by-the-client") is None


def test_compose(bucket):
    """Google's client composes; it sends a generation of null."""
    for key in "rw":
        bucket.blob(key).upload_from_string(key)
    bucket.blob("whole").compose([bucket.blob("r"), bucket.blob("w")])
    assert bucket.blob("whole").download_as_bytes() == b"rw"


def test_update_of_a_bucket(bucket):
    """Google's client replaces the settings of a bucket."""
    bucket.reload()
    bucket.labels = {"colour": "red"}
    bucket.update()
    bucket.reload()
    assert bucket.labels == {"colour": "red"}

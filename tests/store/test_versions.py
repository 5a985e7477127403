"""Noncurrent generations: listed, read and deleted.

On `s3://` against moto, with boto3 as the oracle. The embedded server of `gs://` keeps no
noncurrent generations: a hook answers for them, and the requests are compared with those of
Google's library.
"""

from __future__ import annotations

import base64
import json
import random
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c
import pytest
from botocore.credentials import Credentials
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

import aioflux
from aioflux import (
    NotFoundError,
    S3Access,
    StorageError,
    UnsupportedError,
    sync,
)
from aioflux._services.base import ListRequest
from aioflux._services.s3 import listing
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Hook, Response
from tests.service.s3_rig import answer, asking

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aioflux import ObjectMeta
    from aioflux.testing.gcs_server import Request
    from tests.servers.moto import Moto

ANYONE = {"az": {"credentials": "anonymous"}}
MIB = 1024**2
KEYS = ["a", "b c/u+%", "b c/ü"]


class VersionedMoto:
    """A bucket with versioning, and two versions of each key below `p/`."""

    def __init__(self, server: Moto) -> None:
        self.door = server.door()
        self.bucket = f"versions-{uuid.uuid4().hex}"
        self.door.create_bucket(Bucket=self.bucket)
        self.door.put_bucket_versioning(
            Bucket=self.bucket, VersioningConfiguration={"Status": "Enabled"}
        )
        for data in (b"old", b"new!"):
            for key in KEYS:
                self.door.put_object(Bucket=self.bucket, Key=f"p/{key}", Body=data)
        access = S3Access(credentials=Credentials(server.access_key, server.secret_key))
        self.uri = f"s3://{self.bucket}/p"
        self.settings: dict[str, Any] = {"endpoint_url": server.url, "credentials": access}

    def listed(self) -> list[tuple[str, str, bool, int]]:
        found = self.door.list_object_versions(Bucket=self.bucket).get("Versions", [])
        return [(each["Key"], each["VersionId"], each["IsLatest"], each["Size"]) for each in found]


@pytest.fixture
def versioned(moto: Moto) -> VersionedMoto:
    return VersionedMoto(moto)


async def versions_of(store: aioflux.Store, prefix: str = "", **options: Any) -> list[ObjectMeta]:
    return [meta async for meta in store.list(prefix, versions=True, **options)]


async def test_s3_lists_what_boto3_lists(versioned: VersionedMoto) -> None:
    async with aioflux.open_store(versioned.uri, **versioned.settings) as store:
        metas = await versions_of(store)
        assert len(metas) == 6
        for meta, (name, version, is_latest, size) in zip(metas, versioned.listed(), strict=True):
            assert (f"p/{meta.key}", meta.is_latest, meta.size) == (name, is_latest, size)
            current = await store.head(meta.key)
            assert meta.generation == (current.generation if is_latest else f"version:{version}")
            assert await store.get(meta) == (b"new!" if is_latest else b"old")
            assert await store.get_range(meta, 1, 3) == (b"ew" if is_latest else b"ld")
            by_id = await store.get(meta.key, generation=f"version:{version}")
            assert by_id == await store.get(meta)
            assert (await store.head(meta)).size == meta.size
        assert [meta.key for meta in await versions_of(store, "b")] == [KEYS[1]] * 2 + [KEYS[2]] * 2
        # A page of 1,000 is a maximum; the limit is applied here, too.
        assert await versions_of(store, limit=3) == metas[:3]
        assert await versions_of(store, limit=0) == []
    with sync.open_store(versioned.uri, **versioned.settings) as blocking:
        assert list(blocking.list(versions=True)) == metas


async def test_s3_deletes_a_version_for_good_and_restores_one(versioned: VersionedMoto) -> None:
    async with aioflux.open_store(versioned.uri, **versioned.settings) as store:
        await store.delete("a")
        assert [meta.is_latest for meta in await versions_of(store, "a")] == [False, False]
        first, second = await versions_of(store, "a")
        await store.copy(second, "a")
        assert await store.get("a") == b"old"
        await store.delete(first)
        with pytest.raises(NotFoundError):
            await store.get(first)
        olds = [meta for meta in await versions_of(store) if not meta.is_latest]
        result = await store.delete_many(olds)
        assert (len(result.deleted), result.errors) == (len(olds), {})
        assert all(meta.is_latest for meta in await versions_of(store))
        assert await store.get("a") == b"old"


async def test_many_versions_of_one_key_are_deleted(versioned: VersionedMoto) -> None:
    async with aioflux.open_store(versioned.uri, **versioned.settings) as store:
        for number in range(10):
            await store.put("a", b"%d" % number)
        olds = [meta for meta in await versions_of(store, "a") if not meta.is_latest]
        result = await store.delete_many(olds)
        assert (result.deleted, result.errors) == (("a",) * 11, {})
        assert await store.get("a") == b"9"


async def test_a_large_version_is_read_in_ranges(versioned: VersionedMoto, tmp_path: Path) -> None:
    options = aioflux.TransferOptions(range_size_bytes=MIB)
    async with aioflux.open_store(versioned.uri, transfer=options, **versioned.settings) as store:
        data = random.Random(7).randbytes(5 * MIB)
        await store.put("large", data)
        await store.put("large", bytes(5 * MIB))
        _, meta = await versions_of(store, "large")
        assert await store.get(meta) == data
        async with store.open_reader(meta) as reader:
            assert await reader.read() == data
        await store.download_file(meta, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == data


async def test_s3_pages_follow_one_another(versioned: VersionedMoto) -> None:
    """moto has the markers of pages, and boto3 reads the same pages."""
    async with aioflux.open_store(versioned.uri, **versioned.settings) as store:
        for number in range(260):
            await store.put(f"t/{number // 4:03} +%", b"%d" % number)
        await store.delete("t/000 +%")
        metas = await versions_of(store, "t/")
        assert len({meta.generation for meta in metas if not meta.is_latest}) == 196
        service = store._sessions.current().service
        service.capabilities = replace(service.capabilities, page_size=100)
        for limit, num_requests in ((None, 3), (250, 3), (99, 1), (1, 1)):
            before = store.stats.num_requests
            assert await versions_of(store, "t/", limit=limit) == metas[:limit]
            assert store.stats.num_requests - before == num_requests
    pages = versioned.door.get_paginator("list_object_versions").paginate(
        Bucket=versioned.bucket, Prefix="p/t/", PaginationConfig={"PageSize": 100}
    )
    theirs = [each["Key"] for page in pages for each in page.get("Versions", [])]
    assert [f"p/{meta.key}" for meta in metas] == theirs


def page_of(version: str = "", *, end: str = "<IsTruncated>false</IsTruncated>") -> bytes:
    return f"<ListVersionsResult>{version}{end}</ListVersionsResult>".encode()


def version_xml(**fields: str) -> str:
    fields = {
        "Key": "p/a",
        "VersionId": "v1",
        "IsLatest": "false",
        "LastModified": "2026-01-02T03:04:05.678Z",
        "ETag": "&quot;x&quot;",
        "Size": "5",
        **fields,
    }
    return "".join(["<Version>", *(f"<{k}>{v}</{k}>" for k, v in fields.items()), "</Version>"])


def decode(data: bytes) -> tuple[list[ObjectMeta], str]:
    return listing.decode_versions(data, prefix="p/", root="s3://b/p/", below="p/a")


def test_versions_and_markers_of_s3_may_be_encoded_or_not() -> None:
    [meta], token = decode(
        page_of(
            version_xml(Key="p/a%20b") + "<DeleteMarker><Key>p/c</Key></DeleteMarker>",
            end="<EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>"
            "<NextKeyMarker>p/c%20d</NextKeyMarker><NextVersionIdMarker>v2</NextVersionIdMarker>",
        )
    )
    assert (meta.key, meta.uri, meta.generation) == ("a b", "s3://b/p/a b", "version:v1")
    assert parse_qs(listing.version_query(prefix="p/a", token=token, size=7).decode()) == {
        "encoding-type": ["url"],
        "key-marker": ["p/c d"],
        "max-keys": ["7"],
        "prefix": ["p/a"],
        "version-id-marker": ["v2"],
    }
    [meta], token = decode(page_of(version_xml(Key="p/a%20b", IsLatest="true", VersionId="")))
    assert (meta.key, meta.generation, meta.is_latest, token) == ("a%20b", "x/5", True, "")


@pytest.mark.parametrize(
    "page",
    [
        page_of(version_xml(Key="p/b")),
        page_of(version_xml(Size="-1")),
        page_of(version_xml(Size="")),
        page_of(version_xml(VersionId="")),
        page_of(version_xml(LastModified="")),
        page_of(end="<IsTruncated>true</IsTruncated>"),
        page_of().replace(b"ListVersionsResult", b"ListBucketResult"),
    ],
)
async def test_a_page_of_versions_that_contradicts_itself_is_malformed(page: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(page)
    async with asking(answer(200, page)) as (service, _):
        with pytest.raises(StorageError, match="could not list s3://bucket/p/a"):
            await service.list_page(ListRequest("a", versions=True))


async def test_a_page_of_versions_that_is_its_own_next_page_ends_the_listing() -> None:
    end = "<IsTruncated>true</IsTruncated><NextKeyMarker>p/a</NextKeyMarker>"
    async with asking(answer(200, page_of(version_xml(), end=end))) as (service, asked):
        page = await service.list_page(ListRequest("a", versions=True))
        with pytest.raises(StorageError, match="same page again"):
            await service.list_page(ListRequest("a", page_token=page.next_token, versions=True))
    assert [each.target.partition("?")[2].endswith("&versions=") for each in asked] == [True] * 2


@pytest.mark.parametrize("options", [{"delimiter": "/"}, {"match_glob": "*"}, {"limit": -1}])
async def test_versions_are_listed_without_filters(options: dict[str, Any]) -> None:
    async with aioflux.open_store("memory://versions") as store:
        with pytest.raises(ValueError, match=r"versions are listed|limit"):
            await versions_of(store, **options)


@pytest.mark.parametrize("uri", ["memory://versions", "az://account/container", "file:///tmp"])
async def test_other_services_list_no_versions(uri: str) -> None:
    async with aioflux.open_store(uri, **ANYONE.get(uri[:2], {})) as store:
        with pytest.raises(UnsupportedError, match="only gs:// and s3://"):
            await versions_of(store)


class Versioned(Hook):
    """Answers for noncurrent generations, as Cloud Storage does, and keeps the requests.

    Attributes:
        rows: Data by name and generation; the last generation of each name is the current one.
    """

    def __init__(self, rows: dict[tuple[str, int], bytes]) -> None:
        self.rows = rows
        self.requests: list[tuple[str, str, dict[str, list[str]]]] = []

    def before(self, request: Request) -> Response | None:
        url = urlsplit(request.target.decode())
        query = parse_qs(url.query)
        if not {"versions", "generation"} & query.keys():
            return None  # Google's library reads the metadata of the bucket, in a thread
        self.requests.append((request.method, url.path, query))
        if "versions" in query:
            return self.listed(query)
        name = next(name for name, _ in self.rows if unquote(url.path).endswith(f"/{name}"))
        row = (name, int(query["generation"][0]))
        if row not in self.rows:
            return Response(status=404, body=b"{}")
        if request.method == "DELETE":
            del self.rows[row]
            return Response(status=204)
        if url.path.startswith("/storage/"):
            return Response(body=json.dumps(self.resource(row)).encode())
        data, resource = self.rows[row], self.resource(row)
        headers = (
            ("x-goog-generation", str(row[1])),
            ("x-goog-hash", f"crc32c={resource['crc32c']}"),
            ("x-goog-stored-content-length", str(len(data))),
            ("etag", '"e"'),
        )
        return Response(headers=headers, body=data)

    def resource(self, row: tuple[str, int]) -> dict[str, Any]:
        name, generation = row
        checksum = google_crc32c.value(self.rows[row]).to_bytes(4, "big")
        is_latest = generation == max(each for other, each in self.rows if other == name)
        return {
            "name": name,
            "generation": str(generation),
            "size": str(len(self.rows[row])),
            "crc32c": base64.b64encode(checksum).decode(),
            **({} if is_latest else {"timeDeleted": "2026-01-02T03:04:05.678Z"}),
        }

    def listed(self, query: dict[str, list[str]]) -> Response:
        rows = sorted(row for row in self.rows if row[0].startswith(query["prefix"][0]))
        start = int(query.get("pageToken", ["0"])[0])
        end = start + min(int(query.get("maxResults", ["1000"])[0]), 3)
        page: dict[str, Any] = {
            "kind": "storage#objects",
            "items": list(map(self.resource, rows[start:end])),
        }
        if end < len(rows):
            page["nextPageToken"] = str(end)
        return Response(body=json.dumps(page).encode())


@pytest.fixture
def gcs() -> Iterator[tuple[GCSServer, Versioned]]:
    with GCSServer(buckets=("bucket",)) as server:
        rows = {(f"p/{key}", 10 + at): b"%d" % at for key in KEYS for at in range(2)}
        server.app.hooks = (hook := Versioned(rows), *server.app.hooks)
        yield server, hook


async def test_gcs_lists_what_the_library_of_google_lists(gcs: tuple[GCSServer, Versioned]) -> None:
    server, hook = gcs
    options = {"api_endpoint": server.url}
    client = storage.Client("p", AnonymousCredentials(), client_options=options)
    blobs = list(client.list_blobs("bucket", prefix="p/", versions=True))
    theirs = hook.requests[:]
    hook.requests.clear()
    async with aioflux.open_store("gs://bucket/p/", **settings(server)) as store:
        metas = await versions_of(store)
        assert [(f"p/{meta.key}", meta.generation, meta.is_latest) for meta in metas] == [
            (blob.name, str(blob.generation), blob.time_deleted is None) for blob in blobs
        ]
        assert list(map(shown, hook.requests)) == list(map(shown, theirs))
        assert len(theirs) == 2
        hook.requests.clear()
        assert await versions_of(store, limit=3) == metas[:3]
        assert len(hook.requests) == 1
    with sync.open_store("gs://bucket/p/", **settings(server)) as blocking:
        assert list(blocking.list(versions=True)) == metas


async def test_a_noncurrent_generation_of_gcs_is_read_and_deleted(
    gcs: tuple[GCSServer, Versioned],
) -> None:
    server, hook = gcs
    async with aioflux.open_store("gs://bucket/p/", **settings(server)) as store:
        metas = await versions_of(store)
        for at, meta in enumerate(metas):
            assert await store.get(meta) == b"%d" % (at % 2)
            assert (await store.head(meta)).is_latest == meta.is_latest == bool(at % 2)
        client = storage.Client(
            "p", AnonymousCredentials(), client_options={"api_endpoint": server.url}
        )
        hook.requests.clear()
        client.bucket("bucket").delete_blob("p/a", generation=10)
        await store.delete(metas[2])
        (*_, theirs), (*_, ours) = hook.requests
        assert theirs["generation"] == ours["generation"] == ["10"]
        with pytest.raises(NotFoundError):
            await store.delete(metas[0])
        result = await store.delete_many(metas[:1] + metas[4:5])
        assert (result.missing, result.deleted) == (("a",), (metas[4].key,))
    assert [generation for _, generation in hook.rows] == [11] * 3


async def test_a_service_that_sends_a_body_with_a_delete_is_another_one() -> None:
    class Body(Hook):
        def before(self, request: Request) -> Response | None:
            return Response(body=b"<html>") if request.method == "DELETE" else None

    with GCSServer(buckets=("bucket",)) as server:
        server.app.hooks = (Body(),)
        async with aioflux.open_store("gs://bucket/p/", **settings(server)) as store:
            await store.put("a", b"1")
            meta = replace(await store.head("a"), is_latest=False)
            with pytest.raises(StorageError, match="not from Cloud Storage"):
                await store.delete(meta)


def shown(request: tuple[str, str, dict[str, list[str]]]) -> tuple[object, ...]:
    """Return what both libraries send; Google's has `versions=True`."""
    method, path, query = request
    names = ("versions", "prefix", "pageToken")
    return (method, path, *(query.get(name, [""])[0].lower() for name in names))


def settings(server: GCSServer) -> dict[str, Any]:
    retry = aioflux.RetryPolicy(max_attempts=1)
    return {"endpoint_url": server.url, "credentials": "anonymous", "retry": retry}

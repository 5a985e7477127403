"""Who is billed for requests, and the KMS key of objects that are written: `GCSAccess`, `S3Access`.

The services' own libraries send the same parameters.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.credentials import Credentials
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

import aioflux
from aioflux import GCSAccess, S3Access
from aioflux.errors import AiofluxError
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Hook
from tests.service.gcs_rig import OPERATIONS, opened
from tests.service.s3_rig import OPERATIONS as S3_OPERATIONS
from tests.service.s3_rig import answer, asking, hello
from tests.store.places import MotoPlace
from tests.store.test_sign import NOW, by_google, key_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aioflux.testing.gcs_server import Request, Response
    from tests.servers.moto import Moto
    from tests.service.s3_rig import Asked

__all__ = ["key_file"]

KEY = "projects/p/locations/us/keyRings/r/cryptoKeys/k"
PAYER = "billed-project"
KMS_HEADER = "x-goog-encryption-kms-key-name"
KMS_PARAMS = ("kmsKeyName", "destinationKmsKeyName")
ENCRYPTION = "x-amz-server-side-encryption"
S3_KEY = f"{ENCRYPTION}-aws-kms-key-id"
PART = 5 * 1024**2


class Recorder(Hook):
    """Keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def before(self, request: Request) -> Response | None:
        self.requests.append(request)
        return None

    def queries(self) -> list[dict[str, list[str]]]:
        return [parse_qs(urlsplit(each.target.decode()).query) for each in self.requests]


@pytest.fixture
def recorder(server: GCSServer) -> Recorder:
    recorder = Recorder()
    server.app.hooks = (*server.app.hooks, recorder)
    return recorder


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        running.put("bucket", "p/a", b"0123456789")
        yield running


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_every_request_of_google_names_the_project_and_writes_the_key(
    server: GCSServer, recorder: Recorder, operation: str
) -> None:
    access = GCSAccess(user_project=PAYER, kms_key=KEY)
    async with opened(server.url, credentials=access) as service:
        with suppress(AiofluxError):
            await OPERATIONS[operation](service)
    assert recorder.requests
    for request, query in zip(recorder.requests, recorder.queries(), strict=True):
        assert request.headers["x-goog-user-project"] == PAYER
        is_json = request.target.startswith(b"/storage/v1/")
        assert query.get("userProject", []) == ([PAYER] if is_json else [])
        in_header = operation in {"put", "initiate"}
        assert request.headers.get(KMS_HEADER) == (KEY if in_header else None)
        param = {"compose": "kmsKeyName", "copy": "destinationKmsKeyName"}.get(operation)
        keys = {name: query[name] for name in KMS_PARAMS if name in query}
        assert keys == ({param: [KEY]} if param else {})


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_no_project_and_no_key_is_sent_by_default(
    server: GCSServer, recorder: Recorder, operation: str
) -> None:
    async with opened(server.url, credentials=GCSAccess()) as service:
        with suppress(AiofluxError):
            await OPERATIONS[operation](service)
    for request, query in zip(recorder.requests, recorder.queries(), strict=True):
        assert not {"x-goog-user-project", KMS_HEADER} & request.headers.keys()
        assert not {"userProject", *KMS_PARAMS} & query.keys()


async def test_the_library_of_google_sends_the_same_parameters(
    server: GCSServer, recorder: Recorder
) -> None:
    """A compose of the library has the key in its body; the service accepts both."""
    options = {"api_endpoint": server.url}
    client = storage.Client("p", AnonymousCredentials(), client_options=options)
    bucket = client.bucket("bucket", user_project=PAYER)
    source, target = bucket.blob("p/a"), bucket.blob("p/b", kms_key_name=KEY)
    source.reload()
    list(client.list_blobs(bucket))
    target.rewrite(source)
    bucket.test_iam_permissions(["storage.objects.get"])
    # The library also reads the metadata of the bucket.
    recorder.requests = [
        each for each in recorder.requests if not each.target.startswith(b"/storage/v1/b/bucket?")
    ]
    theirs = recorder.queries()
    recorder.requests.clear()
    access = GCSAccess(user_project=PAYER, kms_key=KEY)
    async with opened(server.url, credentials=access) as service:
        for name in ("head", "list", "copy", "permissions"):
            await OPERATIONS[name](service)
    names = {"userProject", *KMS_PARAMS}
    assert [{name: query[name] for name in names & query.keys()} for query in theirs] == [
        {name: query[name] for name in names & query.keys()} for query in recorder.queries()
    ]


async def test_a_whole_store_is_billed(server: GCSServer, recorder: Recorder) -> None:
    access = GCSAccess(user_project=PAYER)
    transfer = aioflux.TransferOptions(part_size_bytes=PART, range_size_bytes=PART)
    async with aioflux.open_store(
        "gs://bucket/p", endpoint_url=server.url, credentials=access, transfer=transfer
    ) as store:
        await store.put("large", bytes(PART + 1), mode="create")
        assert await store.get("large") == bytes(PART + 1)
        assert [key async for key, _ in store.get_many(["a", "large"])] == ["a", "large"]
        await store.move("large", "moved")
        await store.delete_many(["a", "moved"])
    assert len(recorder.requests) > 10
    assert {each.headers.get("x-goog-user-project") for each in recorder.requests} == {PAYER}


async def test_a_signed_url_of_google_names_the_project(key_file: Mapping[str, Any]) -> None:
    access = GCSAccess(credentials=key_file, user_project="a project")
    async with opened("https://gcs.example.com", credentials=access) as service:
        url = await service.sign("a b", method="GET", seconds=60, now=NOW)
    assert url == by_google(
        key_file,
        "p/a b",
        "GET",
        60,
        "https://gcs.example.com",
        query_parameters={"userProject": "a project"},
    )


def module_level() -> str:
    return "token"


@pytest.mark.parametrize("credentials", [None, "anonymous", module_level])
def test_access_to_google_pickles_without_a_secret(credentials: Any) -> None:
    access = GCSAccess(credentials=credentials, user_project=PAYER, kms_key=KEY)
    assert pickle.loads(pickle.dumps(access)) == access
    store = pickle.loads(pickle.dumps(aioflux.open_store("gs://bucket", credentials=access)))
    assert store._config.credentials == access


def test_access_to_google_with_a_secret_does_not_pickle() -> None:
    access = GCSAccess(credentials=lambda: "secret", user_project=PAYER)
    assert repr(access).startswith("GCSAccess(credentials=<function at 0x")
    for value in (access, aioflux.open_store("gs://bucket", credentials=access)):
        with pytest.raises(TypeError, match="holds credentials and cannot be pickled"):
            pickle.dumps(value)


@pytest.mark.parametrize(
    ("uri", "credentials", "said"),
    [
        ("gs://bucket", S3Access(), "not S3Access"),
        ("gs://bucket", GCSAccess(credentials=5), "not int"),
        ("s3://bucket", GCSAccess(), "not GCSAccess"),
        ("az://account/container", GCSAccess(), "not GCSAccess"),
    ],
)
def test_access_of_another_service_is_rejected(uri: str, credentials: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        aioflux.open_store(uri, credentials=credentials)


def test_projects_and_keys_are_strings() -> None:
    with pytest.raises(TypeError, match=r"GCSAccess\.user_project must be a str, not True"):
        GCSAccess(user_project=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"S3Access\.kms_key must be a str, not None"):
        S3Access(kms_key=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"S3Access\(kms_key=\.\.\.\) needs signed requests"):
        S3Access(kms_key="k", anonymous=True)


async def test_asynchronous_credentials_of_google_belong_to_one_loop() -> None:
    async def token() -> str:
        return "token"

    with pytest.raises(ValueError, match="num_loops=2 does not work with asynchronous"):
        aioflux.open_store(
            "gs://bucket",
            credentials=GCSAccess(credentials=token),
            transfer=aioflux.TransferOptions(num_loops=2),
        )


@pytest.mark.parametrize("operation", S3_OPERATIONS)
async def test_s3_is_sent_the_key_with_writes_only(operation: str) -> None:
    """S3 rejects the header in other requests, such as reads and parts."""
    access = S3Access(credentials=Credentials("AKID", "s"), kms_key=KEY)
    looked = hello(content_length="5")
    async with asking(looked, access=access) as (service, asked):
        with suppress(AiofluxError):
            await S3_OPERATIONS[operation](service)
    with_key = [each for each in asked if S3_KEY in each.headers]
    writes = {"put", "initiate", "copy"}
    assert [each.headers[S3_KEY] for each in with_key] == [KEY] * (operation in writes)
    assert all(each.headers[ENCRYPTION] == "aws:kms" for each in with_key)
    assert all(f";{S3_KEY}" in each.headers["authorization"] for each in with_key)
    assert sum(ENCRYPTION in each.headers for each in asked) == len(with_key)


async def test_a_copy_by_parts_is_encrypted() -> None:
    def reply(asked: Asked) -> bytes:
        if asked.method == "HEAD":
            return answer(200, content_length=f"{6 * 1024**3}", etag='"e"')
        if "uploads=" in asked.target:
            return answer(200, "<R><UploadId>u</UploadId></R>")
        return answer(200, "<R><ETag>&quot;p&quot;</ETag></R>")

    access = S3Access(credentials=Credentials("AKID", "s"), kms_key=KEY)
    async with asking(reply, access=access) as (service, asked):
        await S3_OPERATIONS["copy"](service)
    assert [each.method for each in asked if S3_KEY in each.headers] == ["POST"]
    assert [each.headers[S3_KEY] for each in asked if "uploads=" in each.target] == [KEY]


async def test_moto_encrypts_with_the_key(moto: Moto) -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    place = MotoPlace(moto, kms_key=key)
    transfer = aioflux.TransferOptions(part_size_bytes=PART)
    async with place.open(transfer=transfer) as store:
        await store.put("small", b"1")
        await store.put("large", bytes(PART + 1))
        await store.copy("small", "copy")
        assert await store.get("large") == bytes(PART + 1)
    for name in ("small", "large", "copy"):
        found = moto.door().head_object(Bucket="bucket", Key=place._prefix + name)
        assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == ("aws:kms", key)
    place.close()

"""Signed urls are byte by byte those of the services' own libraries, and work."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import pickle
import traceback
import urllib.error
import urllib.request
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import azure.storage.blob._shared_access_signature as azure_sas
import botocore.auth
import botocore.session
import google.auth.credentials
import google.oauth2.credentials
import pytest
from azure.storage.blob import BlobClient, generate_blob_sas
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.cloud import storage
from google.cloud.storage import _signing
from google.oauth2 import service_account

import aioflux
from aioflux import CredentialsError, S3Access, TransientError, UnsupportedError, sync
from aioflux.testing import GCSServer
from tests.service.opening import opened_service

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.servers.azurite import Azurite
    from tests.servers.moto import Moto
    from tests.servers.seaweedfs import SeaweedFS

NOW = 1_790_000_000.0
MOMENT = datetime.fromtimestamp(NOW, UTC)
KEYS = ["plain.bin", "a/b c/ü-日本.bin", "a+b%2Fc?d=e&f#g", "~-_.x/(1)'!*$;:@,=.bin"]
METHODS = ["GET", "HEAD", "PUT", "DELETE"]
ACCOUNT_KEY = "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHMsIG5vYm9keSdzIG93biE="  # gitleaks:allow  of a test
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = "session/token+with=signs%"


def sent(url: str, method: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Return status and body of a request that has only the url, as that of a stranger."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    # urllib's default is that of a form, which moto parses.
    names |= {"Content-Type": "application/octet-stream"} if data is not None else {}
    request = urllib.request.Request(url, data, names, method=method)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read()


async def send(url: str, method: str, data: bytes | None = None, **headers: str) -> Any:
    return await asyncio.to_thread(sent, url, method, data, **headers)


# --- gs://


@pytest.fixture(scope="module")
def key_file() -> Mapping[str, Any]:
    """Content of the key file of a service account, which cannot request tokens."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encoded = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return {
        "type": "service_account",
        "project_id": "project",
        "private_key_id": "0123456789abcdef",
        "private_key": encoded.decode(),
        "client_email": "tests+1@project.iam.gserviceaccount.com",
        "token_uri": "http://127.0.0.1:9/token",
    }


def by_google(
    info: Mapping[str, Any],
    name: str,
    method: str,
    seconds: int,
    endpoint: str | None = None,
    **options: Any,
) -> str:
    """Return the url of google-cloud-storage."""
    account = service_account.Credentials.from_service_account_info(info)
    blob = storage.Client("project", account).bucket("bucket").blob(name)
    with mock.patch.object(_signing, "_NOW", return_value=MOMENT):
        url: str = blob.generate_signed_url(
            timedelta(seconds=seconds),
            api_access_endpoint=endpoint,
            method=method,
            version="v4",
            **options,
        )
    return url


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("method", METHODS)
async def test_a_url_is_that_of_google(key_file: Mapping[str, Any], method: str, key: str) -> None:
    async with opened_service("gs://bucket/p/", credentials=key_file) as service:
        url = await service.sign(key, method=method, seconds=3600, now=NOW)
    assert url == by_google(key_file, f"p/{key}", method, 3600)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:4443", "https://gcs.example.com"])
async def test_a_url_of_google_has_the_endpoint_of_the_store(
    key_file: Mapping[str, Any], endpoint: str
) -> None:
    settings = {"credentials": key_file, "endpoint_url": endpoint}
    async with opened_service("gs://bucket/", **settings) as service:
        url = await service.sign("a b", method="PUT", seconds=60, now=NOW)
    assert url == by_google(key_file, "a b", "PUT", 60, endpoint)


async def test_default_credentials_sign(
    key_file: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "key.json"
    path.write_text(json.dumps(key_file))
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    async with opened_service("gs://bucket/") as service:
        url = await service.sign("a", method="GET", seconds=60, now=NOW)
    assert url == by_google(key_file, "a", "GET", 60)


class RemoteSigner(google.auth.credentials.Credentials, google.auth.credentials.Signing):
    """Credentials without a private key here, like impersonated ones, which ask a service."""

    signer = None
    signer_email = "remote@project.iam.gserviceaccount.com"

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def refresh(self, request: object) -> None:
        raise AssertionError("a token is not needed")

    def sign_bytes(self, message: bytes) -> bytes:
        if self.error is not None:
            raise self.error
        return b"signed " + message[:4]


async def test_credentials_that_sign_remotely_are_called() -> None:
    async with opened_service("gs://bucket/", credentials=RemoteSigner()) as service:
        url = await service.sign("a", method="GET", seconds=60, now=NOW)
    query = parse_qs(urlsplit(url).query)
    assert query["X-Goog-Signature"] == [b"signed GOOG".hex()]
    assert query["X-Goog-Credential"][0].startswith("remote@project.iam.gserviceaccount.com/")


async def test_an_error_of_a_remote_signer_names_the_role_and_quotes_nothing() -> None:
    error = google.auth.exceptions.TransportError("response with hush-assertion")
    async with aioflux.open_store("gs://bucket", credentials=RemoteSigner(error)) as store:
        with pytest.raises(CredentialsError, match="Service Account Token Creator") as caught:
            await store.sign("a", expires=60)
    assert "gs://bucket/a" in str(caught.value)
    assert "hush-assertion" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "credentials",
    ["anonymous", lambda: "token", google.oauth2.credentials.Credentials("token")],
    ids=["anonymous", "function", "user"],
)
async def test_credentials_of_google_without_a_private_key_are_an_error(credentials: Any) -> None:
    async with aioflux.open_store("gs://bucket", credentials=credentials) as store:
        with pytest.raises(CredentialsError, match=r"gs://bucket/a: .*pass the key file"):
            await store.sign("a", expires=60)


async def test_the_store_signs_from_now_on(key_file: Mapping[str, Any]) -> None:
    """The embedded server checks no signature, but serves the path."""
    with GCSServer(buckets=("bucket",)) as server:
        server.put("bucket", "p/ü b", b"data")
        async with aioflux.open_store(
            "gs://bucket/p", endpoint_url=server.url, credentials=key_file
        ) as store:
            before = datetime.now(UTC).replace(microsecond=0)
            url = await store.sign("ü b", expires=timedelta(minutes=5))
        assert await send(url, "GET") == (200, b"data")
    query = parse_qs(urlsplit(url).query)
    [date] = query["X-Goog-Date"]
    signed_at = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    assert before <= signed_at <= datetime.now(UTC)
    assert query["X-Goog-Expires"] == ["300"]


# --- s3://


OPERATIONS = {
    "GET": "get_object",
    "HEAD": "head_object",
    "PUT": "put_object",
    "DELETE": "delete_object",
}


def by_botocore(
    keys: Credentials, name: str, method: str, seconds: int, *, endpoint: str = "", style: str
) -> str:
    """Return the url of botocore."""
    client = botocore.session.Session().create_client(
        "s3",
        region_name="eu-central-1",
        endpoint_url=endpoint or None,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        aws_session_token=keys.token,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": style},
            request_checksum_calculation="when_required",
        ),
    )
    parameters = {"Bucket": "bucket", "Key": name}
    with mock.patch.object(botocore.auth, "get_current_datetime", return_value=MOMENT):
        url: str = client.generate_presigned_url(OPERATIONS[method], parameters, ExpiresIn=seconds)
    client.close()
    return url


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("style", ["virtual", "path"])
@pytest.mark.parametrize("token", [None, TOKEN], ids=["keys", "session"])
@pytest.mark.parametrize("endpoint", ["", "http://s3.example.com:9000"], ids=["aws", "server"])
async def test_a_url_is_that_of_botocore(
    endpoint: str, token: str | None, style: Any, method: str, key: str
) -> None:
    keys = Credentials("AKIDEXAMPLE", SECRET, token)
    access = S3Access(credentials=keys, region="eu-central-1", addressing=style)
    settings = {"credentials": access, "endpoint_url": endpoint or None}
    async with opened_service("s3://bucket/p/", **settings) as service:
        url = await service.sign(key, method=method, seconds=3600, now=NOW)
    assert url == by_botocore(keys, f"p/{key}", method, 3600, endpoint=endpoint, style=style)


async def test_a_url_of_requester_pays_has_it_in_the_signed_query() -> None:
    keys = Credentials("AKIDEXAMPLE", SECRET)
    access = S3Access(credentials=keys, region="eu-central-1", requester_pays=True)
    async with opened_service("s3://bucket/", credentials=access) as service:
        url = await service.sign("a b", method="GET", seconds=60, now=NOW)
    request = AWSRequest(
        "GET",
        "https://bucket.s3.eu-central-1.amazonaws.com/a%20b?x-amz-request-payer=requester",
    )
    signer = botocore.auth.S3SigV4QueryAuth(keys, "s3", "eu-central-1", expires=60)
    with mock.patch.object(botocore.auth, "get_current_datetime", return_value=MOMENT):
        signer.add_auth(request)
    assert url == request.url


async def test_anonymous_access_to_s3_cannot_sign() -> None:
    access = S3Access(anonymous=True, region="eu-central-1")
    async with aioflux.open_store("s3://bucket", credentials=access) as store:
        with pytest.raises(CredentialsError, match=r"s3://bucket/a: .*pass credentials that have"):
            await store.sign("a", expires=60)


async def test_a_failure_to_find_keys_is_retried() -> None:
    outcomes: list[Any] = [TransientError("not now"), Credentials("AKIDEXAMPLE", SECRET)]

    def provide() -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    access = S3Access(credentials=provide, region="eu-central-1")
    retry = aioflux.RetryPolicy(initial_seconds=1e-3)
    async with aioflux.open_store("s3://bucket", credentials=access, retry=retry) as store:
        assert "X-Amz-Signature=" in await store.sign("a", expires=60)
    assert not outcomes


async def round_trip(store: aioflux.Store, key: str, **headers: str) -> None:
    """Write, read and delete an object with signed urls."""
    data = b"data of a stranger"
    status, _ = await send(await store.sign(key, method="PUT", expires=60), "PUT", data, **headers)
    assert status in {200, 201}
    assert await store.get(key) == data
    assert await send(await store.sign(key, expires=60), "GET") == (200, data)
    assert await send(await store.sign(key, method="HEAD", expires=60), "HEAD") == (200, b"")
    status, _ = await send(await store.sign(key, method="DELETE", expires=60), "DELETE")
    assert status in {200, 202, 204}
    with pytest.raises(aioflux.NotFoundError):
        await store.head(key)


@pytest.mark.parametrize("key", KEYS)
async def test_urls_work_on_moto(moto: Moto, key: str) -> None:
    access = S3Access(credentials=Credentials(moto.access_key, moto.secret_key))
    async with aioflux.open_store(
        f"s3://bucket/{uuid.uuid4().hex}", endpoint_url=moto.url, credentials=access
    ) as store:
        await round_trip(store, key)


@pytest.mark.parametrize("key", KEYS)
async def test_urls_work_on_a_server_that_checks_signatures(seaweedfs: SeaweedFS, key: str) -> None:
    access = S3Access(credentials=Credentials(seaweedfs.access_key, seaweedfs.secret_key))
    async with aioflux.open_store(
        f"s3://bucket/{uuid.uuid4().hex}", endpoint_url=seaweedfs.url, credentials=access
    ) as store:
        await round_trip(store, key)
        url = await store.sign(key, expires=60)
        assert (await send(url, "PUT", b"x"))[0] == 403
        assert (await send(url[:-4] + "0000", "GET"))[0] == 403


# --- az://


PERMISSIONS = {"GET": "r", "HEAD": "r", "PUT": "cw", "DELETE": "d"}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [("https://account.blob.core.windows.net", "https"), ("http://127.0.0.1:10000/account", None)],
    ids=["azure", "emulator"],
)
async def test_a_url_is_that_of_azure_storage_blob(
    endpoint: str, protocol: str | None, method: str, key: str
) -> None:
    settings = {"credentials": ACCOUNT_KEY, "endpoint_url": endpoint}
    async with opened_service("az://account/container/p/", **settings) as service:
        url = await service.sign(key, method=method, seconds=3600, now=NOW)
    # The library has a version of the API of its own, which is part of the token.
    with mock.patch.object(azure_sas, "X_MS_VERSION", "2023-11-03"):
        sas = generate_blob_sas(
            "account",
            "container",
            f"p/{key}",
            account_key=ACCOUNT_KEY,
            permission=PERMISSIONS[method],
            expiry=MOMENT + timedelta(hours=1),
            protocol=protocol,
        )
    with BlobClient(endpoint, "container", f"p/{key}") as blob:
        path = urlsplit(blob.url).path
    assert urlsplit(url).query == sas
    assert urlsplit(url).path == path
    assert url.startswith(endpoint)


async def no_key() -> str:
    return "token"


@pytest.mark.parametrize(
    "credentials",
    ["anonymous", "sv=2023-11-03&sig=hush", no_key],
    ids=["anonymous", "sas", "token"],
)
async def test_credentials_of_azure_without_an_account_key_are_an_error(credentials: Any) -> None:
    async with aioflux.open_store("az://account/container", credentials=credentials) as store:
        with pytest.raises(UnsupportedError, match="pass one, or a connection string") as caught:
            await store.sign("a", expires=60)
    assert caught.value.uri == "az://account/container/a"
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("key", KEYS[:3])
async def test_urls_work_on_azurite(azurite: Azurite, key: str) -> None:
    async with aioflux.open_store(
        f"az://{azurite.account}/container/{uuid.uuid4().hex}",
        endpoint_url=azurite.url,
        credentials=azurite.key,
    ) as store:
        await round_trip(store, key, x_ms_blob_type="BlockBlob")
        assert (await send(await store.sign(key, expires=60), "DELETE"))[0] == 403


# --- arguments and errors


@pytest.mark.parametrize("uri", ["memory://x", "file:///tmp/x"])
async def test_stores_without_urls_raise_an_error(uri: str) -> None:
    async with aioflux.open_store(uri) as store:
        with pytest.raises(UnsupportedError, match="only gs://, s3:// and az://") as caught:
            await store.sign("a", expires=60)
    assert caught.value.uri == f"{uri}/a"


LIMITS = [0, -1, -0.5, math.nan, math.inf, timedelta(0), timedelta(days=-1)]
WEEK = 7 * 86_400


@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
@pytest.mark.parametrize("expires", LIMITS, ids=repr)
async def test_an_expiry_out_of_range_is_named(scheme: str, expires: Any) -> None:
    async with aioflux.open_store(f"{scheme}://bucket/container", credentials="anonymous") as store:
        with pytest.raises(ValueError, match="expires must be above 0") as caught:
            await store.sign("a", expires=expires)
    assert str(caught.value).endswith(f"not {expires!r}")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("expires", [WEEK + 1, timedelta(days=7, microseconds=1)], ids=repr)
async def test_no_url_is_valid_for_more_than_a_week(scheme: str, expires: Any) -> None:
    async with aioflux.open_store(f"{scheme}://bucket/p", credentials="anonymous") as store:
        with pytest.raises(ValueError, match="at most 7 days"):
            await store.sign("a", expires=expires)


@pytest.mark.parametrize(
    ("expires", "seconds"),
    [(WEEK, WEEK), (timedelta(days=7), WEEK), (0.2, 1), (1.5, 2), (timedelta(seconds=9), 9)],
    ids=repr,
)
async def test_an_expiry_is_rounded_up_to_seconds(expires: Any, seconds: int) -> None:
    access = S3Access(credentials=Credentials("AKID", SECRET), region="eu-central-1")
    async with aioflux.open_store("s3://bucket", credentials=access) as store:
        assert f"&X-Amz-Expires={seconds}&" in await store.sign("a", expires=expires)


async def test_a_store_that_reads_twice_signs() -> None:
    """Its service wraps another one."""
    transfer = aioflux.TransferOptions(verify_ranges=True)
    uri, endpoint = "az://account/container", "http://127.0.0.1:1"
    async with aioflux.open_store(
        uri, transfer=transfer, endpoint_url=endpoint, credentials=ACCOUNT_KEY
    ) as store:
        assert "sig=" in await store.sign("a", expires=60)


async def test_a_url_of_azure_may_be_valid_for_years() -> None:
    async with aioflux.open_store("az://account/container", credentials=ACCOUNT_KEY) as store:
        url = await store.sign("a", expires=timedelta(days=36_500))
    expiry = datetime.now(UTC) + timedelta(days=36_500)
    assert parse_qs(urlsplit(url).query)["se"][0][:4] == f"{expiry.year}"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"key": ""}, ValueError, "key must not be empty"),
        ({"key": 1}, TypeError, "a key is a string"),
        ({"method": "POST"}, ValueError, "not 'POST'"),
        ({"method": "get"}, ValueError, "not 'get'"),
        ({"expires": True}, TypeError, "not True"),
        ({"expires": "1h"}, TypeError, "not '1h'"),
        ({"expires": None}, TypeError, "not None"),
        ({"method": "PUT", "key": "s3://bucket/a"}, ValueError, "it is a uri"),
        ({"method": "PUT", "key": ".aioflux-uploads/a"}, ValueError, "cannot be written"),
        ({"key": "a" * 1025}, ValueError, "not a valid object name"),
    ],
    ids=repr,
)
async def test_wrong_arguments(arguments: Any, error: Any, text: str) -> None:
    async with aioflux.open_store("s3://bucket", credentials="anonymous") as store:
        with pytest.raises(error, match=text):
            await store.sign(**{"key": "a", "expires": 60, **arguments})


async def test_metadata_is_not_a_key() -> None:
    """A url cannot be pinned to the generation of a listing."""
    async with aioflux.open_store("memory://metadata") as store:
        meta = await store.put("a", b"1")
        with pytest.raises(TypeError, match=r"pass meta\.key"):
            await store.sign(meta, expires=60)  # type: ignore[arg-type]


async def test_a_closed_store_signs_nothing() -> None:
    store = aioflux.open_store("az://account/container", credentials=ACCOUNT_KEY)
    await store.aclose()
    with pytest.raises(ValueError, match="closed"):
        await store.sign("a", expires=60)


def test_a_blocking_store_signs() -> None:
    with sync.open_store("az://account/container", credentials=ACCOUNT_KEY) as store:
        url = store.sign("a", method="PUT", expires=timedelta(hours=1))
    assert parse_qs(urlsplit(url).query)["sp"] == ["cw"]


async def test_neither_logs_nor_reprs_have_a_secret(
    key_file: Mapping[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    access = S3Access(credentials=Credentials("AKID", SECRET, TOKEN), region="eu-central-1")
    credentials = {"gs://bucket": key_file, "s3://bucket": access, "az://a/c": ACCOUNT_KEY}
    text = ""
    for uri, each in credentials.items():
        async with aioflux.open_store(uri, credentials=each) as store:
            url = await store.sign("a", expires=60)
            text += repr(store)
            for _, session in store._sessions.open_sessions():
                text += f"{session.service!r} {vars(session.service)!r}"
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(store)
        text += caplog.text
        *_, signature = parse_qs(urlsplit(url).query).values()  # it is the last parameter
        assert signature[0] not in text
    for secret in (SECRET, TOKEN, ACCOUNT_KEY, *key_file["private_key"].splitlines()[1:-1]):
        assert secret not in text

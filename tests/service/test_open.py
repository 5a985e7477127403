"""Which service a uri means."""

from __future__ import annotations

import pytest

import aioflux
from aioflux._services.gcs.wire import resolve_endpoint
from tests.service.opening import open_service, service_config


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, None, ("https://storage.googleapis.com", False)),
        (None, "", ("https://storage.googleapis.com", False)),
        (None, "localhost:4443", ("http://localhost:4443", True)),
        (None, "http://host:1", ("http://host:1", True)),
        (None, "https://host:1", ("https://host:1", True)),
        ("http://other:2", "http://host:1", ("http://other:2", True)),
        ("https://proxy.example", None, ("https://proxy.example", False)),
    ],
)
def test_requests_to_an_emulator_have_no_credentials(
    given: str | None, environment: str | None, expected: tuple[str, bool]
) -> None:
    environ = {} if environment is None else {"STORAGE_EMULATOR_HOST": environment}
    assert resolve_endpoint(given, environ) == expected


@pytest.mark.parametrize("uri", ["file:///tmp/x", "memory://x"])
def test_settings_without_effect_are_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="neither credentials nor an endpoint"):
        aioflux.open_store(uri, endpoint_url="http://localhost:1")
    with pytest.raises(ValueError, match="neither credentials nor an endpoint"):
        aioflux.open_store(uri, credentials=str)


@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
def test_services_are_opened_without_a_request(scheme: str) -> None:
    bucket = "account/bucket" if scheme == "az" else "bucket"
    assert aioflux.open_store(f"{scheme}://{bucket}/p").uri == f"{scheme}://{bucket}/p/"


def test_an_endpoint_of_s3_has_no_path() -> None:
    with pytest.raises(ValueError, match="has a path"):
        open_service("s3://bucket/p/", endpoint_url="http://e/path")


@pytest.mark.parametrize("uri", ["gs://bucket/p/", "s3://bucket/p/", "az://account/c/p/"])
@pytest.mark.parametrize(
    ("endpoint_url", "says"),
    [
        ("http://user:planted@host:1/", "must not have credentials in it"),
        ("http://user:planted@host:1/path", "must not have credentials in it"),
        ("user:planted@host:1", "must not have credentials in it"),
        ("https://host/?sv=1&sig=planted", "has a query"),
        ("127.0.0.1:9000", "not a url of a server"),
        ("ftp://host", "not a url of a server"),
        ("http://", "not a url of a server"),
    ],
)
def test_what_is_no_endpoint_is_said(uri: str, endpoint_url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        open_service(uri, endpoint_url=endpoint_url)
    assert "planted" not in str(error.value)


@pytest.mark.parametrize("uri", ["gs://bucket/p/", "s3://bucket/p/", "az://account/c/p/"])
async def test_no_bytes_are_trusted_that_come_over_http_in_capitals(uri: str) -> None:
    service = open_service(uri, endpoint_url="HTTP://127.0.0.1:1")
    assert not service.capabilities.guarded_transport
    await service.aclose()


def test_settings_do_not_tell_credentials() -> None:
    assert "planted" not in repr(service_config("az://account/c/", credentials="sv=1&sig=planted"))


async def test_names_that_mean_the_bucket_never_reach_the_service() -> None:
    async with aioflux.open_store("gs://bucket", endpoint_url="http://127.0.0.1:1") as store:
        for key in (".", ".."):
            for call in (store.get(key), store.head(key), store.delete(key), store.put(key, b"")):
                with pytest.raises(ValueError, match="not a valid object name"):
                    await call

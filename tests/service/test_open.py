"""Which service a uri means."""

from __future__ import annotations

import pytest

import aioflux
from aioflux._uri import parse_uri
from aioflux.service._open import ServiceConfig, open_service, resolve_endpoint


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, None, (None, False)),
        (None, "", (None, False)),
        (None, "localhost:4443", ("http://localhost:4443", True)),
        (None, "http://host:1", ("http://host:1", True)),
        (None, "https://host:1", ("https://host:1", True)),
        ("http://other:2", "http://host:1", ("http://other:2", True)),
        ("https://proxy.example", None, ("https://proxy.example", False)),
    ],
)
def test_an_emulator_is_asked_without_credentials(
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    environment: str | None,
    expected: tuple[str | None, bool],
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    if environment is not None:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", environment)
    assert resolve_endpoint(given) == expected


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
    location = parse_uri("s3://bucket/p/")
    config = ServiceConfig(
        location=location,
        timeouts=aioflux.Timeouts(),
        max_connections=1,
        endpoint_url="http://e/path",
    )
    with pytest.raises(ValueError, match="has a path"):
        open_service(config)


async def test_names_that_mean_the_bucket_never_reach_the_service() -> None:
    async with aioflux.open_store("gs://bucket", endpoint_url="http://127.0.0.1:1") as store:
        for key in (".", ".."):
            for call in (store.get(key), store.head(key), store.delete(key), store.put(key, b"")):
                with pytest.raises(ValueError, match="no name for an object"):
                    await call

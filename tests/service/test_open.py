"""Which service a uri means."""

from __future__ import annotations

import pytest

import aioflux
from aioflux.service._open import resolve_endpoint


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


@pytest.mark.parametrize("uri", ["s3://b/x"])
def test_schemes_that_are_not_there_yet_say_so(uri: str) -> None:
    with pytest.raises(ValueError, match="does not yet speak"):
        aioflux.open_store(uri)


async def test_names_that_mean_the_bucket_never_reach_the_service() -> None:
    async with aioflux.open_store("gs://bucket", endpoint_url="http://127.0.0.1:1") as store:
        for key in (".", ".."):
            for call in (store.get(key), store.head(key), store.delete(key), store.put(key, b"")):
                with pytest.raises(ValueError, match="no name for an object"):
                    await call

"""Texts for mistakes that people make with a store: what was typed, and what to type instead."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google.auth.credentials
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

import aioflux
from aioflux import CredentialsError, NotFoundError, S3Access
from aioflux.testing import GCSServer
from tests.http.scripted import Peer, ok, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aioflux import Store


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with aioflux.open_store("memory://messages/p") as store:
        await store.put("a", b"1")
        yield store
        await store.delete_many([meta.key async for meta in store.list()])


# --- a store that is used as if it was blocking ------------------------------------------------


def test_a_plain_with_says_what_to_use() -> None:
    with (
        pytest.raises(TypeError, match=r"use `async with`, or aioflux.sync.open_store"),
        aioflux.open_store("memory://messages"),
    ):
        raise AssertionError


ITERATIONS: dict[str, Callable[[Store], Any]] = {
    "list": lambda store: store.list(),
    "list_pages": lambda store: store.list_pages(),
    "get_many": lambda store: store.get_many(["a"]),
    "get_batches": lambda store: store.get_batches(["a"]),
    "fetch_batches": lambda store: store.fetch_batches(["a"]),
    "try_fetch_batches": lambda store: store.try_fetch_batches(["a"]),
    "fetch_composed": lambda store: store.fetch_composed([]),
    "try_fetch_composed": lambda store: store.try_fetch_composed([]),
    "put_batches": lambda store: store.put_batches([]),
}


@pytest.mark.parametrize("name", ITERATIONS)
async def test_a_plain_for_says_what_to_use(store: Store, name: str) -> None:
    with pytest.raises(TypeError, match=rf"Store.{name} is asynchronous: use `async for`, or"):
        list(ITERATIONS[name](store))


async def test_an_iteration_has_the_methods_of_a_generator(store: Store) -> None:
    await store.put("b", b"2")
    metas = store.list()
    assert (await anext(metas)).key == "a"
    assert (await metas.asend(None)).key == "b"
    await metas.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(metas)
    with pytest.raises(LookupError):
        await store.list().athrow(LookupError())


# --- keys -----------------------------------------------------------------------------------------

READS: dict[str, Callable[[Store, str], Any]] = {
    "get": lambda store, key: store.get(key),
    "head": lambda store, key: store.head(key),
    "get_range": lambda store, key: store.get_range(key, 0, 5),
    "delete": lambda store, key: store.delete(key),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("memory://messages/p/a", r"relative to memory://messages/p/: did you mean 'a'\?"),
        ("memory://other/a", "open a store of 'memory://other/a'"),
        ("GS://b/a", "open a store of 'GS://b/a'"),
        ("/a", r"did you mean 'a', without a leading slash\?"),
    ],
    ids=["uri", "other", "case", "slash"],
)
async def test_a_key_that_is_not_found_is_explained(
    store: Store, read: Any, key: str, advice: str
) -> None:
    with pytest.raises(NotFoundError, match=advice):
        await read(store, key)


async def test_another_missing_key_is_not_explained(store: Store) -> None:
    for key in ("b", "b/a", "http://b/a", "a://", "x//a"):
        with pytest.raises(NotFoundError) as raised:
            await store.get(key)
        assert "did you mean" not in str(raised.value)
        assert "open a store" not in str(raised.value)


def test_a_key_of_many_that_is_not_found_is_explained() -> None:
    """Also by the reads without a task."""
    with GCSServer(buckets=("bucket",)) as server:
        server.put("bucket", "a", b"1")
        with (
            aioflux.sync.open_store("gs://bucket", endpoint_url=server.url) as blocking,
            pytest.raises(NotFoundError, match="did you mean 'a'"),
        ):
            list(blocking.get_many(["a"] * 20 + ["gs://bucket/a"]))


async def test_keys_with_slashes_stay_legal(store: Store) -> None:
    for key in ("/a", "data//part-0", "//b"):
        await store.put(key, key.encode())
        assert await store.get(key) == key.encode()
    assert "data//part-0" in [meta.key async for meta in store.list()]


@pytest.mark.parametrize("key", ["gs://b/a", "S3://b", "az://a/c/k", "memory://", "gcs://b/a"])
async def test_a_key_with_a_scheme_is_not_written(store: Store, key: str) -> None:
    for write in (
        store.put(key, b"1"),
        store.put_many([(key, b"1")]),
        store.copy("a", key),
        store.compose(key, ["a"]),
        store.open_writer(key).__aenter__(),
    ):
        with pytest.raises(ValueError, match="cannot be written: it is a uri, and a key is rel"):
            await write
    await store.put("https://b/a", b"another scheme")
    assert {meta.key async for meta in store.list()} == {"a", "https://b/a"}


# --- ranges ---------------------------------------------------------------------------------------


async def test_the_offsets_of_a_range_may_be_positional(store: Store) -> None:
    assert await store.get_range("a", 0, 1) == b"1"


@pytest.mark.parametrize(
    ("start", "end", "reason"),
    [(5, 2, "end is below start"), (2, 2, "it is empty"), (-1, 2, "start is negative")],
)
async def test_a_wrong_range_says_what_is_wrong(
    store: Store, start: int, end: int, reason: str
) -> None:
    says = rf"a range needs 0 <= start < end, not \[{start}, {end}\): {reason}"
    with pytest.raises(ValueError, match=says):
        await store.get_range("a", start, end)
    with pytest.raises(ValueError, match=says):
        await store.get_ranges("a", [(start, end)])


# --- credentials ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "credentials", "error", "says"),
    [
        ("gs://b", 1, TypeError, "must be google-auth credentials, a key file as a path"),
        ("gs://b", S3Access(), TypeError, "not S3Access"),
        ("gs://b", "no/such/file.json", CredentialsError, "a key file: No such file or directory"),
        ("gs://b", __file__, CredentialsError, "a key file: it is not JSON"),
        ("gs://b", {"type": "service_account"}, CredentialsError, "not the whole content"),
        ("s3://b", "AKIA", TypeError, "must be aioflux.S3Access"),
        ("s3://b", ("key", "secret"), TypeError, "not tuple"),
        ("az://a/c", {"key": "x"}, TypeError, "credentials must be text"),
        ("az://a/c", "not base64!", CredentialsError, "is not base64"),
    ],
)
def test_credentials_of_a_wrong_kind_are_rejected_at_once(
    uri: str, credentials: Any, error: type[Exception], says: str
) -> None:
    for open_store in (aioflux.open_store, aioflux.sync.open_store):
        with pytest.raises(error, match=says):
            open_store(uri, credentials=credentials)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = tmp_path_factory.mktemp("keys") / "key.json"
    content = {
        "type": "service_account",
        "private_key": pem.decode(),
        "client_email": "me@example.com",
        "token_uri": "https://token.invalid",
    }
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("kind", [str, Path])
def test_the_path_of_a_key_file_is_accepted(key_file: Path, kind: Any) -> None:
    store = aioflux.open_store("gs://bucket", credentials=kind(key_file))
    again = pickle.loads(pickle.dumps(store))
    token = again._open_service(again._config)._sender._token
    assert token._credentials.service_account_email == "me@example.com"


@pytest.mark.parametrize("uri", ["gs://b", "s3://b", "az://a/c"])
async def test_anonymous_works_on_every_service(uri: str) -> None:
    """No request has credentials."""
    heads: list[bytes] = []

    async def script(peer: Peer) -> None:
        heads.append(await peer.read_head())
        await peer.send(ok(b"", status=b"404 Not Found"))

    async with serving(script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with aioflux.open_store(uri, credentials="anonymous", endpoint_url=url) as store:
            with pytest.raises(NotFoundError):
                await store.get("k")
    assert heads
    assert not any(re.search(rb"(?i)authorization:|x-amz-security|[?&]sig", each) for each in heads)


def test_google_credentials_are_accepted() -> None:
    anonymous = google.auth.credentials.AnonymousCredentials()
    assert aioflux.open_store("gs://bucket", credentials=anonymous)

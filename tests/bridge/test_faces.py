"""The blocking face has every name of the awaitable one; and both pickle."""

from __future__ import annotations

import copy
import inspect
import pickle
import ssl
from typing import Any

import google.auth.credentials
import pytest

import aioflux
from aioflux import store as asynchronous
from aioflux import sync

METHODS = {
    "head",
    "get",
    "get_into",
    "get_range",
    "get_ranges",
    "get_many",
    "get_batches",
    "fetch_batches",
    "fetch_composed",
    "try_fetch_all",
    "try_fetch_batches",
    "try_fetch_composed",
    "list",
    "list_pages",
    "list_all",
    "save_manifest",
    "put",
    "put_many",
    "put_batches",
    "upload_file",
    "download_file",
    "open_writer",
    "open_reader",
    "compose",
    "copy",
    "delete",
    "delete_many",
    "missing_permissions",
    "sign",
    "check_conditions",
    "clean",
}
"""The names of the plan."""

ONLY_ASYNC = {"aclose", "abort"}
LOOP_BUSINESS = {"on_store_close", "reopened"}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [
        (each.name, each.kind, each.default)
        for each in inspect.signature(function).parameters.values()
    ]


def test_the_names_of_the_plan_are_there() -> None:
    assert public(aioflux.Store) >= METHODS
    assert public(sync.Store) >= METHODS


@pytest.mark.parametrize("name", ["Store", "ObjectReader", "ObjectWriter"])
def test_both_faces_have_the_same_names(name: str) -> None:
    awaitable, blocking = getattr(asynchronous, name), getattr(sync, name)
    renamed = public(blocking) - {"close"}
    assert public(awaitable) - ONLY_ASYNC - LOOP_BUSINESS <= renamed | {"retry", "transfer"}
    assert renamed <= public(awaitable) | {"retry", "transfer", "meta"}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_both_faces_take_the_same_parameters(name: str) -> None:
    assert parameters(getattr(sync.Store, name)) == parameters(getattr(aioflux.Store, name))


@pytest.mark.parametrize("name", ["prefetch", "read", "readinto", "seek", "tell"])
def test_both_readers_take_the_same_parameters(name: str) -> None:
    assert parameters(getattr(sync.ObjectReader, name)) == parameters(
        getattr(asynchronous.ObjectReader, name)
    )


def test_both_ways_to_open_take_the_same_parameters() -> None:
    assert parameters(sync.open_store) == parameters(aioflux.open_store)


SETTINGS: dict[str, Any] = {
    "transfer": aioflux.TransferOptions(max_in_flight=3),
    "retry": aioflux.RetryPolicy(max_attempts=2),
    "timeouts": aioflux.Timeouts(connect_seconds=1.5),
}


def provide_token() -> str:
    return "secret-token"


@pytest.mark.parametrize("uri", ["gs://bucket/train", "memory://x", "file:///tmp/a%20b"])
def test_a_store_pickles_with_its_settings(uri: str) -> None:
    store = aioflux.open_store(uri, **SETTINGS)
    for made in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):
        assert (made.uri, made.transfer, made.retry) == (store.uri, store.transfer, store.retry)
        assert made.__reduce__() == store.__reduce__()


def test_the_blocking_face_pickles_and_works() -> None:
    with sync.open_store("memory://pickled", **SETTINGS) as store:
        store.put("a", b"1")
        with pickle.loads(pickle.dumps(store)) as made:
            assert made.get("a") == b"1"
            assert made.transfer == store.transfer


def test_a_provider_pickles_by_its_name_and_without_a_token() -> None:
    store = aioflux.open_store("gs://bucket", credentials=provide_token)
    pickled = pickle.dumps(store)
    assert b"secret-token" not in pickled
    assert pickle.loads(pickled).__reduce__() == store.__reduce__()


def test_credentials_are_never_carried_along() -> None:
    credentials = google.auth.credentials.AnonymousCredentials()
    store = aioflux.open_store("gs://bucket", credentials=credentials)
    with pytest.raises(TypeError, match="holds credentials and cannot be pickled"):
        pickle.dumps(store)
    with pytest.raises(TypeError, match="ssl_context"):
        pickle.dumps(aioflux.open_store("gs://b", ssl_context=ssl.create_default_context()))


def test_no_secret_is_in_a_repr() -> None:
    store = aioflux.open_store("gs://bucket/p", credentials=provide_token)
    for shown in (repr(store), repr(sync.Store(store)), repr(vars(store))):
        assert "secret-token" not in shown

"""A uri names a store and a key in it."""

from __future__ import annotations

import os

import pytest

from aioflux._values.uri import (
    join_uri,
    local_uri,
    parse_uri,
    split_at_bucket,
    split_at_parent,
    split_object_uri,
)


@pytest.mark.parametrize(
    ("uri", "store_uri", "key"),
    [
        ("gs://bucket/model.pt", "gs://bucket", "model.pt"),
        ("gs://bucket/run 7/a%20b.pt", "gs://bucket/run 7/", "a%20b.pt"),
        ("gs://bucket/a//b", "gs://bucket/a//", "b"),
        ("az://account/container/a/b", "az://account/container/a/", "b"),
        ("file:///model.pt", "file:///", "model.pt"),
        ("file:///run%207/50%25.pt", "file:///run 7/", "50%.pt"),
        ("memory://name/x", "memory://name", "x"),
    ],
)
def test_an_object_is_directly_in_the_store(uri: str, store_uri: str, key: str) -> None:
    assert split_object_uri(uri) == split_at_parent(parse_uri(uri)) == (store_uri, key)
    assert parse_uri(join_uri(store_uri, key)) == parse_uri(uri)


@pytest.mark.parametrize("uri", ["gs://bucket", "gs://bucket/", "gs://bucket/dir/", "file:///d/"])
def test_a_uri_without_a_key_names_no_object(uri: str) -> None:
    with pytest.raises(ValueError, match="names no object"):
        split_object_uri(uri)


@pytest.mark.parametrize(
    ("uri", "store_uri", "key"),
    [
        ("gs://bucket", "gs://bucket", ""),
        ("gcs://bucket/a//b/", "gs://bucket", "a//b/"),
        ("az://account/container/a/b", "az://account/container", "a/b"),
        ("file:///run%207/50%25.pt", "file:///", "run 7/50%.pt"),
    ],
)
def test_the_objects_of_a_bucket_share_a_store(uri: str, store_uri: str, key: str) -> None:
    assert split_at_bucket(parse_uri(uri)) == (store_uri, key)
    assert parse_uri(join_uri(store_uri, key)) == parse_uri(uri)


def test_a_local_path_has_a_uri() -> None:
    assert local_uri("/x/100%.pt") == "file:///x/100%25.pt"
    assert parse_uri(local_uri("here")).key == f"{os.getcwd()}/here"

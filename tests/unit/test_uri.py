"""Uris: what is written back is what was read, and what cannot be read is refused by name."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._values.uri import (
    SCHEMES,
    Location,
    check_name,
    join_uri,
    local_uri,
    parse_uri,
    split_at_bucket,
    split_at_parent,
    split_object_uri,
    suggest_uri,
)

object_schemes = st.sampled_from([scheme for scheme in SCHEMES if scheme != "file"])
buckets = st.text(min_size=1).filter(lambda text: "/" not in text)


@given(scheme=object_schemes, bucket=buckets, key=st.text())
def test_an_object_uri_parses_to_what_wrote_it(scheme: str, bucket: str, key: str) -> None:
    root = f"{bucket}/{bucket}" if scheme == "az" else bucket  # account and container
    location = Location(scheme, root, key)
    assert parse_uri(str(location)) == location


@given(key=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_file_uri_parses_to_what_wrote_it(key: str) -> None:
    location = Location("file", "", f"/{key}")
    assert parse_uri(str(location)) == location


@given(text=st.text())
def test_any_text_is_parsed_or_refused_with_value_error(text: str) -> None:
    try:
        location = parse_uri(text)
    except ValueError:
        return
    assert location.scheme in SCHEMES


@pytest.mark.parametrize(
    ("uri", "location"),
    [
        ("gs://b", Location("gs", "b", "")),
        ("gs://b/", Location("gs", "b", "")),
        ("gs://b/k", Location("gs", "b", "k")),
        ("gs://b/a%20b//c/../d?e#f", Location("gs", "b", "a%20b//c/../d?e#f")),
        ("gs://b//k", Location("gs", "b", "/k")),
        ("gcs://b/k", Location("gs", "b", "k")),
        ("GS://B/K", Location("gs", "B", "K")),
        ("s3://b/k", Location("s3", "b", "k")),
        ("az://acct/b/k/l", Location("az", "acct/b", "k/l")),
        ("az://acct/b", Location("az", "acct/b", "")),
        ("memory://b/k", Location("memory", "b", "k")),
        ("file:///a/b", Location("file", "", "/a/b")),
        ("file://localhost/a/b", Location("file", "", "/a/b")),
        ("file:///a%20b", Location("file", "", "/a b")),
        ("file:///a?b#c", Location("file", "", "/a?b#c")),
    ],
)
def test_a_uri_is_split_into(uri: str, location: Location) -> None:
    assert parse_uri(uri) == location


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "must begin with one of"),
        ("bucket/key", "must begin with one of"),
        ("/data/train", "must begin with one of"),
        ("http://host/key", "must begin with one of"),
        ("gs:/b/k", "must begin with one of"),
        ("gs://", "names no bucket"),
        ("gs:///key", "names no bucket"),
        ("az://account", "names no container"),
        ("az://account/", "names no container"),
        ("az:///container/key", "names no container"),
        ("file://host/a", "names the host 'host'"),
        ("file://", "is not absolute"),
    ],
)
def test_a_wrong_uri_is_refused_and_named(uri: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        parse_uri(uri)
    assert repr(uri) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("/data/train%", "file:///data/train%25"),
        ("bucket", "gs://bucket"),
        ("bucket/a?b c", "gs://bucket/a?b c"),
        ("gs:/bucket/a", "gs://bucket/a"),
        ("s3:bucket", "s3://bucket"),
        ("s3a://bucket/a", "s3://bucket/a"),
        ("abfs://box@acct.dfs.core.windows.net/a/b", "az://acct/box/a/b"),
        ("abfss://box@acct.dfs.core.windows.net", "az://acct/box"),
        ("wasbs://box@acct.blob.core.windows.net/a", "az://acct/box/a"),
        ("https://storage.googleapis.com/bucket/a%20b", "gs://bucket/a b"),
        ("https://storage.cloud.google.com/bucket/a?authuser=1", "gs://bucket/a"),
        ("https://bucket.storage.googleapis.com/a", "gs://bucket/a"),
        ("https://bucket.s3.amazonaws.com/a", "s3://bucket/a"),
        ("https://my.bucket.s3.eu-west-1.amazonaws.com/a", "s3://my.bucket/a"),
        ("https://s3.eu-west-1.amazonaws.com/bucket/a", "s3://bucket/a"),
        ("https://acct.blob.core.windows.net/box/a?sig=planted", "az://acct/box/a"),
    ],
)
def test_a_text_that_means_a_uri_is_refused_with_that_uri(text: str, meant: str) -> None:
    assert suggest_uri(text) == meant
    assert str(parse_uri(meant)) == meant
    with pytest.raises(ValueError, match="is not a uri") as caught:
        parse_uri(text)
    assert str(caught.value).endswith(f"; did you mean {meant}?")
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.txt",
        "./bucket",
        "Bucket",
        "ab",
        "ftp://host/a",
        "https://example.com/bucket/a",
        "https://storage.googleapis.com/storage/v1/b/bucket/o/a",
        "abfs://box/a",
    ],
)
def test_a_text_that_means_no_uri_is_refused_without_a_suggestion(text: str) -> None:
    assert suggest_uri(text) == ""
    with pytest.raises(ValueError, match=r"one of gs://, s3://, az://, file://, memory://$"):
        parse_uri(text)


@pytest.mark.parametrize("value", [None, b"gs://b/k", 1])
def test_what_is_no_string_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        parse_uri(value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "0 bytes"),
        ("k" * 1025, "1025 bytes"),
        ("\u00e9" * 513, "1026 bytes"),
        (".", "mean the bucket"),
        ("..", "mean the bucket"),
        ("a\r", "line break"),
        ("\na", "line break"),
        (".well-known/acme-challenge/x", "reserved"),
    ],
)
def test_a_name_that_no_object_can_have_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_name(name)


@pytest.mark.parametrize(
    "name", ["k" * 1024, "\u00e9" * 512, "...", "./.", "a\0\tb", ".well-known/x"]
)
def test_other_names_are_taken(name: str) -> None:
    check_name(name)


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

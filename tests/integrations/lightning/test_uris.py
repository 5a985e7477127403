"""Paths of Lightning as uris, and the names of its checkpoints."""

from __future__ import annotations

import pytest

from aioflux.integrations.lightning._uris import is_below, is_same, name_pattern, to_uri


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ("gs://b/run/a.ckpt", "gcs://b/run/a.ckpt", True),
        ("gs://b/run/a.ckpt/", "gs://b/run/a.ckpt", True),
        ("gs://b/run/a.ckpt", "gs://b/run//a.ckpt", False),
        ("/x/run/a.ckpt", "file:///x/run/a.ckpt", True),
        ("/x/run/../run/a.ckpt", "/x/run/a.ckpt", True),
        ("s3://b/run/a.ckpt", "gs://b/run/a.ckpt", False),
        ("https://host/a.ckpt", "https://host/a.ckpt", True),
    ],
)
def test_two_paths_of_one_checkpoint(one: str, other: str, is_one: bool) -> None:
    assert is_same(one, other) is is_one


@pytest.mark.parametrize(
    ("path", "directory", "is_inside"),
    [
        ("gs://b/run/a.ckpt", "gs://b/run", True),
        ("gs://b/run/a.ckpt", "gs://b/run/", True),
        ("gs://b/run/x/a.ckpt", "gs://b/run", True),
        ("gs://b/run2/a.ckpt", "gs://b/run", False),
        ("gs://b/run", "gs://b/run", False),
        ("gs://c/run/a.ckpt", "gs://b/run", False),
        ("/x/run/a.ckpt", "/x/run", True),
        ("/x/other/a.ckpt", "/x/run", False),
    ],
)
def test_a_checkpoint_below_a_directory(path: str, directory: str, is_inside: bool) -> None:
    assert is_below(path, directory) is is_inside


@pytest.mark.parametrize(
    ("template", "name", "is_match"),
    [
        ("last", "last.ckpt", True),
        ("last", "last-v1.ckpt", True),
        ("last", "lasting.ckpt", False),
        ("last", "last.ckpt.bak", False),
        ("{epoch}-last", "epoch=3-last.ckpt", True),
        ("{epoch}-last", "last.ckpt", False),
        ("a.b", "aXb.ckpt", False),
    ],
)
def test_names_of_the_last_checkpoint(template: str, name: str, is_match: bool) -> None:
    assert bool(name_pattern(template, ".ckpt").fullmatch(name)) is is_match


def test_a_uri_stays_as_it_is() -> None:
    assert to_uri("gs://b/a%20b?c#d") == "gs://b/a%20b?c#d"
    assert to_uri("aiogs://b/a.ckpt") == "gs://b/a.ckpt"  # a protocol of fsspec
    assert to_uri("aiolightning+gs://b/a.ckpt") == "gs://b/a.ckpt"  # of ckpt_path="last"
    assert to_uri("aiox://b/a.ckpt") == "aiox://b/a.ckpt"
    assert to_uri("/x/100%.ckpt") == "file:///x/100%25.ckpt"
    assert to_uri("C:/x") != "C:/x"  # no scheme has one letter


@pytest.mark.parametrize("mangled", ["gs:/b/run", "s3:/b/run", "GCS:/b", "memory:/b", "file:/x"])
def test_a_uri_without_a_slash_is_rejected(mangled: str) -> None:
    with pytest.raises(ValueError, match="pass uris as strings"):
        to_uri(mangled)

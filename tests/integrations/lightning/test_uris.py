"""What Lightning calls a path."""

from __future__ import annotations

import pytest

from aioflux.integrations.lightning._objects import is_part
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
def test_two_names_of_one_checkpoint(one: str, other: str, is_one: bool) -> None:
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


@pytest.mark.parametrize(
    ("key", "is_ours"),
    [
        (".metadata", True),
        ("meta.pt", True),
        ("__0_0.distcp", True),
        ("__3.metadata", True),
        ("20261122T031500.123Z-3f9a12cd/__0_0.distcp", True),
        ("20261122T031500.123Z-3f9a12cd/rank-00000.json", True),
        ("notes.txt", False),
        ("images/__0_0.distcp", False),
        ("__0_0.distcp.bak", False),
    ],
)
def test_what_a_save_writes(key: str, is_ours: bool) -> None:
    assert is_part(key) is is_ours


def test_a_uri_stays_as_it_is() -> None:
    assert to_uri("gs://b/a%20b?c#d") == "gs://b/a%20b?c#d"
    assert to_uri("aiogs://b/a.ckpt") == "gs://b/a.ckpt"  # as fsspec knows us
    assert to_uri("aioflux+gs://b/a.ckpt") == "gs://b/a.ckpt"
    assert to_uri("aiox://b/a.ckpt") == "aiox://b/a.ckpt"
    assert to_uri("/x/100%.ckpt") == "file:///x/100%25.ckpt"
    assert to_uri("C:/x") != "C:/x"  # no scheme has one letter


@pytest.mark.parametrize("mangled", ["gs:/b/run", "s3:/b/run", "GCS:/b", "memory:/b", "file:/x"])
def test_what_pathlib_took_apart_is_refused(mangled: str) -> None:
    with pytest.raises(ValueError, match="pass uris as strings"):
        to_uri(mangled)

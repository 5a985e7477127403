"""The uri of one object names a store and a key in it."""

from __future__ import annotations

import pytest

from aioflux.checkpoint import open_reader, open_writer
from aioflux.checkpoint._store.target import split_uri


@pytest.mark.parametrize(
    ("uri", "root", "key"),
    [
        ("gs://bucket/model.pt", "gs://bucket", "model.pt"),
        ("gs://bucket/run 7/a%20b.pt", "gs://bucket/run 7/", "a%20b.pt"),
        ("gs://bucket/a//b", "gs://bucket/a//", "b"),
        ("file:///model.pt", "file:///", "model.pt"),
        ("file:///run%207/50%25.pt", "file:///run 7/", "50%.pt"),
        ("memory://name/x", "memory://name", "x"),
    ],
)
def test_a_uri_splits_at_its_last_slash(uri: str, root: str, key: str) -> None:
    assert split_uri(uri) == (root, key)


@pytest.mark.parametrize("uri", ["gs://bucket", "gs://bucket/", "gs://bucket/dir/", "file:///d/"])
@pytest.mark.parametrize("opens", [open_writer, open_reader])
def test_a_uri_without_a_key_is_refused(uri: str, opens: type) -> None:
    with pytest.raises(ValueError, match="names no object"):
        opens(uri)

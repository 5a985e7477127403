"""`du` and `sign`."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, urlsplit

import pytest


@pytest.fixture
def filled(bucket):
    for key in ("a", "p/b", "p/c/d", "p/c/e", "p", "q"):
        bucket.put(key, bytes(1000))
    return bucket


def test_du_sums_what_is_below(aioflux, filled) -> None:
    ended = aioflux("du", filled.uri, f"{filled.uri}/p", f"{filled.uri}/p/c/", f"{filled.uri}/q")
    assert (ended.status, ended.err) == (0, "")
    assert [line.split() for line in ended.lines] == [
        ["6000", "6", filled.uri],
        ["4000", "4", f"{filled.uri}/p"],
        ["2000", "2", f"{filled.uri}/p/c/"],
        ["1000", "1", f"{filled.uri}/q"],
    ]


def test_du_shows_levels_and_units(aioflux, filled) -> None:
    ended = aioflux("du", "-h", "--depth", "1", filled.uri)
    assert [line.split(maxsplit=2) for line in ended.lines] == [
        ["2.9", "KiB", f"3  {filled.uri}/p/"],
        ["5.9", "KiB", f"6  {filled.uri}"],
    ]
    rows = [json.loads(line) for line in aioflux("du", "--json", "--depth", "9", filled.uri).lines]
    assert rows == [
        {"uri": f"{filled.uri}/p/", "size": 3000, "num_objects": 3},
        {"uri": f"{filled.uri}/p/c/", "size": 2000, "num_objects": 2},
        {"uri": filled.uri, "size": 6000, "num_objects": 6},
    ]


def test_du_of_nothing(aioflux, filled, tmp_path) -> None:
    ended = aioflux("du", f"{filled.uri}/none", f"{filled.uri}/q")
    assert ended.status == 1
    assert "there is no object or prefix" in ended.err
    assert len(ended.lines) == 1  # the other one is shown
    (tmp_path / "file").write_bytes(bytes(2048))
    assert aioflux("du", "-h", str(tmp_path)).lines[0].split()[:3] == ["2.0", "KiB", "1"]


def test_sign_prints_a_url(aioflux, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-show")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    words = ("sign", "--expires", "15m", "s3://bucket/a b.bin")
    ended = aioflux(*words)
    assert (ended.status, ended.err) == (0, "")
    url = urlsplit(ended.lines[0])
    assert url.path.endswith("/a%20b.bin")
    assert parse_qs(url.query)["X-Amz-Expires"] == ["900"]
    row = json.loads(aioflux(*words, "--json", "--method", "put").lines[0])
    assert row["uri"] == "s3://bucket/a b.bin"
    assert "X-Amz-Signature=" in row["url"]
    assert "do-not-show" not in ended.out + row["url"]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("s3://bucket",), 1, "is a bucket"),
        (("--expires", "8d", "s3://bucket/a"), 1, "not datetime.timedelta(days=8)"),
        (("--expires", "soon", "s3://bucket/a"), 2, "soon"),
        (("--method", "POST", "s3://bucket/a"), 2, "POST"),
        (("file:///tmp/none",), 1, "signed urls"),
    ],
    ids=str,
)
def test_what_cannot_be_signed(aioflux, monkeypatch, words, status, text) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    ended = aioflux("sign", *words)
    assert ended.status == status
    assert text in ended.err
    assert ended.out == ""

"""`ls --all-generations`, and `ls` of the buckets of a project or account."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import google.auth
import google.auth.credentials
import pytest
from google.oauth2 import service_account

from aioflux._auth.google import GoogleToken
from aioflux.testing.gcs_server import Hook, Response
from tests.store.test_sign import key_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing.gcs_server import Request


__all__ = ["key_file"]


class Versions(Hook):
    """Answers listings with versions: two generations of `a` and of `a/b`, one of `ab`."""

    def before(self, request: Request) -> Response | None:
        if request.query.get("versions") != "true":
            return None
        rows = [("a", 1), ("a", 2), ("a/b", 1), ("a/b", 2), ("ab", 1)]
        items: list[dict[str, str]] = [
            {"name": name, "generation": str(number), "size": str(number)}
            | ({"timeDeleted": "2026-01-02T03:04:05Z"} if number == 1 else {})
            for name, number in rows
            if name.startswith(request.query.get("prefix", ""))
        ]
        return Response(body=json.dumps({"kind": "storage#objects", "items": items}).encode())


@pytest.fixture
def versioned(cli_server, bucket) -> Iterator[str]:
    """Uri of a bucket with noncurrent generations."""
    before = cli_server.app.hooks
    cli_server.app.hooks = (Versions(), *before)
    yield bucket.uri
    cli_server.app.hooks = before


@pytest.mark.parametrize("options", [[], ["-r"]], ids=str)
def test_all_generations_are_listed_below_a_prefix(aioflux, versioned, options) -> None:
    ended = aioflux("ls", "--all-generations", *options, f"{versioned}/a")
    assert (ended.status, ended.err) == (0, "")
    names = ["a#1", "a#2", "a/b#1", "a/b#2"]
    assert ended.lines == [f"{versioned}/{name}" for name in names]
    ended = aioflux("ls", "--all-generations", "--limit", "2", versioned)
    assert ended.lines == [f"{versioned}/{name}" for name in names[:2]]


def test_generations_in_long_form_and_json(aioflux, versioned) -> None:
    first, *_, total = aioflux("ls", "-l", "--all-generations", versioned).lines
    assert first.split() == ["1", "-", "1", f"{versioned}/a#1"]
    assert total.startswith("5 objects, 7 bytes")
    ended = aioflux("ls", "--json", "--all-generations", f"{versioned}/a/")
    rows = [json.loads(line) for line in ended.lines]
    assert [(row["uri"], row["generation"], row["is_latest"]) for row in rows] == [
        (f"{versioned}/a/b#1", "1", False),
        (f"{versioned}/a/b#2", "2", True),
    ]


def test_many_generations_are_printed_in_batches(aioflux, versioned, monkeypatch) -> None:
    monkeypatch.setattr("aioflux.cli._ls._BATCH", 2)
    assert len(aioflux("ls", "--all-generations", versioned).lines) == 5
    assert len(aioflux("ls", "--all-generations", "--limit=2", versioned).lines) == 2


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["gs://bucket/*"], 2, "no patterns"),
        (["--all", "gs://bucket"], 2, "no --all"),
        (["--manifest", "gs://b/m", "gs://bucket"], 2, "--manifest takes"),
        (["gs://"], 2, "lists buckets"),
        (["memory://bucket"], 1, "only gs:// and s3://"),
    ],
    ids=str,
)
def test_generations_that_are_not_listed(aioflux, words, status, text) -> None:
    ended = aioflux("ls", "--all-generations", *words)
    assert (ended.status, ended.out) == (status, "")
    assert text in ended.err


@pytest.mark.parametrize(
    "words",
    [["-l"], ["--sort", "time"], ["--newer", "1d"], ["-r"], ["gs://b"], ["--manifest", "gs://b/m"]],
    ids=str,
)
def test_options_that_buckets_do_not_have(aioflux, words) -> None:
    ended = aioflux("ls", *words, "gs://")
    assert (ended.status, ended.out, "lists buckets" in ended.err) == (2, "", True)


def test_no_generation_of_a_name(aioflux, versioned) -> None:
    ended = aioflux("ls", "--all-generations", f"{versioned}/none")
    assert ended.status == 1
    assert "there is no generation of" in ended.err


def test_buckets_of_a_project(aioflux, cli_server, monkeypatch) -> None:
    names = sorted(f"{uuid.uuid4().hex}" for _ in range(3))
    for name in names:
        cli_server.create_bucket(name)
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    ended = aioflux("ls", "gs://")
    assert ended.status == 1
    assert "set GOOGLE_CLOUD_PROJECT" in ended.err
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    sent: list[str] = []

    class Small(Hook):
        def before(self, request: Request) -> Response | None:
            sent.append(request.query.get("project", ""))
            assert request.target.startswith(b"/storage/v1/b?")
            page: dict[str, Any] = {"kind": "storage#buckets", "items": [{"name": names[0]}]}
            if "pageToken" not in request.query:
                page = {"kind": "storage#buckets", "nextPageToken": "2"}
            return Response(body=json.dumps(page).encode())

    shown = aioflux("ls", "gs://").lines
    assert [uri for uri in shown if uri.split("/")[2] in names] == [f"gs://{at}/" for at in names]
    assert shown == sorted(f"gs://{name}/" for name in cli_server.state.buckets)
    assert len(aioflux("ls", "--limit", "2", "gcs://").lines) == 2
    before = cli_server.app.hooks
    cli_server.app.hooks = (Small(),)
    try:
        row = {"type": "prefix", "uri": f"gs://{names[0]}/"}
        assert [json.loads(each) for each in aioflux("ls", "--json", "gs://").lines] == [row]
        cli_server.app.hooks = (Html(),)
        assert "could not list gs://" in aioflux("ls", "gs://").err
    finally:
        cli_server.app.hooks = before
    assert sent == ["project"] * 2


class Html(Hook):
    def before(self, request: Request) -> Response | None:
        return Response(body=b'{"kind": "storage#objects"}')


def test_buckets_of_an_account(aioflux, moto, monkeypatch) -> None:
    moto.sign_in(monkeypatch)
    ended = aioflux("ls", "s3://")
    assert (ended.status, ended.err) == (0, "")
    theirs = [each["Name"] for each in moto.door().list_buckets()["Buckets"]]
    assert "bucket" in theirs
    assert ended.lines == sorted(f"s3://{name}/" for name in theirs)


@pytest.mark.parametrize(
    ("words", "text"),
    [(["az://"], "names no container"), (["memory://"], "names no bucket")],
    ids=str,
)
def test_buckets_of_other_services(aioflux, words, text) -> None:
    ended = aioflux("ls", *words)
    assert ended.status == 1
    assert text in ended.err


def test_recursion_needs_a_bucket(aioflux) -> None:
    ended = aioflux("ls", "-r", "s3://")
    assert ended.status == 2
    assert "lists buckets" in ended.err


async def test_the_project_is_that_of_the_credentials(monkeypatch, key_file) -> None:
    credentials = service_account.Credentials.from_service_account_info(key_file)
    assert await GoogleToken(credentials).project() == "project"
    monkeypatch.setattr(google.auth, "default", lambda **_: (credentials, "theirs"))
    assert await GoogleToken().project() == "theirs"
    nobody = google.auth.credentials.AnonymousCredentials()
    assert await GoogleToken(nobody).project() == ""

"""No secret of Google is in a log, a repr, an error or a pickle."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.oauth2 import credentials, service_account

import aioflux
from aioflux import RetryPolicy
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Response
from tests.service.gcs_rig import Answering

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing.gcs_server import Request

TOKEN = "ya29.planted-access-token-0123456789"
KEY_ID = "planted0key0id0123456789abcdef"
ONCE = RetryPolicy(max_attempts=2, initial_seconds=1e-3, max_seconds=1e-3)


class TokenEndpoint(BaseHTTPRequestHandler):
    """Returns one token for a signed assertion, or rejects it and repeats the request."""

    assertions: ClassVar[list[str]] = []
    is_rejecting: ClassVar[bool] = False
    status: ClassVar[int] = 400

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.assertions.append(asked.partition("assertion=")[2].partition("&")[0])
        answer = {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
        if self.is_rejecting:
            answer = {"error": "invalid_grant", "error_description": f"no such account: {asked}"}
        body = json.dumps(answer).encode()
        self.send_response(self.status if self.is_rejecting else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(TokenEndpoint, "assertions", [])
    monkeypatch.setattr(TokenEndpoint, "is_rejecting", False)
    with HTTPServer(("127.0.0.1", 0), TokenEndpoint) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/token"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encoded = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return encoded.decode()


@pytest.fixture
def key_file(endpoint: str, private_key: str, tmp_path: Path) -> Path:
    path = tmp_path / "key.json"
    fields = {
        "type": "service_account",
        "project_id": "planted-project",
        "private_key_id": KEY_ID,
        "private_key": private_key,
        "client_email": "tests@planted-project.iam.gserviceaccount.com",
        "token_uri": endpoint,
    }
    path.write_text(json.dumps(fields))
    return path


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as server:
        yield server


def text_of(error: BaseException) -> str:
    """Return the text of an error, its causes, notes and pickle."""
    text = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
    return text + repr(pickle.dumps(error))


async def everything(store: aioflux.Store) -> str:
    """Make every kind of request, and return reprs and errors."""
    text = [repr(store), repr(store.stats)]
    for request in (
        lambda: store.put("a", b"1"),
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: store.get("missing"),
        lambda: store.put("a", b"1", mode="create"),
        lambda: store.list_all(),
        lambda: store.copy("a", "b"),
        lambda: store.compose("c", ["a", "b"]),
        lambda: store.delete_many(["a", "b"]),
        lambda: store.missing_permissions(["storage.objects.get"]),
        lambda: store.clean(),
    ):
        try:
            text.append(repr(await request()))
        except aioflux.AiofluxError as exc:
            text.append(text_of(exc))
    for _, session in store._sessions.open_sessions():
        text += [repr(session.service), repr(vars(session.service))]
    text.append(repr(store))
    return "".join(text)


def assert_no_secret(text: str, private_key: str) -> None:
    lines = private_key.splitlines()
    for secret in (TOKEN, *lines[1:-1], *TokenEndpoint.assertions):
        assert secret not in text, secret


@pytest.mark.parametrize("status", [200, 401, 403, 500])
async def test_no_secret_of_a_key_file(
    key_file: Path,
    private_key: str,
    server: GCSServer,
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Accepted, or rejected by the service."""

    def reject(_: Request) -> Response | None:
        body = json.dumps({"error": {"code": status, "message": "no"}}).encode()
        return None if status == 200 else Response(status=status, body=body)

    caplog.set_level(logging.DEBUG)
    account = service_account.Credentials.from_service_account_file(str(key_file))
    hook = Answering(reject)
    server.app.hooks = (hook, *server.app.hooks)
    async with aioflux.open_store(
        "gs://bucket/p/", endpoint_url=server.url, credentials=account, retry=ONCE
    ) as store:
        text = await everything(store)
    assert f"Bearer {TOKEN}" in hook.tokens
    assert_no_secret(caplog.text + text, private_key)


@pytest.mark.parametrize("status", [400, 401, 500])
async def test_no_secret_of_a_key_file_that_is_rejected(
    key_file: Path,
    private_key: str,
    server: GCSServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    """Also if the token endpoint repeats the request with the signed assertion."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(TokenEndpoint, "is_rejecting", True)
    monkeypatch.setattr(TokenEndpoint, "status", status)
    impatient = SimpleNamespace(sleep=lambda _: None)
    monkeypatch.setattr("google.auth._exponential_backoff.time", impatient)
    account = service_account.Credentials.from_service_account_file(str(key_file))
    async with aioflux.open_store(
        "gs://bucket/p/", endpoint_url=server.url, credentials=account, retry=ONCE
    ) as store:
        with pytest.raises(
            (aioflux.CredentialsError, aioflux.TransientError), match="credentials could not"
        ) as raised:
            await store.get("a")
        text = text_of(raised.value) + await everything(store)
    assert TokenEndpoint.assertions
    assert_no_secret(caplog.text + text, private_key)


async def test_no_secret_of_a_user_whose_refresh_is_rejected(
    endpoint: str, server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint repeats the refresh token and the secret of the client."""
    monkeypatch.setattr(TokenEndpoint, "is_rejecting", True)
    secrets = {"refresh_token": "1//planted-refresh", "client_secret": "GOCSPX-planted-client"}
    user = credentials.Credentials(None, token_uri=endpoint, client_id="id", **secrets)
    async with aioflux.open_store(
        "gs://bucket/p/", endpoint_url=server.url, credentials=user, retry=ONCE
    ) as store:
        with pytest.raises(aioflux.CredentialsError, match="RefreshError: invalid_grant") as raised:
            await store.get("a")
    error: BaseException | None = raised.value
    while error is not None:
        assert "planted" not in text_of(error)
        error = error.__context__


def provide() -> str:
    return TOKEN


async def test_no_secret_of_a_token(
    server: GCSServer, private_key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hook = Answering()
    server.app.hooks = (hook, *server.app.hooks)
    async with aioflux.open_store(
        "gs://bucket/p/", endpoint_url=server.url, credentials=provide, retry=ONCE
    ) as store:
        text = await everything(store)
        data = pickle.dumps(store)
    assert f"Bearer {TOKEN}" in hook.tokens
    assert_no_secret(caplog.text + text + repr(data), private_key)


def test_a_store_with_a_key_does_not_pickle(key_file: Path, private_key: str) -> None:
    account = service_account.Credentials.from_service_account_file(str(key_file))
    store = aioflux.open_store("gs://bucket/p/", credentials=account)
    with pytest.raises(TypeError, match="holds credentials and cannot be pickled") as raised:
        pickle.dumps(store)
    assert_no_secret(str(raised.value), private_key)


def test_a_store_that_finds_its_key_pickles(
    key_file: Path, private_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file))
    data: Any = pickle.dumps(aioflux.open_store("gs://bucket/p/"))
    assert_no_secret(repr(data), private_key)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary directory for workers, whose sockets in it need paths of at most 107 bytes.

    With a longer path a worker of torch loses its batches, and the loader waits for them forever.
    """
    with tempfile.TemporaryDirectory(prefix="nd-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def test_no_secret_of_a_key_file_is_written_to_disk(
    key_file: Path, private_key: str, server: GCSServer, tmp_path: Path, short_path: Path
) -> None:
    """Not by a cache, workers, checkpoints or manifests: in no file below home, temp and work."""
    home = tmp_path / "home"
    home.mkdir()
    info = json.loads(key_file.read_text())
    key_file.unlink()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("disk_task.py"))],
        input=json.dumps({"endpoint_url": server.url, "credentials": info}),
        capture_output=True,
        text=True,
        timeout=100,
        cwd=home,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "TMPDIR": str(short_path),
            **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), str(home)),
        },
    )
    assert done.returncode == 0, done.stderr
    assert TokenEndpoint.assertions  # the key was used
    paths = [*tmp_path.rglob("*"), *short_path.rglob("*")]
    files = [path for path in paths if path.is_file()]
    assert len(files) > 10  # the cache
    for path in files:
        assert_no_secret(path.read_bytes().decode("latin-1"), private_key)
    stored = b"".join(server.get("bucket", key) for key in server.keys("bucket"))
    assert_no_secret(stored.decode("latin-1"), private_key)

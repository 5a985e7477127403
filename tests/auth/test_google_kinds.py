"""Every kind of Application Default Credentials, against a token endpoint on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import impersonated_credentials
from google.oauth2 import service_account as service_account_credentials
from google.oauth2.credentials import Credentials

from aioflux import CredentialsError, TransientError
from aioflux._auth.google import SCOPES, GoogleToken, open_token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Endpoint:
    """Returns tokens `token-1`, `token-2`, ... for every request; records the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                form = json.loads(body) if body.startswith("{") else parse_qs(body)
                endpoint.requests.append((self.path, form))
                data = json.dumps(endpoint.response(self.path)).encode()
                self.send_response(endpoint.status)
                self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = f"http://{self.host}"

    def response(self, path: str) -> dict[str, Any]:
        if self.status != 200:
            return {"error": "invalid_grant", "error_description": "SECRET"}
        token = f"token-{len(self.requests)}"
        if path.endswith(":generateAccessToken"):
            end = datetime.now(UTC) + timedelta(hours=1)
            return {"accessToken": token, "expireTime": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
        if path.endswith("?recursive=true"):
            return {"email": "me@example", "scopes": ["all"], "aliases": ["default"]}
        return {
            "access_token": token,
            "expires_in": 3600,
            "token_type": "Bearer",
            "issued_token_type": "urn:ietf:params:oauth:token-type:access_token",
        }


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def service_account(endpoint: Endpoint, private_key: str) -> dict[str, Any]:
    return {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": private_key,
        "client_email": "me@p.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": f"{endpoint.url}/token",
    }


KINDS = ("service_account", "impersonated", "external_account", "external_user")


def settings_of(kind: str, endpoint: Endpoint, private_key: str, folder: Path) -> dict[str, Any]:
    """Return the content of the file of a kind of credentials."""
    if kind == "service_account":
        return service_account(endpoint, private_key)
    if kind == "external_user":
        return {
            "type": "external_account_authorized_user",
            "audience": "//iam.googleapis.com/locations/global/workforcePools/w/providers/x",
            "client_id": "id",
            "client_secret": "secret",
            "refresh_token": "refresh",
            "token_url": f"{endpoint.url}/sts",
            "token_info_url": f"{endpoint.url}/info",
        }
    (folder / "subject").write_text("subject-token")
    return {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/w",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{endpoint.url}/sts",
        "credential_source": {"file": str(folder / "subject")},
    }


@pytest.fixture
def found(
    request: pytest.FixtureRequest,
    endpoint: Endpoint,
    private_key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> GoogleToken:
    """Credentials of one kind, found as the default ones if that is possible here."""
    if request.param == "impersonated":
        # Its file cannot name another endpoint than Google's.
        source = service_account_credentials.Credentials.from_service_account_info(
            service_account(endpoint, private_key), scopes=SCOPES
        )
        return GoogleToken(
            impersonated_credentials.Credentials(
                source_credentials=source,
                target_principal="you@p.iam.gserviceaccount.com",
                target_scopes=SCOPES,
                iam_endpoint_override=f"{endpoint.url}/v1/you:generateAccessToken",
            )
        )
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(settings_of(request.param, endpoint, private_key, tmp_path)))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")
    token = open_token(None, emulator=False)
    assert isinstance(token, GoogleToken)
    return token


@pytest.mark.parametrize("found", KINDS, indirect=True)
async def test_a_kind_is_found_and_renewed_when_rejected(
    found: GoogleToken, endpoint: Endpoint
) -> None:
    first = await found.get()
    assert first == f"token-{len(endpoint.requests)}"
    assert await found.get() == first
    num_requests = len(endpoint.requests)
    found.invalidate(first)
    second = await found.get()
    assert second == f"token-{len(endpoint.requests)}"
    assert len(endpoint.requests) > num_requests
    found.invalidate(first)
    assert await found.get() == second


@pytest.mark.parametrize("found", KINDS, indirect=True)
async def test_a_kind_that_is_rejected_says_what_to_do(
    found: GoogleToken, endpoint: Endpoint
) -> None:
    endpoint.status = 400
    with pytest.raises(CredentialsError, match="gcloud auth application-default") as caught:
        await found.get()
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("found", KINDS, indirect=True)
async def test_an_endpoint_that_is_away_is_transient(
    found: GoogleToken, endpoint: Endpoint
) -> None:
    endpoint.server.server_close()
    with pytest.raises(TransientError, match="this time"):
        await found.get()


async def test_credentials_of_a_user_are_refreshed(endpoint: Endpoint) -> None:
    credentials = Credentials(
        None,
        refresh_token="refresh",
        client_id="id",
        client_secret="secret",
        token_uri=f"{endpoint.url}/token",
    )
    token = open_token(credentials, emulator=False)
    assert await token.get() == "token-1"
    assert endpoint.requests[0][1]["refresh_token"] == ["refresh"]


def test_the_metadata_server_is_used_if_there_is_nothing_else(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    # In a process of its own: google-auth reads the address when it is imported.
    code = (
        "import asyncio\n"
        "from aioflux._auth.google import open_token\n"
        "print(asyncio.run(open_token(None, emulator=False).get()))"
    )
    dropped = ("GOOGLE_APPLICATION_CREDENTIALS", "HTTP_PROXY", "http_proxy", "NO_GCE_CHECK")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {
        "GCE_METADATA_HOST": endpoint.host,
        "GCE_METADATA_IP": endpoint.host,
        "GCE_METADATA_TIMEOUT": "100",
        "HOME": str(tmp_path),
        "CLOUDSDK_CONFIG": str(tmp_path),
    }
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.stdout.startswith("token-"), ran.stderr
    assert any("/service-accounts/" in path for path, _ in endpoint.requests)

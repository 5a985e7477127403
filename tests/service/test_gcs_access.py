"""Tokens, redirects, certificates and proxies: the same on both planes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from google.oauth2.credentials import Credentials

from aioflux import (
    CredentialsError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientError,
)
from aioflux._services.base import ReadRequest
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Response
from tests.http.scripted import Peer, ok, serving
from tests.service.gcs_rig import OPERATIONS, Answering, opened

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from aioflux.testing.gcs_server import Request

# Requests are counted, and a small read opens a connection by another read.
each_operation = pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - {"small_read"}))


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",)) as running:
        running.put("bucket", "p/a", b"0123456789")
        yield running


@pytest.fixture(scope="module")
def tls_server() -> Iterator[GCSServer]:
    with GCSServer(buckets=("bucket",), tls=True) as running:
        yield running


def accepting(*tokens: str) -> Answering:
    """Refuses every token but these."""
    accepted = {f"Bearer {token}" for token in tokens}

    def answer(request: Request) -> Response | None:
        known = request.headers.get("authorization") in accepted
        return None if known else Response(status=401)

    return Answering(answer)


class Refreshing(Credentials):
    """Google credentials whose refresh gives the next token."""

    def __init__(self) -> None:
        super().__init__("token-0")
        self.num_refreshed = 0

    def refresh(self, request: object) -> None:
        self.num_refreshed += 1
        self.token = f"token-{self.num_refreshed}"


@each_operation
async def test_a_token_that_is_refused_is_renewed_once(server: GCSServer, operation: str) -> None:
    hook = accepting("token-1")
    server.app.hooks += (hook,)
    credentials = Refreshing()
    async with opened(server.url, credentials=credentials) as service:
        with suppress(NotFoundError):
            await OPERATIONS[operation](service)
    assert hook.tokens == ["Bearer token-0", "Bearer token-1"]
    assert credentials.num_refreshed == 1


@each_operation
async def test_a_provider_is_retried(server: GCSServer, operation: str) -> None:
    hook = accepting("new")
    server.app.hooks += (hook,)
    async with opened(server.url, credentials=lambda: "new" if hook.tokens else "old") as service:
        with suppress(NotFoundError):
            await OPERATIONS[operation](service)
    assert hook.tokens == ["Bearer old", "Bearer new"]


@each_operation
async def test_a_second_refusal_says_what_to_do(server: GCSServer, operation: str) -> None:
    hook = accepting()
    server.app.hooks += (hook,)
    async with opened(server.url, credentials=Refreshing()) as service:
        with pytest.raises(PermissionDeniedError, match=r"gs://bucket/.*gcloud auth") as caught:
            await OPERATIONS[operation](service)
    assert hook.tokens == ["Bearer token-0", "Bearer token-1"]
    assert "token-" not in str(caught.value)
    assert caught.value.__context__ is None


@each_operation
async def test_a_refusal_without_a_token_is_not_asked_again(
    server: GCSServer, operation: str
) -> None:
    hook = accepting()
    server.app.hooks += (hook,)
    async with opened(server.url) as service:
        with pytest.raises(PermissionDeniedError, match="credentials="):
            await OPERATIONS[operation](service)
    assert hook.tokens == [None]


@each_operation
async def test_a_token_that_cannot_be_renewed_says_what_to_do(
    server: GCSServer, operation: str
) -> None:
    server.app.hooks += (accepting(),)
    async with opened(server.url, credentials=Credentials("fixed")) as service:
        with pytest.raises(CredentialsError, match="gcloud auth"):
            await OPERATIONS[operation](service)


async def test_many_refusals_at_once_make_for_one_renewal(server: GCSServer) -> None:
    server.app.hooks += (accepting("token-1"),)
    credentials = Refreshing()
    async with opened(server.url, credentials=credentials) as service:
        await asyncio.gather(
            *(service.head("a") for _ in range(50)),
            *(service.get(ReadRequest("a")) for _ in range(50)),
        )
    assert credentials.num_refreshed == 1


@each_operation
async def test_a_token_endpoint_that_is_away_is_retried(server: GCSServer, operation: str) -> None:
    from google.auth import exceptions

    class Away(Refreshing):
        def refresh(self, request: object) -> None:
            raise exceptions.TransportError("no network")

    credentials = Away()
    credentials.token = None
    async with opened(server.url, credentials=credentials) as service:
        with pytest.raises(TransientError, match=r"gs://bucket/p/.*token endpoint"):
            await OPERATIONS[operation](service)


@each_operation
@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
async def test_a_redirect_is_not_followed(operation: str, status: int) -> None:
    async def elsewhere(peer: Peer) -> None:
        stolen.append(await peer.read_request())
        await peer.send(ok(b"{}"))

    async def script(peer: Peer) -> None:
        await peer.read_request()
        location = b"Location: http://127.0.0.1:%d/x" % target.port
        await peer.send(ok(b"", location, b"Connection: close", status=b"%d Moved" % status))

    stolen: list[object] = []
    async with serving(elsewhere) as (_, target), serving(script) as (server, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with opened(url, credentials=lambda: "secret") as service:
            with pytest.raises(
                StorageError, match=r"gs://bucket/.*redirect.*endpoint_url="
            ) as caught:
                await OPERATIONS[operation](service)
        assert caught.value.status == status
        assert not isinstance(caught.value, TransientError)
        assert not stolen
        assert server.num_accepted == 1


@each_operation
async def test_a_certificate_of_an_unknown_authority_is_rejected(
    tls_server: GCSServer, operation: str
) -> None:
    async with opened(tls_server.url) as service:
        with pytest.raises(
            StorageError, match=r"gs://bucket/.*ssl_context=.*SSL_CERT_FILE"
        ) as caught:
            await OPERATIONS[operation](service)
    assert not isinstance(caught.value, TransientError)


@each_operation
@pytest.mark.parametrize("way", ["context", "environment"])
async def test_an_authority_of_ones_own_can_be_trusted(
    tls_server: GCSServer, operation: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls_server.put("bucket", "p/a", b"0123456789")
    settings: dict[str, ssl.SSLContext] = {}
    if way == "context":
        settings["ssl_context"] = tls_server.client_ssl_context()
    else:
        monkeypatch.setenv("SSL_CERT_FILE", str(tls_server.ca_file))
    async with opened(tls_server.url, **settings) as service:
        with suppress(NotFoundError):
            await OPERATIONS[operation](service)


@each_operation
async def test_both_planes_go_through_the_proxy(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(peer: Peer) -> None:
        seen.append(await peer.read_head())
        await peer.send(ok(b"", b"Connection: close", status=b"403 Forbidden"))

    seen: list[bytes] = []
    async with serving(script) as (_, proxy):
        for name in ("no_proxy", "NO_PROXY", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with opened("http://storage.test") as service:
            with pytest.raises(PermissionDeniedError):
                await OPERATIONS[operation](service)
    assert b" http://storage.test/" in seen[0]


@each_operation
async def test_neither_plane_reaches_this_machine_through_a_proxy(
    server: GCSServer, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with opened(server.url) as service:
        with suppress(NotFoundError):
            await OPERATIONS[operation](service)


@each_operation
async def test_a_netrc_adds_nothing(
    server: GCSServer, operation: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login someone password SECRET\n")
    monkeypatch.setenv("NETRC", str(netrc))
    hook = Answering()
    server.app.hooks += (hook,)
    for settings in ({}, {"credentials": lambda: "own"}):
        async with opened(server.url, **settings) as service:
            with suppress(NotFoundError):
                await OPERATIONS[operation](service)
    assert set(hook.tokens) == {None, "Bearer own"}

"""Servers are verified unless the caller says how."""

from __future__ import annotations

import ssl
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux._http.codec import Origin
from aioflux._http.errors import CertificateError, ConnectError
from tests.http.pools import MIB, PATIENT, opening
from tests.http.scripted import Peer, echoing, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.http.authority import Authority

pytestmark = pytest.mark.asyncio


async def test_an_unknown_authority_is_rejected_and_the_remedy_is_named(
    authority: Authority,
) -> None:
    async with serving(echoing, tls=authority.server_context()) as (server, origin):
        async with opening() as pool:
            with pytest.raises(CertificateError, match=r"ssl_context=.*SSL_CERT_FILE") as caught:
                await pool.request(origin, b"GET", b"/")
            assert f"https://localhost:{origin.port}" in str(caught.value)
            assert not caught.value.request_sent
        assert not server.requests


async def test_the_default_context_is_made_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: object) -> ssl.SSLContext:
        raise AssertionError("no connection was opened yet")

    monkeypatch.setattr(ssl, "create_default_context", fail)
    monkeypatch.setenv("SSL_CERT_FILE", "no context was made for this file yet")
    for uri in ("gs://bucket", "s3://bucket", "az://account/container"):
        credentials = "anonymous" if uri.startswith("gs:") else None
        async with aioflux.open_store(uri, credentials=credentials):
            pass


async def test_pools_share_the_context_of_the_same_authorities(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the authorities of a system takes 10 to 30 ms."""
    created: list[ssl.SSLContext] = []
    create = ssl.create_default_context

    def counted(*args: Any, **options: Any) -> ssl.SSLContext:
        created.append(create(*args, **options))
        return created[-1]

    async with serving(echoing, tls=authority.server_context()) as (_, origin):
        monkeypatch.setattr(ssl, "create_default_context", counted)
        for number, name in enumerate(("first.pem", "second.pem"), 1):
            (tmp_path / name).write_bytes(authority.file.read_bytes())
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
            for _ in range(3):
                async with opening() as pool:
                    await pool.request(origin, b"GET", b"/")
            assert len(created) == number


async def test_a_replaced_file_of_authorities_is_read_again(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "later.pem"))
    async with serving(echoing, tls=authority.server_context()) as (_, origin):
        async with opening() as pool:
            with pytest.raises(CertificateError):
                await pool.request(origin, b"GET", b"/")
        (tmp_path / "later.pem").write_bytes(authority.file.read_bytes())
        async with opening() as pool:
            assert (await pool.request(origin, b"PUT", b"/", body=b"a")).body == b"a"


async def test_an_authority_may_be_passed_as_a_context(authority: Authority) -> None:
    context = authority.client_context()
    async with (
        serving(echoing, tls=authority.server_context()) as (_, origin),
        opening(ssl_context=context) as pool,
    ):
        data = bytes(3 * MIB)
        assert (await pool.request(origin, b"PUT", b"/", body=data)).body == data


async def test_an_authority_may_be_named_by_the_environment(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    async with (
        serving(echoing, tls=authority.server_context()) as (_, origin),
        opening() as pool,
    ):
        assert (await pool.request(origin, b"PUT", b"/", body=b"a")).body == b"a"


async def test_the_name_of_the_host_is_verified(authority: Authority) -> None:
    context = authority.server_context()
    async with (
        serving(echoing, tls=context, host="127.0.0.2") as (_, origin),
        opening(ssl_context=authority.client_context()) as pool,
    ):
        with pytest.raises(CertificateError, match=r"127\.0\.0\.2"):
            await pool.request(Origin("https", "127.0.0.2", origin.port), b"GET", b"/")


async def test_a_slow_connect_is_the_longest_phase_of_the_first_request(
    authority: Authority,
) -> None:
    context = authority.server_context()
    context.sni_callback = lambda *_: time.sleep(0.1)  # blocks the loop during the handshake
    timeouts = replace(PATIENT, slow_seconds=0.1)
    async with (
        serving(echoing, tls=context) as (_, origin),
        opening(timeouts=timeouts, ssl_context=authority.client_context()) as pool,
    ):
        connection = (await pool.request(origin, b"GET", b"/")).connection
        assert connection is not None
        assert (connection.slow_request, connection.longest_phase) == (1, "connecting")
        await pool.request(origin, b"GET", b"/")
        assert (connection.slow_request, connection.num_requests) == (1, 2)


async def test_a_server_without_tls_is_not_a_certificate_error() -> None:
    async def plain(peer: Peer) -> None:
        await peer.reader.read(1)
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with serving(plain) as (_, origin), opening() as pool:
        with pytest.raises(ConnectError) as caught:
            await pool.request(Origin("https", "localhost", origin.port), b"GET", b"/")
        assert not isinstance(caught.value, CertificateError)

"""The proxy of a request: named by the environment, and none for this machine."""

from __future__ import annotations

import base64
import traceback

import pytest

from aioflux._http import Origin, Pool, TransportError, open_pool, proxy_for
from tests.http.pools import PATIENT
from tests.http.scripted import Peer, answering, ok, serving

GOOGLE = Origin("https", "storage.googleapis.com", 443)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_there_is_none_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_for(GOOGLE) is None
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert proxy_for(GOOGLE) == "http://127.0.0.1:9"
    assert proxy_for(Origin("http", "storage.googleapis.com", 80)) is None
    monkeypatch.setenv("HTTPS_PROXY", "")
    assert proxy_for(GOOGLE) is None
    monkeypatch.setenv("https_proxy", "proxy.example:3128")
    assert proxy_for(GOOGLE) == "http://proxy.example:3128"


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost.", "a.localhost", "127.0.0.1", "127.9.8.7", "::1"]
)
@pytest.mark.parametrize("no_proxy", [None, "example.com"])
def test_this_machine_is_reached_without_one(
    monkeypatch: pytest.MonkeyPatch, host: str, no_proxy: str | None
) -> None:
    if no_proxy is not None:
        monkeypatch.setenv("NO_PROXY", no_proxy)
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    for scheme in ("http", "https"):
        assert proxy_for(Origin(scheme, host, 4443)) is None
        assert proxy_for(Origin(scheme, "10.0.0.1", 4443)) == "http://proxy.example:3128"
        assert proxy_for(Origin(scheme, "fe80::1", 4443)) == "http://proxy.example:3128"


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_an_empty_no_proxy_excludes_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv(name, "")
    assert proxy_for(Origin("http", "localhost", 80)) == "http://proxy.example:3128"


@pytest.mark.parametrize(
    ("no_proxy", "is_direct"),
    [
        ("googleapis.com", True),
        (".googleapis.com", True),
        ("a.example, storage.googleapis.com", True),
        ("storage.googleapis.com:443", True),
        ("*", True),
        ("storage.googleapis.com:80", False),
        ("eapis.com", False),
        ("", False),
    ],
)
def test_hosts_can_be_excluded(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, is_direct: bool
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_for(GOOGLE) is None) is is_direct


async def test_the_transport_depends_on_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_connections": 1, "timeouts": PATIENT}
    assert isinstance(open_pool(GOOGLE, **options), Pool)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert not isinstance(open_pool(GOOGLE, **options), Pool)
    assert isinstance(open_pool(Origin("https", "localhost", 1), **options), Pool)


async def test_requests_go_through_it_with_its_password_and_without_netrc(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    async def script(peer: Peer) -> None:
        server.requests.append(await peer.read_request())
        await peer.send(ok(b"by proxy"))
        await peer.wait_closed_by_client()

    netrc = tmp_path / "netrc"
    netrc.write_text("default login someone password SECRET\n")
    monkeypatch.setenv("NETRC", str(netrc))
    bucket = Origin("http", "bucket.test", 80)
    async with serving(script) as (server, proxy):
        monkeypatch.setenv("HTTP_PROXY", f"http://user:word@127.0.0.1:{proxy.port}")
        pool = open_pool(bucket, max_connections=1, timeouts=PATIENT)
        response = await pool.request(bucket, b"GET", b"/k", [(b"Authorization", b"Bearer t")])
        await pool.aclose()
    assert response.body == b"by proxy"
    head = server.requests[0][0]
    assert head.startswith(b"GET http://bucket.test/k HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"user:word") in head
    assert b"\r\nAuthorization: Bearer t\r\n" in head


async def test_an_emulator_on_this_machine_is_reached_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(answering(ok(b"direct"))) as (_, origin):
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        pool = open_pool(origin, max_connections=1, timeouts=PATIENT)
        assert (await pool.request(origin, b"GET", b"/")).body == b"direct"
        await pool.aclose()


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"HTTP/1.1 407 Who?\r\ncontent-length: 0\r\n\r\n", "the proxy returned 407 Who\\?"),
        (b"HTTP/1.1 502 Bad\r\ncontent-length: 0\r\n\r\n", "the proxy returned 502 Bad"),
        (b"nonsense\r\n\r\n", "not a valid response"),
        (None, "InvalidURL"),
    ],
)
async def test_no_error_contains_its_password(
    monkeypatch: pytest.MonkeyPatch, reply: bytes | None, says: str
) -> None:
    """Errors of aiohttp have the whole url of the proxy in their texts."""

    async def script(peer: Peer) -> None:
        assert reply is not None
        await peer.read_request()
        await peer.send(reply)

    async with serving(script) as (_, origin):
        port = "none" if reply is None else origin.port
        target = b"/a?token=planted"
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:planted@127.0.0.1:{port}")
        pool = open_pool(GOOGLE, max_connections=1, timeouts=PATIENT)
        with pytest.raises(TransportError, match=says) as error:
            await pool.request(GOOGLE, b"GET", target)
        await pool.aclose()
    assert "planted" not in "".join(traceback.format_exception(error.value))

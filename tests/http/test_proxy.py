"""The proxy of a request: named by the environment, and none for this machine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
import socket
import ssl
import traceback
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux._http import (
    CertificateError,
    ConnectError,
    ConnectionLostError,
    Origin,
    Pool,
    Proxy,
    StalledError,
    TransportError,
    open_pool,
    proxy_for,
)
from aioflux.options import Timeouts
from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Hook
from tests.faults.gateway import Gateway
from tests.http.pools import FAR_SECONDS, PATIENT, SHORT, STALL_SECONDS, opening
from tests.http.scripted import Peer, answering, echoing, ok, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aioflux._http import Response
    from aioflux.testing.gcs_server import Request
    from tests.http.authority import Authority
    from tests.http.scripted import Script

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
        ("*.googleapis.com", True),
        ("googleapis.com.", True),
        (".googleapis.com.:443", True),
        ("a.example storage.googleapis.com", True),
        ("storage.googleapis.com:80", False),
        ("eapis.com", False),
        ("*.storage.googleapis.com.example", False),
        ("storage.*.com", False),
        ("10.0.0.0/8", False),
        ("", False),
    ],
)
def test_hosts_can_be_excluded(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, is_direct: bool
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_for(GOOGLE) is None) is is_direct


@pytest.mark.parametrize(
    ("no_proxy", "host", "is_direct"),
    [
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.1.2.3/8", "10.255.0.1", True),
        ("a.example,10.0.0.0/8", "11.0.0.1", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.33", False),
        ("fd00::/8", "fd12::1", True),
        ("fd00::/8", "fe80::1", False),
        ("fd00::/8", "10.1.2.3", False),
        ("fd12::1", "fd12::1", True),
        ("[fd12::1]", "fd12::1", True),
        ("[fd12::1]:9000", "fd12::1", True),
        ("[fd12::1]:9001", "fd12::1", False),
        ("10.0.0.0/99", "10.1.2.3", False),
    ],
)
def test_addresses_can_be_excluded_one_by_one_and_by_network(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, host: str, is_direct: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_for(Origin("http", host, 9000)) is None) is is_direct


def test_the_dot_at_the_end_of_a_host_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "example.com")
    assert proxy_for(Origin("https", "bucket.example.com.", 443)) is None


def test_all_proxy_is_for_origins_without_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://all.example:3128")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    assert proxy_for(GOOGLE) == "http://all.example:3128"
    assert proxy_for(Origin("http", "a.test", 80)) == "http://proxy.example:3128"
    monkeypatch.setenv("NO_PROXY", "googleapis.com")
    assert proxy_for(GOOGLE) is None


@pytest.fixture
def no_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/missing")


@pytest.mark.usefixtures("no_endpoints")
@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("HTTPS_PROXY", "socks5://user:planted@127.0.0.1:9"),
        ("HTTPS_PROXY", "http://user:planted@127.0.0.1:none"),
        ("HTTPS_PROXY", "http://user:planted/1@127.0.0.1:9"),
        ("HTTPS_PROXY", "http://"),
        ("https_proxy", "socks5h://planted"),
        ("ALL_PROXY", "socks5://user:planted@127.0.0.1:9"),
        ("all_proxy", "socks://planted:9/"),
    ],
)
def test_what_is_no_proxy_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, scheme: str, name: str, url: str
) -> None:
    monkeypatch.setenv(name, url)
    with pytest.raises(ValueError, match=f"^{name.upper()} must be the url of a proxy") as error:
        aioflux.open_store(f"{scheme}://account/bucket", credentials="anonymous")
    assert "planted" not in "".join(traceback.format_exception(error.value))


@pytest.mark.usefixtures("no_endpoints")
@pytest.mark.parametrize(
    ("uri", "name", "value"),
    [
        ("gs://bucket", "STORAGE_EMULATOR_HOST", "https://storage.test"),
        ("s3://bucket", "AWS_ENDPOINT_URL", "https://storage.test"),
        ("az://a/b", "AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey=YQ=="),
    ],
)
def test_with_an_endpoint_of_the_environment_it_is_an_error_of_the_first_request(
    monkeypatch: pytest.MonkeyPatch, uri: str, name: str, value: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    credentials = None if name.startswith("AZURE") else "anonymous"
    with (
        aioflux.sync.open_store(uri, credentials=credentials) as store,
        pytest.raises(ValueError, match=r"^ALL_PROXY must be the url of a proxy"),
    ):
        store.head("a")


@pytest.mark.usefixtures("no_endpoints")
@pytest.mark.parametrize("uri", ["gs://bucket", "s3://bucket", "az://account/bucket"])
def test_a_store_without_a_proxy_ignores_what_is_no_proxy(
    monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    aioflux.open_store(uri, credentials="anonymous", endpoint_url=" http://127.0.0.1:9")
    aioflux.open_store("memory://bucket")
    for host in ("storage.googleapis.com", "bucket.s3.eu-central-1.amazonaws.com"):
        monkeypatch.setenv("NO_PROXY", f"{host} account.blob.core.windows.net")
        if not (uri.startswith("gs") and "amazon" in host):
            aioflux.open_store(uri, credentials="anonymous")


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
        pool = open_pool(bucket, max_idle=1, timeouts=PATIENT)
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
        pool = open_pool(origin, max_idle=1, timeouts=PATIENT)
        assert (await pool.request(origin, b"GET", b"/")).body == b"direct"
        await pool.aclose()


@contextlib.asynccontextmanager
async def proxied(
    script: Script,
    authority: Authority,
    *,
    proxy: str,
    user: str = "",
    timeouts: Timeouts = PATIENT,
    ssl_context: ssl.SSLContext | None = None,
) -> AsyncIterator[Pool]:
    """Open a pool behind a scripted proxy, which is reached over `http` or `https`."""
    tls = authority.server_context() if proxy == "https" else None
    async with serving(script, tls=tls) as (_, at):
        url = f"{proxy}://{user}localhost:{at.port}"
        async with opening(
            max_idle=1,
            timeouts=timeouts,
            ssl_context=ssl_context or authority.client_context(),
            proxy=Proxy.from_url(url),
        ) as pool:
            yield pool


def origin_behind(script: Script, authority: Authority, heads: list[bytes] | None = None) -> Script:
    """A script of a proxy that is the origin itself: after CONNECT, the script runs over TLS."""

    async def enter(peer: Peer) -> None:
        head = await peer.read_head()
        if heads is not None:
            heads.append(head)
        await peer.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await peer.writer.start_tls(authority.server_context())
        await script(peer)

    return enter


async def silent(peer: Peer) -> None:
    await peer.wait_closed_by_client()


async def dripping(peer: Peer) -> None:
    """A head without an end, of few bytes: no limit on its size ends it."""
    await peer.read_head()
    await peer.send(b"HTTP/1.1 200 OK\r\nA: ")
    while True:
        await peer.send(b"a")
        await asyncio.sleep(STALL_SECONDS / 10)


async def flooding(peer: Peer) -> None:
    """A head without an end, as fast as the client reads."""
    await peer.read_head()
    await peer.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        await peer.send(b"a: b\r\n" * 1_000)


def replying(reply: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(reply)

    return script


IMPATIENT = Timeouts(
    connect_seconds=STALL_SECONDS, progress_seconds=FAR_SECONDS, idle_seconds=FAR_SECONDS
)
USER = "user:planted@"
SIGNED = b"/k?sig=planted"
HTTP = Origin("http", "localhost", 80)
HTTPS = Origin("https", "localhost", 443)

by_each_proxy = pytest.mark.parametrize("proxy", ["http", "https"], ids="{}-proxy".format)
to_each_origin = pytest.mark.parametrize(
    "origin", [HTTP, HTTPS], ids=lambda origin: f"{origin.scheme}-origin"
)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as bound:
            bound.bind(("::1", 0))
    except OSError:
        return False
    return True


class Received(Hook):
    """The headers that a server has received."""

    def __init__(self) -> None:
        self.names: list[bytes] = []

    def before(self, request: Request) -> None:
        self.names += [name.lower() for name, _ in request.raw_headers]


@pytest.mark.parametrize("user", ["", "a%40b:pl%2Fanted@"], ids=["without-a-user", "user"])
@by_each_proxy
@pytest.mark.parametrize("origin", ["http", "https"], ids="{}-origin".format)
async def test_objects_pass_each_kind_of_proxy(
    authority, monkeypatch, caplog, proxy, origin, user
) -> None:
    caplog.set_level(logging.DEBUG)
    tls = (authority.leaf_file, authority.leaf_file) if origin == "https" else False
    context = authority.server_context() if proxy == "https" else None
    data, received = bytes(range(251)) * 12_000, Received()
    with GCSServer(buckets=["bucket"], tls=tls) as server, Gateway(tls=context) as gateway:
        server.app.hooks = (received, *server.app.hooks)
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv(f"{origin.upper()}_PROXY", gateway.url.replace("//", f"//{user}"))
        async with aioflux.open_store(
            "gs://bucket",
            endpoint_url=server.url,
            credentials=lambda: "token",
            timeouts=PATIENT,
            ssl_context=authority.client_context(),
        ) as store:
            await store.put("a", data)
            assert await store.get("a") == data
    secret = base64.b64encode(b"a@b:pl/anted")
    form = "connect" if origin == "https" else "absolute"
    assert set(gateway.num_requests) == {form}
    assert all((secret in head) is bool(user) for head in gateway.heads)
    assert all((b"Bearer token" in head) is (origin == "http") for head in gateway.heads)
    assert b"authorization" in received.names
    assert b"proxy-authorization" not in received.names
    assert secret.decode() not in caplog.text
    assert not re.search("pl.*anted", caplog.text)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@by_each_proxy
async def test_a_proxy_may_have_an_ipv6_address(authority, proxy) -> None:
    tls = authority.server_context() if proxy == "https" else None
    context = authority.client_context()
    async with serving(origin_behind(echoing, authority), tls=tls, host="::1") as (_, at):
        via = Proxy.from_url(f"{proxy}://{USER}[::1]:{at.port}")
        async with opening(ssl_context=context, proxy=via) as pool:
            assert (await pool.request(HTTPS, b"PUT", b"/", body=b"a")).body == b"a"


@by_each_proxy
@to_each_origin
@pytest.mark.parametrize(
    ("user", "credentials"),
    [("", None), ("user:word@", b"user:word"), ("a%40b:c%3Ad%2Fe@", b"a@b:c:d/e"), ("a@", b"a:")],
    ids=["without-a-user", "user", "percent-encoded", "without-a-password"],
)
async def test_only_the_proxy_receives_its_credentials(
    authority, proxy, origin, user, credentials
) -> None:
    heads: list[bytes] = []

    async def script(peer: Peer) -> None:
        for _ in range(2):
            heads.append(await peer.read_head())
            await peer.send(ok(b"a"))

    behind = origin_behind(script, authority, heads) if origin is HTTPS else script
    async with proxied(behind, authority, proxy=proxy, user=user) as pool:
        for _ in range(2):
            response = await pool.request(origin, b"GET", b"/k?l", [(b"Authorization", b"t")])
            assert response.body == b"a"
    line = b"Proxy-Authorization: Basic %b\r\n" % base64.b64encode(credentials or b"")
    if origin is HTTPS:
        connect, *rest = heads
        secret = line if credentials else b""
        assert connect == (
            b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost:443\r\n%b\r\n" % secret
        )
        assert all(head.startswith(b"GET /k?l HTTP/1.1\r\n") for head in rest)
        assert not any(b"Proxy-" in head for head in rest)
    else:
        for head in heads:
            assert head.startswith(b"GET http://localhost/k?l HTTP/1.1\r\nHost: localhost\r\n")
            assert (line in head) is (credentials is not None)


@by_each_proxy
@to_each_origin
async def test_bodies_of_any_size_pass_both_ways(authority, proxy, origin) -> None:
    behind = origin_behind(echoing, authority) if origin is HTTPS else echoing
    data = bytes(range(251)) * 12_000
    async with proxied(behind, authority, proxy=proxy) as pool:
        for size in (0, 1, 70_000, 3_000_000):
            response = await pool.request(origin, b"PUT", b"/", body=memoryview(data)[:size])
            assert bytes(response.body) == data[:size]
        assert pool.num_opened == 1


async def test_small_reads_pass_an_http_proxy_with_an_absolute_target(authority) -> None:
    async def script(peer: Peer) -> None:
        while True:
            heads.append(await peer.read_head())
            await peer.send(ok(b"a"))

    heads: list[bytes] = []
    async with proxied(script, authority, proxy="http", user="a:b@") as pool:
        await pool.request(HTTP, b"GET", b"/k")
        response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        connection = pool.start_get(HTTP, b"/k", (), response, bytes, None)
        assert (await response).body == b"a"
        assert connection is not None
        connection.release()
    assert heads[0] == heads[1]


async def test_the_tunnel_to_an_ipv6_address_has_brackets(authority) -> None:
    async def script(peer: Peer) -> None:
        heads.append(await peer.read_head())

    heads: list[bytes] = []
    async with proxied(script, authority, proxy="http") as pool:
        with pytest.raises(ConnectError, match="the proxy closed the connection"):
            await pool.request(Origin("https", "fd12::1", 443), b"GET", b"/")
    assert heads == [b"CONNECT [fd12::1]:443 HTTP/1.1\r\nHost: [fd12::1]:443\r\n\r\n"]


@by_each_proxy
@pytest.mark.parametrize("method", [b"GET", b"PUT"])
@pytest.mark.parametrize("script", [silent, dripping])
async def test_connect_seconds_cover_the_response_to_connect(
    authority, proxy, method, script
) -> None:
    async with proxied(script, authority, proxy=proxy, timeouts=IMPATIENT) as pool:
        for _ in range(2):  # the slot of the failed connection is free again
            with pytest.raises(ConnectError, match=f"the proxy .* within {STALL_SECONDS:g} s") as e:
                await pool.request(HTTPS, method, SIGNED)
            assert not e.value.request_sent
            assert "planted" not in "".join(traceback.format_exception(e.value))


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda store: store.get("a"), id="get"),
        pytest.param(lambda store: store.head("a"), id="head"),
        pytest.param(lambda store: store.delete("a"), id="delete"),
        pytest.param(lambda store: store.copy("a", "b"), id="copy"),
        pytest.param(lambda store: store.compose("c", ["a", "b"]), id="compose"),
        pytest.param(
            lambda store: store.missing_permissions(["storage.objects.get"]), id="permissions"
        ),
    ],
)
async def test_connect_seconds_cover_a_silent_proxy_in_each_operation(
    monkeypatch: pytest.MonkeyPatch, operation
) -> None:
    async with serving(silent) as (_, at), asyncio.timeout(FAR_SECONDS / 2):
        monkeypatch.setenv("HTTPS_PROXY", at.url)
        async with aioflux.open_store(
            "gs://bucket",
            credentials="anonymous",
            endpoint_url="https://storage.test",
            timeouts=IMPATIENT,
            retry=aioflux.RetryPolicy(max_attempts=1),
        ) as store:
            with pytest.raises(aioflux.TransientError):
                await operation(store)


@to_each_origin
async def test_connect_seconds_cover_the_handshake_with_the_proxy(authority, origin) -> None:
    async with serving(silent) as (_, at):
        proxy = Proxy(Origin("https", "127.0.0.1", at.port))
        async with opening(timeouts=IMPATIENT, proxy=proxy) as pool:
            with pytest.raises(ConnectError, match=f"within {STALL_SECONDS:g} s"):
                await pool.request(origin, b"GET", b"/")


@by_each_proxy
async def test_connect_seconds_cover_the_handshake_in_the_tunnel(authority, proxy) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
        await peer.wait_closed_by_client()

    async with proxied(script, authority, proxy=proxy, timeouts=IMPATIENT) as pool:
        with pytest.raises(ConnectError, match=f"within {STALL_SECONDS:g} s"):
            await pool.request(HTTPS, b"GET", b"/")


@by_each_proxy
async def test_a_silent_proxy_that_received_the_request_is_a_stall(authority, proxy) -> None:
    """A request to an http origin is sent to the proxy at once: nothing is left to connect."""
    async with proxied(silent, authority, proxy=proxy, timeouts=SHORT) as pool:
        with pytest.raises(StalledError):
            await pool.request(HTTP, b"GET", b"/")


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"HTTP/1.1 407 Who?\r\n\r\n", "the proxy returned 407 Who?"),
        (b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno", "the proxy returned 403 No"),
        (b"HTTP/1.1 502 Bad\r\n\r\n", "the proxy returned 502 Bad"),
        (b"HTTP/1.1 407 Basic dXNlcjpwbGFudGVk\r\n\r\n", "the proxy returned 407 Basic ***"),
        (b"Basic dXNlcjpwbGFudGVk\r\n\r\n", "not an HTTP/1.1 status line"),
        (b"nonsense\r\n\r\n", "not an HTTP/1.1 status line: b'nonsense'"),
        (b"HTTP/1.1 200 OK\r\n\r\nTLS", "the proxy sent bytes after its response to CONNECT"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "response head is over 65536 bytes"),
        (b"", "the proxy closed the connection"),
        (b"HTTP/1.1 200 OK\r\n", "the proxy closed the connection"),
    ],
    ids=[
        *("407", "403", "502", "credentials", "credentials-alone", "garbage"),
        *("bytes-after-200", "endless", "closed", "closed-in-head"),
    ],
)
@by_each_proxy
async def test_a_proxy_that_opens_no_tunnel_is_an_error_without_its_password(
    authority, proxy, reply, says
) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_request()
        await peer.send(reply)

    async with proxied(script, authority, proxy=proxy, user=USER) as pool:
        with pytest.raises(ConnectError, match="through the proxy") as caught:
            await pool.request(HTTPS, b"GET", SIGNED)
    assert says in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert "planted" not in shown
    assert "dXNlcjpwbGFudGVk" not in shown
    assert not isinstance(caught.value, CertificateError)


REPLIES = {
    "407": (replying(ok(status=b"407 planted Basic dXNlcjpwbGFudGVk")), aioflux.StorageError),
    "403": (
        replying(ok(b'{"error": {"message": "dXNlcjpwbGFudGVk, user:planted"}}', status=b"403 No")),
        aioflux.PermissionDeniedError,
    ),
    "502": (replying(ok(status=b"502 Bad")), aioflux.TransientError),
    "garbage": (replying(b"Basic dXNlcjpwbGFudGVk\r\n\r\n"), aioflux.TransientError),
    "flood": (flooding, aioflux.TransientError),
    "silence": (silent, aioflux.TransientError),
}
"""What a proxy does, and the error of a request that it should have forwarded to an http origin."""


@pytest.mark.parametrize("reply", REPLIES)
@by_each_proxy
@pytest.mark.parametrize("origin", ["http", "https"], ids="{}-origin".format)
async def test_a_store_raises_an_error_without_the_password(
    authority, monkeypatch, caplog, proxy, origin, reply
) -> None:
    caplog.set_level(logging.DEBUG)
    script, error_class = REPLIES[reply]
    if origin == "https":  # without a tunnel there is no connection
        is_refused = reply in {"403", "407"}
        error_class = aioflux.StorageError if is_refused else aioflux.TransientError
    tls = authority.server_context() if proxy == "https" else None
    async with serving(script, tls=tls) as (_, at), asyncio.timeout(FAR_SECONDS / 2):
        monkeypatch.setenv(f"{origin.upper()}_PROXY", f"{proxy}://{USER}localhost:{at.port}")
        monkeypatch.setenv("NO_PROXY", "")
        async with aioflux.open_store(
            "gs://bucket",
            endpoint_url=f"{origin}://storage.test",
            credentials="anonymous",
            timeouts=SHORT,
            retry=aioflux.RetryPolicy(
                max_attempts=2, initial_seconds=0.01, connect_deadline_seconds=STALL_SECONDS
            ),
            ssl_context=authority.client_context(),
        ) as store:
            with pytest.raises(error_class) as caught:
                await store.get("a")
    shown = caplog.text + "".join(traceback.format_exception(caught.value))
    assert type(caught.value) is error_class
    assert "planted" not in shown
    assert "dXNlcjpwbGFudGVk" not in shown


@pytest.mark.parametrize("uri", ["gs://bucket", "s3://bucket", "az://account/container"])
async def test_each_service_hides_a_password_that_the_server_returns(monkeypatch, uri) -> None:
    async with serving(REPLIES["garbage"][0]) as (_, at):
        monkeypatch.setenv("HTTP_PROXY", f"http://{USER}127.0.0.1:{at.port}")
        async with aioflux.open_store(
            uri,
            endpoint_url="http://storage.test",
            credentials="anonymous",
            retry=aioflux.RetryPolicy(max_attempts=1),
        ) as store:
            with pytest.raises(aioflux.TransientError, match=r"Basic \*\*\*") as caught:
                await store.get("a")
    assert "dXNlcjpwbGFudGVk" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("proxy", "origin"), [("https", HTTP), ("https", HTTPS), ("http", HTTPS)], ids=str
)
async def test_a_rejected_certificate_names_its_server(authority, proxy, origin) -> None:
    """The proxy, if it is reached over TLS; otherwise the origin."""
    nothing_trusted = ssl.create_default_context(cafile=authority.file)
    nothing_trusted.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF  # no list of revocations is known
    behind = origin_behind(echoing, authority)
    async with proxied(behind, authority, proxy=proxy, ssl_context=nothing_trusted) as pool:
        with pytest.raises(CertificateError) as caught:
            await pool.request(origin, b"GET", b"/")
    server = r"https://localhost:\d+" if proxy == "https" else r"https://localhost"
    assert re.search(rf"the certificate of {server} was rejected", str(caught.value))


async def test_bytes_in_the_tunnel_before_the_request_are_an_error(authority) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(ok(b"too soon"))
        await peer.wait_closed_by_client()

    async with proxied(origin_behind(script, authority), authority, proxy="http") as pool:
        with pytest.raises((ConnectError, ConnectionLostError)):
            await pool.request(HTTPS, b"GET", b"/")


@by_each_proxy
async def test_closing_the_pool_closes_the_tunnel_of_a_cancelled_request(authority, proxy) -> None:
    begun, closed = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.read_head()
        begun.set()
        await peer.wait_closed_by_client()
        closed.set()

    async with proxied(script, authority, proxy=proxy) as pool:
        task = asyncio.create_task(pool.request(HTTPS, b"GET", b"/"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.aclose()
        async with asyncio.timeout(FAR_SECONDS):
            await closed.wait()


CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7530\r\n" + b"v" * 30_000
"""A chunk of 30,000 bytes."""


@by_each_proxy
@to_each_origin
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(CHUNK + b"\r\ngarbage\r\n", id="invalid-framing"),
        pytest.param(CHUNK, id="end"),
        pytest.param(ok(b"v" * 40_000)[:-10_000], id="end-of-a-length"),
    ],
)
async def test_bytes_that_arrive_together_with_a_break_count(
    authority, proxy, origin, sent
) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_request()
        peer.writer.write(sent)

    memory = bytearray(40_000)
    behind = origin_behind(script, authority) if origin is HTTPS else script
    async with proxied(behind, authority, proxy=proxy) as pool:
        with pytest.raises(TransportError) as caught:
            await pool.request(origin, b"GET", b"/", into=memoryview(memory))
    assert caught.value.num_bytes_received == 30_000
    assert memory == b"v" * 30_000 + bytes(10_000)

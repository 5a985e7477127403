"""HTTPS: certificates made or given, and faults that work over it too."""

from __future__ import annotations

import http.client
import socket
import ssl

import pytest
import requests

from aioflux.testing import GCSServer
from tests.http.authority import Authority


@pytest.fixture(scope="module")
def server():
    with GCSServer(buckets=("bucket",), tls=True) as server:
        yield server


@pytest.fixture
def connection(server):
    server.faults.clear()
    context = server.client_ssl_context()
    connection = http.client.HTTPSConnection("localhost", server.port, timeout=60, context=context)
    yield connection
    connection.close()


def test_client_that_trusts_the_authority_reads(server):
    server.put("bucket", "k", b"data")
    response = requests.get(f"{server.url}/bucket/k", verify=str(server.ca_file), timeout=60)
    assert (response.content, server.url[:8]) == (b"data", "https://")


def test_client_that_does_not_is_rejected(server):
    connection = http.client.HTTPSConnection("localhost", server.port, timeout=60)
    with pytest.raises(ssl.SSLCertVerificationError):
        connection.request("GET", "/bucket/k")
    connection.close()


def test_large_bodies_go_both_ways(server, connection):
    data = bytes(range(256)) * 40_000
    connection.request("PUT", "/bucket/large", data)
    assert connection.getresponse().read() == b""
    connection.request("GET", "/bucket/large")
    assert connection.getresponse().read() == data


def test_links_say_https(connection):
    connection.request("GET", "/storage/v1/b/bucket")
    assert b'"https://localhost' in connection.getresponse().read()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"truncate_at": 5}, (http.client.IncompleteRead, ssl.SSLEOFError)),
        ({"lost": True}, (http.client.RemoteDisconnected, ssl.SSLEOFError)),
        ({"reset": True}, (ConnectionResetError, ssl.SSLEOFError)),
    ],
    ids=str,
)
def test_faults(server, connection, options, error):
    server.put("bucket", "k", b"0123456789")
    with server.faults.inject("objects.get", **options):
        connection.request("GET", "/bucket/k")
        with pytest.raises(error):
            connection.getresponse().read()


def test_a_client_that_leaves_before_its_answer_is_no_warning(server, caplog):
    """TLS knows no half-closed connection, for which a response would be kept."""
    server.put("bucket", "k", b"0123456789")
    context = server.client_ssl_context()
    with (
        server.faults.inject("objects.get", stall_at=0),
        socket.create_connection((server.host, server.port), timeout=60) as sock,
        context.wrap_socket(sock, server_hostname="localhost") as wrapped,
    ):
        wrapped.sendall(b"GET /bucket/k HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert wrapped.recv(4096).startswith(b"HTTP/1.1 200")
        wrapped.unwrap()  # returns when the server has closed its side, too
    assert not caplog.records


def test_the_certificates_pass_strict_verification(server):
    """Python 3.13 verifies strictly by default."""
    context = server.client_ssl_context()
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with (
        socket.create_connection((server.host, server.port), timeout=60) as sock,
        context.wrap_socket(sock, server_hostname="localhost") as wrapped,
    ):
        assert wrapped.version() is not None


def test_given_certificate(tmp_path):
    made = Authority(tmp_path)
    with GCSServer(tls=(made.leaf_file, made.leaf_file)) as server:
        context = made.client_context()
        with (
            socket.create_connection((server.host, server.port), timeout=60) as sock,
            context.wrap_socket(sock, server_hostname="localhost") as wrapped,
        ):
            assert wrapped.version() in ("TLSv1.2", "TLSv1.3")


def test_plain_server_has_no_authority():
    with pytest.raises(ValueError, match="tls=True"):
        _ = GCSServer().ca_file

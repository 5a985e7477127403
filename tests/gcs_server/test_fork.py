"""A forked child does not keep alive what the server of its parent has closed."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServer
from tests.servers.process import own_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


def fork_without_hooks() -> int:
    """Fork as a C library does, which runs no hook of Python."""
    return int(ctypes.PyDLL(None).fork())


@contextmanager
def child(fork: Callable[[], int] = os.fork) -> Iterator[None]:
    """Fork a process that lives on until the block ends."""
    pid = fork()
    if pid == 0:  # pragma: no cover
        while True:
            signal.pause()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_root_is_free_once_the_server_has_stopped(tmp_path):
    """A child holds no lock."""
    with GCSServer(root=tmp_path, buckets=("bucket",)) as server, child():
        server.stop()
        with GCSServer(root=tmp_path) as other:
            assert list(other.state.buckets) == ["bucket"]


def test_the_lock_is_released_although_another_process_has_its_descriptor(tmp_path):
    """A child that was forked without hooks does not hold it either."""
    with GCSServer(root=tmp_path) as server, child(fork_without_hooks):
        server.stop()
        GCSServer(root=tmp_path).state.journal.close()


def test_the_lock_outlives_a_child_that_ends(tmp_path):
    """A child that ends with the interpreter's finalizers leaves the lock to its parent."""
    server = GCSServer(root=tmp_path)
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        server.state.journal.close()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(RuntimeError, match="another server"):
        GCSServer(root=tmp_path)
    server.state.journal.close()


@pytest.mark.parametrize("fork", [os.fork, fork_without_hooks], ids=["at fork", "at close"])
def test_the_port_is_free_once_the_server_has_stopped(fork):
    """It is rejected at once, and can be bound again."""
    with GCSServer(host=own_host()) as server, child(fork):
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((server.host, server.port), timeout=60)
        with GCSServer(host=server.host, port=server.port) as other:
            assert other.port == server.port


def test_a_truncated_answer_ends_for_a_client_connected_before_the_fork(server):
    """A child holds no connection open."""
    server.put("bucket", "k", b"abcdef")
    get = b"GET /bucket/k HTTP/1.1\r\nHost: h\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=60) as sock:
        sock.sendall(get)
        assert sock.recv(1 << 16).endswith(b"abcdef")
        server.faults.add("objects.get", truncate_at=3)
        with child():
            sock.sendall(get)
            received = b""
            while data := sock.recv(1 << 16):
                received += data
    assert received.endswith(b"\r\n\r\nabc")

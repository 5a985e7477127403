"""`Network`: latency, bandwidth and limits on requests."""

from __future__ import annotations

import http.client
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Hook, Network, Request, Response
from aioflux.testing.gcs_server._delivery import Delivery, Send, Wait, steps
from aioflux.testing.gcs_server._network import PACED_BY_KERNEL, NetworkHook, TokenBucket
from tests.gcs_server.conftest import begin

SO_MAX_PACING_RATE = 47  # of Linux
MEDIA = "/storage/v1/b/bucket/o/k?alt=media"


def seconds(action) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def test_latency_comes_before_the_first_byte(server, call):
    server.network = Network(latency_seconds=0.1)
    assert seconds(lambda: call("GET", "/bucket/k")) >= 0.1


def delay(server: GCSServer, hook: NetworkHook, target: bytes) -> float:
    """Seconds for which a hook holds the response to a request up."""
    requests: list[Request] = []

    class Keeping(Hook):
        def before(self, request: Request) -> Response | None:
            requests.append(request)
            return None

    hooks, server.app.hooks = server.app.hooks, (Keeping(),)
    server.app.handle(Request("GET", target, []))
    server.app.hooks = hooks
    delivery = hook.after(requests[0], Response()).delivery
    return 0.0 if delivery is None else delivery.delay_seconds


def test_latency_of_requests_on_many_connections_passes_at_once(server):
    """Each waits for itself: all are under way before the first is answered."""
    server.network = Network(latency_seconds=1e3)
    connections = [begin(server, "GET", "/bucket/k") for _ in range(20)]
    assert server.stats.total.in_flight == 20
    for connection in connections:
        connection.close()
    hook = NetworkHook(Network(latency_seconds=0.1))
    assert [delay(server, hook, b"/bucket/k") for _ in range(20)] == [0.1] * 20


def test_spread_latency_is_decided_by_the_seed(server):
    def sample(seed: int) -> list[float]:
        hook = NetworkHook(Network(latency_seconds=0.02, latency_spread=1.5, seed=seed))
        return [delay(server, hook, b"/bucket/k") for _ in range(8)]

    assert sample(3) == sample(3) != sample(4)
    assert 0 < sum(seconds > 0.02 for seconds in sample(3)) < 8


def test_pages_of_a_listing_take_longer(server, call):
    server.network = Network(page_latency_seconds=0.3)
    assert seconds(lambda: call("GET", "/storage/v1/b/bucket/o")) >= 0.3
    hook = NetworkHook(server.network)
    assert delay(server, hook, b"/storage/v1/b/bucket/o") == 0.3
    assert delay(server, hook, b"/bucket/k") == 0


def test_bandwidth_of_a_connection():
    """4 MB at 10 MB/s: what one socket buffer takes at once leaves some room below 0.4 s."""
    network = Network(connection_bytes_per_second=10_000_000)
    with GCSServer(buckets=("bucket",), network=network) as server:
        server.put("bucket", "k", bytes(4_000_000))
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)

        def read() -> None:
            connection.request("GET", MEDIA)
            connection.getresponse().read()

        assert seconds(read) > 0.2
        server.network = Network()
        read()
        [served] = server.app.connections
        if PACED_BY_KERNEL:
            assert served.socket.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == -1
        connection.close()


def test_bandwidth_of_all_connections_together():
    """8 clients share 10 MB/s for 2 MB together."""
    with GCSServer(buckets=("bucket",), network=Network(bytes_per_second=10e6)) as server:
        server.put("bucket", "k", bytes(250_000))

        def read() -> None:
            connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
            connection.request("GET", MEDIA)
            assert len(connection.getresponse().read()) == 250_000
            connection.close()

        threads = [threading.Thread(target=read) for _ in range(8)]

        def all_of_them() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert seconds(all_of_them) > 0.18


def test_uploads_take_the_time_that_the_shared_bandwidth_allows(server, call):
    server.network = Network(bytes_per_second=10e6)
    assert seconds(lambda: call("PUT", "/bucket/k", bytes(2_000_000))) > 0.15


def test_requests_above_the_limit_are_429_with_retry_after(server, call):
    server.put("bucket", "k", b"1")
    server.network = Network(requests_per_second=0.001, request_burst=2)
    responses = [call("GET", MEDIA) for _ in range(3)]
    assert [response.status for response in responses] == [200, 200, 429]
    assert 900 < int(responses[2].headers["Retry-After"]) <= 1000
    assert b"rateLimitExceeded" in responses[2].body


def test_limited_write_commits_nothing(server, call):
    server.network = Network(requests_per_second=0.001)
    assert call("PUT", "/bucket/a", b"1").status == 200
    response = call("PUT", "/bucket/b", b"1")
    assert (response.status, server.keys("bucket")) == (429, ["a"])
    assert b"<Code>SlowDown</Code>" in response.body


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 100)), max_size=30))
def test_tokens_never_lets_more_through_than_its_rate(events):
    """Whatever the requests, what is let through up to a time is at most rate * time + burst."""
    tokens, now, taken = TokenBucket(10.0, 50.0), 0.0, 0
    for pause, amount in events:
        now += pause
        if tokens.try_acquire(amount, now) == 0:
            taken += amount
        assert taken <= 10.0 * now + 50.0 + 1e-6


@settings(max_examples=30)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30))
def test_tokens_taken_in_advance_is_paid_back(amounts):
    """Bytes taken at once have all gone after their sum less the burst, at the rate."""
    tokens = TokenBucket(100.0, 50.0)
    waits = [tokens.acquire(amount, 0.0) for amount in amounts]
    assert waits[-1] == pytest.approx(max(0.0, (sum(amounts) - 50.0) / 100.0))


def test_a_shared_link_delays_each_slice():
    asked: list[int] = []

    def link(size: int) -> float:
        asked.append(size)
        return 0.5

    plan = list(steps(100_000, Delivery(link=link)))
    assert plan == [Send(0, 0), Wait(0.5), Send(0, 65536), Wait(0.5), Send(65536, 100_000)]
    assert sum(asked) == 100_000


@pytest.mark.parametrize(
    "options",
    [{"latency_seconds": -1}, {"bytes_per_second": 0}, {"request_burst": 0}],
    ids=str,
)
def test_impossible_network_is_rejected(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Network(**options)

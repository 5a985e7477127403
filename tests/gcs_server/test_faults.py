"""`server.faults`: what a client sees of each fault, and which requests it meets."""

from __future__ import annotations

import http.client
import threading

import pytest

from aioflux.testing.gcs_server import Fault
from tests.gcs_server.conftest import begin, hush, wait_until

MEDIA = "/storage/v1/b/bucket/o/k?alt=media"


@pytest.fixture(autouse=True)
def _stored(server):
    server.put("bucket", "k", b"0123456789")


def test_status_comes_with_retry_after_and_the_body_of_the_api_that_was_called(server, call):
    server.faults.add("objects.get", status=503, retry_after=7, times=2)
    as_json, as_xml = call("GET", MEDIA), call("GET", "/bucket/k")
    assert as_json.status == as_xml.status == 503
    assert as_json.headers["Retry-After"] == as_xml.headers["Retry-After"] == "7"
    assert b'"code":503' in as_json.body
    assert b"<Code>ServiceUnavailable</Code>" in as_xml.body


def test_status_may_have_a_body_of_its_own(server, call):
    server.faults.add("objects.get", status=429, body=b"slower")
    assert call("GET", MEDIA).body == b"slower"


def test_rejected_write_commits_nothing(server, call):
    server.faults.add("objects.insert", status=500)
    assert call("PUT", "/bucket/new", b"data").status == 500
    assert server.keys("bucket") == ["k"]


def test_reset_commits_nothing(server, call):
    server.faults.add("objects.insert", reset=True)
    with pytest.raises(ConnectionResetError):
        call("PUT", "/bucket/new", b"data")
    assert server.keys("bucket") == ["k"]


@pytest.mark.parametrize(
    ("reset", "error"),
    [(False, http.client.RemoteDisconnected), (True, ConnectionResetError)],
    ids=["close", "reset"],
)
def test_lost_response_leaves_the_object_committed(server, call, reset, error):
    server.faults.add("objects.insert", lost=True, reset=reset)
    with pytest.raises(error):
        call("PUT", "/bucket/new", b"data")
    assert server.get("bucket", "new") == b"data"


def test_truncation_ends_the_body_early(server, call):
    server.faults.add("objects.media", truncate_at=4)
    with pytest.raises(http.client.IncompleteRead) as caught:
        call("GET", MEDIA)
    assert caught.value.partial == b"0123"


def test_truncation_may_end_in_a_reset(server, call):
    server.faults.add("objects.media", truncate_at=4, reset=True)
    with pytest.raises(ConnectionResetError):
        call("GET", MEDIA)


def test_flipped_byte_leaves_length_and_checksums(server, call):
    whole = call("GET", MEDIA)
    server.faults.add("objects.media", flip_at=3, times=1)
    flipped = call("GET", MEDIA)
    assert flipped.body == b"012\xcc456789"
    assert flipped.headers["x-goog-hash"] == whole.headers["x-goog-hash"]
    assert call("GET", MEDIA).body == whole.body


def test_random_flip_changes_one_byte_that_the_seed_decides(server, call):
    bodies = []
    for _ in range(2):
        with server.faults.inject("objects.media", flip_at="random", seed=5):
            bodies.append(call("GET", MEDIA).body)
    assert bodies[0] == bodies[1]
    assert sum(a != b for a, b in zip(bodies[0], b"0123456789", strict=True)) == 1


def test_stall_sends_what_comes_before_it_and_then_nothing(server):
    server.faults.add("objects.media", stall_at=4)
    connection = begin(server, "GET", MEDIA)
    response = connection.getresponse()
    assert response.read(4) == b"0123"
    hush(connection)
    with pytest.raises(TimeoutError):
        response.read(1)
    connection.close()


def test_stall_for_a_time_goes_on_afterwards(server, call):
    server.faults.add("objects.media", stall_at=4, stall_seconds=0.05)
    assert call("GET", MEDIA).body == b"0123456789"


def test_delay_comes_after_the_commit(server):
    server.faults.add("objects.insert", delay_seconds=1e3)
    connection = begin(server, "PUT", "/bucket/new", b"data")
    wait_until(lambda: bool(server.faults.injected))
    hush(connection)
    with pytest.raises(TimeoutError):
        connection.getresponse()
    assert server.get("bucket", "new") == b"data"
    connection.close()


def test_times_and_skip_count_requests(server, call):
    server.faults.add("objects.media", status=503, skip=1, times=2)
    assert [call("GET", MEDIA).status for _ in range(5)] == [200, 503, 503, 200, 200]


def test_probability_is_drawn_from_the_seed(server, call):
    draws = []
    for _ in range(2):
        with server.faults.inject("objects.media", status=503, probability=0.5, seed=1):
            draws.append([call("GET", MEDIA).status for _ in range(40)])
    assert draws[0] == draws[1]
    assert 10 < draws[0].count(503) < 30


@pytest.mark.parametrize(
    ("operation", "met"),
    [
        ("objects.get", {"json", "media", "xml"}),
        ("objects.media", {"media", "xml"}),
        ("storage.objects.get", {"json", "media"}),
        ("xml.objects.get", {"xml"}),
        ("xml.*", {"xml"}),
        ("*", {"json", "media", "xml"}),
        ("objects.insert", set()),
    ],
)
def test_operation_names_and_groups(server, call, operation, met):
    targets = {"json": "/storage/v1/b/bucket/o/k", "media": MEDIA, "xml": "/bucket/k"}
    server.faults.add(operation, status=503)
    assert {name for name, at in targets.items() if call("GET", at).status == 503} == met


def test_bucket_and_key_choose_requests(server, call):
    server.put("bucket", "other", b"")
    server.faults.add("objects.get", status=503, bucket="buck*", key="oth*")
    assert call("GET", MEDIA).status == 200
    assert call("GET", "/bucket/other").status == 503


def test_short_bodies_and_errors_are_not_disturbed_nor_counted(server, call):
    server.faults.add("objects.media", truncate_at=10)
    assert call("GET", MEDIA).body == b"0123456789"
    assert call("GET", "/bucket/missing").status == 404
    assert not server.faults.injected


def test_injected_counts_by_kind(server, call):
    server.faults.add("objects.media", status=503, times=2)
    server.faults.add("objects.media", flip_at=0, times=1)
    for _ in range(4):
        call("GET", MEDIA)
    assert server.faults.injected == {"status": 2, "flip": 1}


def test_clear_and_remove_take_faults_back(server, call):
    fault = server.faults.add("objects.media", status=503)
    server.faults.remove(fault)
    assert call("GET", MEDIA).status == 200
    server.faults.add("*", status=503)
    server.faults.clear()
    assert call("GET", MEDIA).status == 200


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"status": 503, "lost": True},
        {"status": 200},
        {"reset": True, "status": 503},
        {"retry_after": 3, "lost": True},
        {"truncate_at": -1},
        {"lost": True, "probability": 1.5},
    ],
    ids=str,
)
def test_fault_that_makes_no_sense_is_rejected(options):
    with pytest.raises(ValueError, match=r"fault|status|reset|negative|probability"):
        Fault(operation="*", **options)


def test_faults_may_change_while_requests_are_served(server):
    """Threads that add and remove faults never make a request fail in another way."""
    statuses: set[int] = set()

    def read() -> None:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        for _ in range(100):
            connection.request("GET", MEDIA)
            response = connection.getresponse()
            response.read()
            statuses.add(response.status)
        connection.close()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with server.faults.inject("objects.media", status=503):
            pass
    for thread in threads:
        thread.join()
    assert statuses <= {200, 503}


def test_fault_inside_the_running_loop_serves_others_meanwhile(server, call):
    """A stalled response holds up only its own connection."""
    with server.faults.inject("objects.media", stall_at=0, times=1):
        stalled = http.client.HTTPConnection(server.host, server.port, timeout=60)
        stalled.request("GET", MEDIA)
        assert stalled.getresponse().status == 200
        assert call("GET", MEDIA).body == b"0123456789"
        stalled.close()


@pytest.mark.parametrize("operation", ["objects.gte", "object.*", "", "storage.objects"])
def test_an_operation_that_there_is_not_is_an_error(server, operation):
    """A typo is an error at once, with the known names."""
    with pytest.raises(ValueError, match=r"no operation matches .*objects\.get"):
        server.faults.add(operation, status=503)


@pytest.mark.parametrize("operation", ["*.insert", "storage.batch", "objects.medi?"])
def test_patterns_of_operations_are_taken(server, operation):
    """A pattern is valid if it matches some operation."""
    server.faults.add(operation, status=503)


def test_a_delay_is_not_negative():
    """No response comes before it is asked for."""
    with pytest.raises(ValueError, match="delay_seconds"):
        Fault(operation="*", delay_seconds=-1)

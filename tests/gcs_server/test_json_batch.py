"""Batches: many requests of the JSON API in one."""

from __future__ import annotations

import http.client
from email.parser import BytesParser

import pytest

from aioflux.testing.gcs_server import Hook, Network, Request, Response
from aioflux.testing.gcs_server._delivery import Delivery, merge_deliveries
from aioflux.testing.gcs_server._network import NetworkHook
from tests.gcs_server.conftest import hush, wait_until

OBJECTS = "/storage/v1/b/bucket/o"


def call_batch(call, *requests: str, end: str = "\r\n", content_type: str = "application/http"):
    parts = []
    for number, request in enumerate(requests):
        head = f"--limit\nContent-Type: {content_type}\nContent-ID: <x+{number}>\n\n"
        parts.append(f"{head}{request}\n")
    body = "".join((*parts, "--limit--")).replace("\n", end)
    return call(
        "POST",
        "/batch/storage/v1",
        body.encode(),
        Content_Type='multipart/mixed; boundary="limit"',
    )


def responses(response) -> list[tuple[str, int, bytes]]:
    """Return Content-ID, status and body of each response, in order."""
    assert response.status == 200, response.body
    head = f"Content-Type: {response.headers['Content-Type']}\r\n\r\n".encode()
    found = []
    for part in BytesParser().parsebytes(head + response.body).get_payload():
        assert part.get_content_type() == "application/http"
        head, _, body = part.get_payload(decode=True).partition(b"\r\n\r\n")
        found.append((part["Content-ID"], int(head.split()[1]), body.strip()))
    return found


@pytest.mark.parametrize("end", ["\r\n", "\n"], ids=["CRLF", "LF"])
def test_each_request_is_answered_in_order(server, call, end):
    server.put("bucket", "a", b"data")
    server.put("bucket", "b", b"data")
    response = call_batch(
        call,
        f"DELETE {OBJECTS}/a HTTP/1.1\nAccept: */*\n",
        f"GET {OBJECTS}/none HTTP/1.1\n",
        f'PATCH {OBJECTS}/b HTTP/1.1\nContent-Type: application/json\n\n{{"contentType": "x/y"}}',
        f"GET {OBJECTS}/b?fields=contentType HTTP/1.1\n",
        end=end,
    )
    found = responses(response)
    assert [status for _, status, _ in found] == [204, 404, 200, 200]
    assert found[3][2] == b'{"contentType":"x/y"}'
    assert found[0][0] == "<response-x+0>"
    assert server.keys("bucket") == ["b"]


def test_a_request_may_name_a_whole_url(server, call):
    server.put("bucket", "a", b"data")
    found = responses(call_batch(call, f"DELETE {server.url}{OBJECTS}/a HTTP/1.1\n"))
    assert [status for _, status, _ in found] == [204]
    assert server.keys("bucket") == []


@pytest.mark.parametrize(
    "request_line",
    [
        "",
        "GET",
        f"GET {OBJECTS}/a?alt=media HTTP/1.1",
        "POST /upload/storage/v1/b/bucket/o HTTP/1.1",
    ],
    ids=["nothing", "no target", "download", "upload"],
)
def test_what_batches_do_not_take_is_400_within(server, call, request_line):
    server.put("bucket", "a", b"data")
    found = responses(call_batch(call, f"{request_line}\n", f"GET {OBJECTS}/a HTTP/1.1\n"))
    assert [status for _, status, _ in found] == [400, 200]


def test_a_part_that_is_no_request_is_400_within(call):
    response = call_batch(call, "GET /storage/v1/b HTTP/1.1\n", content_type="text/plain")
    assert [status for _, status, _ in responses(response)] == [400]


def test_100_requests_are_the_most(call):
    request = f"GET {OBJECTS}/none HTTP/1.1\n"
    assert len(responses(call_batch(call, *[request] * 100))) == 100
    assert call_batch(call, *[request] * 101).status == 400


def test_a_batch_of_nothing_is_400(call):
    assert call("POST", "/batch/storage/v1", b"", Content_Type="text/plain").status == 400


def test_hooks_see_the_requests_of_a_batch(server, call):
    class Watch(Hook):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def before(self, request):
            self.seen.append(request.match.operation)

        def finished(self, request, response):
            self.seen.append(f"end of {request.match.operation}")

    watch = Watch()
    server.app.hooks = (watch,)
    call_batch(call, f"DELETE {OBJECTS}/none HTTP/1.1\n")
    call("GET", "/storage/v1/b/bucket")
    assert watch.seen[:3] == [
        "storage.batch",
        "storage.objects.delete",
        "end of storage.objects.delete",
    ]


def test_a_lost_answer_loses_the_batch_from_there_on(server, call):
    """A batch is one response: a fault in one of its requests ends it, once that has committed."""
    server.put("bucket", "a", b"data")
    server.faults.add("objects.delete", lost=True)
    with pytest.raises(http.client.RemoteDisconnected):
        call_batch(call, f"DELETE {OBJECTS}/a HTTP/1.1\n")
    assert server.keys("bucket") == []
    assert server.faults.injected["lost"] == 1


def test_a_cut_within_a_batch_keeps_what_comes_before(server, call):
    """Positions of a fault count the body of the request that it meets."""
    server.put("bucket", "b", b"data")
    server.faults.add("objects.get", truncate_at=4, key="b")
    with pytest.raises(http.client.IncompleteRead) as caught:
        call_batch(call, f"GET {OBJECTS}/none HTTP/1.1\n", f"GET {OBJECTS}/b HTTP/1.1\n")
    assert b"404 Not Found" in caught.value.partial
    assert caught.value.partial.endswith(b'\r\n\r\n{"ki')


def test_a_stall_within_a_batch_stalls_it(server):
    """The responses before the stall come, the rest does not."""
    server.put("bucket", "b", b"data")
    server.faults.add("objects.get", stall_at=0)
    body = f"--x\r\nContent-Type: application/http\r\n\r\nGET {OBJECTS}/b HTTP/1.1\r\n\r\n--x--"
    headers = {"Content-Type": "multipart/mixed; boundary=x"}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.request("POST", "/batch/storage/v1", body, headers)
    wait_until(lambda: bool(server.faults.injected))
    hush(connection)
    with pytest.raises(TimeoutError):
        connection.getresponse().read()
    connection.close()


def test_the_longest_delay_within_a_batch_delays_it():
    """The requests of a batch are under way at once; of two cuts the first counts."""
    plans = [
        Delivery(delay_seconds=1, cut_at=90, stall_at=95),
        Delivery(delay_seconds=3, cut_at=50, reset=True),
    ]
    assert merge_deliveries(plans) == Delivery(delay_seconds=3, cut_at=50, reset=True)


def test_latency_counts_once_per_batch():
    """Only the batch travels."""
    hook = NetworkHook(Network(latency_seconds=60))
    request = Request("GET", b"/storage/v1/b", [])
    request.in_batch = True
    response = Response()
    assert hook.after(request, response).delivery is None

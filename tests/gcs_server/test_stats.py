"""`server.stats`: what it counts, and when."""

from __future__ import annotations

import http.client
import threading

import pytest

MEDIA = "/storage/v1/b/bucket/o/k?alt=media"


def test_requests_statuses_and_bytes_by_operation(server, call):
    call("PUT", "/bucket/k", b"12345")
    call("GET", MEDIA)
    call("GET", "/bucket/k")
    call("GET", "/bucket/missing")
    insert, xml_get = server.stats.operation("xml.objects.insert"), server.stats.operations
    assert (insert.requests, insert.bytes_in, insert.statuses) == (1, 5, {200: 1})
    assert xml_get["xml.objects.get"].statuses == {200: 1, 404: 1}
    assert server.stats.operation("objects.get").requests == 3


def test_bytes_out_are_the_bodies_sent(server, call):
    server.put("bucket", "k", bytes(1000))
    call("GET", MEDIA)
    call("GET", MEDIA, Range="bytes=0-99")
    call("HEAD", "/bucket/k")
    assert server.stats.total.bytes_out == 1100


def test_bytes_that_a_fault_cut_off_are_not_counted(server, call):
    server.put("bucket", "k", bytes(1000))
    server.faults.add("objects.media", truncate_at=10)
    with pytest.raises(http.client.IncompleteRead):
        call("GET", MEDIA)
    assert server.stats.total.bytes_out == 10


def test_lost_answers_count_as_status_0(server, call):
    server.faults.add("objects.insert", lost=True)
    with pytest.raises(http.client.RemoteDisconnected):
        call("PUT", "/bucket/k", b"1")
    assert server.stats.operation("objects.insert").statuses == {0: 1}


def test_peak_in_flight_counts_requests_that_overlap(server):
    server.put("bucket", "k", b"1")
    server.faults.add("objects.media", stall_at=0)
    connections = [http.client.HTTPConnection(server.host, server.port) for _ in range(3)]
    for connection in connections:
        connection.request("GET", MEDIA)
        connection.getresponse()
    entry = server.stats.operation("storage.objects.get")
    assert (entry.in_flight, entry.peak_in_flight) == (3, 3)
    assert server.stats.total.peak_in_flight == 3
    for connection in connections:
        connection.close()


def test_peak_of_requests_one_after_another_is_1(server, call):
    server.put("bucket", "k", b"1")
    for _ in range(5):
        call("GET", MEDIA)
    assert server.stats.total.peak_in_flight == 1


def test_open_uploads_of_both_kinds(server, call):
    call("POST", "/bucket/a?uploads")
    call("POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=b", b"{}")
    assert server.stats.open_uploads == 2


def test_connections(server, call):
    call("GET", "/bucket/k")
    call("GET", "/bucket/k")
    assert (server.stats.connections_opened, server.stats.connections_open) == (1, 1)


def test_reset_begins_anew(server, call):
    call("GET", "/bucket/k")
    server.stats.reset()
    assert server.stats.operations == {}
    assert (server.stats.total.requests, server.stats.connections_opened) == (0, 0)
    call("GET", "/bucket/k")
    assert server.stats.total.requests == 1


def test_counts_of_many_connections_are_exact(server):
    server.put("bucket", "k", bytes(100))

    def read() -> None:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        for _ in range(50):
            connection.request("GET", MEDIA)
            connection.getresponse().read()
        connection.close()

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = server.stats.total
    assert (total.requests, total.bytes_out, total.statuses) == (200, 20_000, {200: 200})


def test_requests_inside_a_batch_count_under_their_own_operation(server, call):
    server.put("bucket", "k", b"1")
    inner = "GET /storage/v1/b/bucket/o/k HTTP/1.1\r\n\r\n"
    body = f"--x\r\nContent-Type: application/http\r\n\r\n{inner}\r\n--x--\r\n".encode()
    assert call("POST", "/batch/storage/v1", body, Content_Type="multipart/mixed; boundary=x")
    entry = server.stats.operation("storage.objects.get")
    assert (entry.requests, entry.statuses, entry.in_flight) == (1, {200: 1}, 0)

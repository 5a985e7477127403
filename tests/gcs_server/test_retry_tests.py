"""The retry-test API of Google's storage-testbench, by raw requests and through Google's client.

Nothing here is peculiar to this server: the same requests run on the testbench.
"""

from __future__ import annotations

import gc
import http.client
import json

import pytest
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from tests.gcs_server.conftest import begin, hush

MEDIA = "/storage/v1/b/bucket/o/k?alt=media"
KIB = 1024


# Google's client leaves the connection of a broken download to the garbage collector.
LEAVES_SOCKETS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def order(call):
    """Post instructions; return the id of the test."""

    def post(instructions: dict[str, list[str]], **fields: str) -> str:
        body = json.dumps({"instructions": instructions, **fields}).encode()
        response = call("POST", "/retry_test", body, Content_Type="application/json")
        assert response.status == 200
        return json.loads(response.body)["id"]

    return post


@pytest.fixture
def described(call):
    def get(test_id: str) -> dict[str, object]:
        return json.loads(call("GET", f"/retry_test/{test_id}").body)

    return get


@pytest.fixture
def client(server):
    options = {"api_endpoint": server.url}
    gc.freeze()  # what is older than the client is not searched
    with storage.Client("p", AnonymousCredentials(), client_options=options) as client:
        yield client
    del client
    gc.collect()
    gc.unfreeze()


def test_instructions_are_used_up_one_by_one(server, call, order, described):
    server.put("bucket", "k", b"data")
    test_id = order({"storage.objects.get": ["return-503", "return-429"]})
    statuses = [call("GET", MEDIA, x_retry_test_id=test_id).status for _ in range(3)]
    assert statuses == [503, 429, 200]
    assert described(test_id) == {
        "id": test_id,
        "instructions": {"storage.objects.get": []},
        "completed": True,
        "transport": "HTTP",
    }


def test_only_requests_with_the_id_and_of_the_operation_are_met(server, call, order, described):
    server.put("bucket", "k", b"data")
    test_id = order({"storage.objects.get": ["return-503"]})
    assert call("GET", MEDIA).status == 200
    assert call("PUT", "/bucket/k", b"data", x_retry_test_id=test_id).status == 200
    assert described(test_id)["completed"] is False


def test_xml_requests_count_as_their_json_operation(call, order):
    test_id = order(
        {"storage.objects.insert": ["return-503"], "storage.objects.get": ["return-500"]}
    )
    assert call("PUT", "/bucket/k", b"data", x_retry_test_id=test_id).status == 503
    assert call("GET", "/bucket/k", x_retry_test_id=test_id).status == 500


def test_tests_are_listed_and_deleted(call, order):
    first, second = (order({"storage.objects.get": ["return-503"]}) for _ in range(2))
    listed = json.loads(call("GET", "/retry_tests").body)["retry_test"]
    assert {test["id"] for test in listed} == {first, second}
    assert call("DELETE", f"/retry_test/{first}").status == 200
    assert call("GET", f"/retry_test/{first}").status == 404


def test_unknown_id_is_404(call):
    assert call("GET", MEDIA, x_retry_test_id="none").status == 404


def test_grpc_tests_leave_http_alone(server, call, order):
    server.put("bucket", "k", b"data")
    test_id = order({"storage.objects.get": ["return-503"]}, transport="GRPC")
    assert call("GET", MEDIA, x_retry_test_id=test_id).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"instructions": {}},
        {"instructions": {"storage.objects.get": ["explode"]}},
        {"instructions": {"objects.dance": ["return-503"]}},
        {"instructions": {"storage.objects.get": ["return-503"]}, "transport": "SMTP"},
        {"instructions": {"storage.objects.get": ["return-199"]}},
        {"instructions": {"storage.objects.get": [5]}},
        {"instructions": {"storage.objects.get": 7}},
    ],
    ids=str,
)
def test_orders_that_make_no_sense_are_400(call, body):
    assert call("POST", "/retry_test", json.dumps(body).encode()).status == 400


def test_reset_connection(server, call, order):
    test_id = order({"storage.objects.insert": ["return-reset-connection"]})
    with pytest.raises(ConnectionResetError):
        call("PUT", "/bucket/k", b"data", x_retry_test_id=test_id)
    assert server.keys("bucket") == []


@pytest.mark.parametrize(
    ("instruction", "sent"),
    [("return-broken-stream", 4), ("return-broken-stream-after-2K", 2 * KIB)],
)
def test_broken_stream(server, call, order, instruction, sent):
    server.put("bucket", "k", bytes(4 * KIB))
    test_id = order({"storage.objects.get": [instruction]})
    with pytest.raises(http.client.IncompleteRead) as caught:
        call("GET", MEDIA, x_retry_test_id=test_id)
    assert len(caught.value.partial) == sent


def test_instruction_waits_for_a_body_that_is_long_enough(server, call, order, described):
    server.put("bucket", "k", bytes(KIB))
    test_id = order({"storage.objects.get": ["return-broken-stream-after-2K"]})
    assert len(call("GET", MEDIA, x_retry_test_id=test_id).body) == KIB
    assert described(test_id)["completed"] is False


def test_stalled_download(server, order):
    server.put("bucket", "k", bytes(4 * KIB))
    test_id = order({"storage.objects.get": ["stall-for-60s-after-2K"]})
    connection = begin(server, "GET", MEDIA, headers={"x-retry-test-id": test_id})
    response = connection.getresponse()
    assert len(response.read(2 * KIB)) == 2 * KIB
    hush(connection)
    with pytest.raises(TimeoutError):
        response.read(1)
    connection.close()


def test_stalled_upload(server, order):
    test_id = order({"storage.objects.insert": ["stall-for-60s-after-2K"]})
    connection = begin(server, "PUT", "/bucket/k", bytes(4 * KIB), {"x-retry-test-id": test_id})
    hush(connection)
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()


def test_status_after_so_much_of_a_single_upload(server, call, order):
    test_id = order({"storage.objects.insert": ["return-503-after-2K"]})
    assert call("PUT", "/bucket/small", bytes(KIB), x_retry_test_id=test_id).status == 200
    assert call("PUT", "/bucket/large", bytes(3 * KIB), x_retry_test_id=test_id).status == 503
    assert server.keys("bucket") == ["small"]


def test_status_after_so_much_of_a_resumable_upload_keeps_what_came_before(call, order):
    begun = call("POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=k", b"{}")
    session = begun.headers["Location"]
    test_id = order({"storage.objects.insert": ["return-503-after-256K"]})
    size = 1024 * KIB
    span = {"Content_Range": f"bytes 0-{size - 1}/{size}", "x_retry_test_id": test_id}
    assert call("PUT", session, bytes(size), **span).status == 503
    status = call("PUT", session, b"", Content_Range=f"bytes */{size}")
    assert (status.status, status.headers["Range"]) == (308, f"bytes=0-{256 * KIB - 1}")


def test_short_answer_to_the_end_of_a_resumable_upload(server, call, order):
    begun = call("POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=k", b"{}")
    test_id = order({"storage.objects.insert": ["return-broken-stream-final-chunk-after-8B"]})
    response = call("PUT", begun.headers["Location"], b"data", x_retry_test_id=test_id)
    assert (response.status, len(response.body)) == (200, 8)
    assert server.get("bucket", "k") == b"data"


@LEAVES_SOCKETS
def test_google_client_retries_reads(server, client, order, described):
    server.put("bucket", "k", bytes(4 * KIB))
    instructions = ["return-503", "return-reset-connection", "return-broken-stream"]
    test_id = order({"storage.objects.get": instructions})
    client._http.headers["x-retry-test-id"] = test_id
    retry = DEFAULT_RETRY.with_delay(initial=0.01, maximum=0.05)
    blob = client.bucket("bucket").blob("k")
    assert blob.download_as_bytes(retry=retry) == bytes(4 * KIB)
    assert described(test_id)["completed"] is True


@LEAVES_SOCKETS
def test_google_client_resumes_an_upload(server, client, order, described):
    test_id = order({"storage.objects.insert": ["return-503-after-256K", "return-503"]})
    client._http.headers["x-retry-test-id"] = test_id
    blob = client.bucket("bucket").blob("k", chunk_size=512 * KIB)
    data = bytes(range(256)) * (4 * KIB)
    retry = DEFAULT_RETRY.with_delay(initial=0.01, maximum=0.05)
    blob.upload_from_string(data, if_generation_match=0, retry=retry)
    assert server.get("bucket", "k") == data
    assert described(test_id)["completed"] is True


@LEAVES_SOCKETS
def test_google_client_does_not_repeat_a_write_without_precondition(client, order):
    test_id = order({"storage.objects.compose": ["return-503"]})
    client._http.headers["x-retry-test-id"] = test_id
    bucket = client.bucket("bucket")
    with pytest.raises(exceptions.ServiceUnavailable):
        bucket.blob("whole").compose([bucket.blob("a"), bucket.blob("b")])


@pytest.mark.parametrize("status", [200, 204, 299, 304, 418, 599, 999])
@pytest.mark.parametrize("target", [MEDIA, "/bucket/k"], ids=["json", "xml"])
def test_any_final_status_is_sent(server, call, order, status, target):
    """A status without a name, or of success, is a response like any other."""
    server.put("bucket", "k", b"data")
    test_id = order({"storage.objects.get": [f"return-{status}"]})
    assert call("GET", target, x_retry_test_id=test_id).status == status
    assert call("GET", target, x_retry_test_id=test_id).body == b"data"


@pytest.mark.parametrize(
    "span",
    ["bytes 0-*/524288", "bytes 0-*/*", "bytes 0-524287/*", "bytes 0-524287/524288", None],
)
def test_status_after_so_much_reads_every_content_range(server, call, order, span):
    """Ranges whose end or size is open count like others; nothing is committed."""
    begun = call("POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=k", b"{}")
    test_id = order({"storage.objects.insert": ["return-503-after-256K"]})
    headers = {"x_retry_test_id": test_id} | ({"Content_Range": span} if span else {})
    session = begun.headers["Location"]
    assert call("PUT", session, bytes(512 * KIB), **headers).status == 503
    status = call("PUT", session, b"", Content_Range="bytes */*")
    assert (status.status, status.headers["Range"]) == (308, f"bytes=0-{256 * KIB - 1}")
    assert server.keys("bucket") == []


@pytest.mark.parametrize(
    "operation",
    [
        "storage.buckets.update",
        "storage.buckets.getIamPolicy",
        "storage.buckets.lockRetentionPolicy",
        "storage.hmacKey.list",
        "storage.serviceaccount.get",
        "storage.notifications.get",
        "storage.bucket_acl.get",
    ],
)
def test_operations_of_the_testbench_are_taken_whether_served_or_not(order, described, operation):
    """A table of instructions shared with the testbench can be posted whole."""
    assert described(order({operation: ["return-503"]}))["completed"] is False


@pytest.mark.parametrize(
    ("method", "operation"), [("GET", "storage.objects.get"), ("DELETE", "storage.objects.delete")]
)
def test_stall_without_a_position_is_at_the_first_byte(server, order, method, operation):
    """Nothing of the body arrives, or no response at all if it has none."""
    server.put("bucket", "k", b"data")
    test_id = order({operation: ["stall-for-60s"]})
    connection = begin(server, method, MEDIA, headers={"x-retry-test-id": test_id})
    hush(connection)
    with pytest.raises(TimeoutError):
        connection.getresponse().read()
    connection.close()

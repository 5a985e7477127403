"""Buckets of the JSON API."""

from __future__ import annotations

import json

import pytest

PATH = "/storage/v1/b/bucket"


def read(response) -> dict:
    assert response.status == 200, response.body
    return json.loads(response.body)


def insert(call, **resource: object):
    return call("POST", "/storage/v1/b?project=p", json.dumps(resource).encode())


def reason(response) -> str:
    return json.loads(response.body)["error"]["errors"][0]["reason"]


def test_a_new_bucket_has_what_was_said_of_it(call):
    made = read(insert(call, name="new", location="eu", storageClass="NEARLINE", labels={"a": "b"}))
    assert (made["location"], made["storageClass"], made["labels"]) == (
        "EU",
        "NEARLINE",
        {"a": "b"},
    )
    assert read(call("GET", "/storage/v1/b/new")) == made


def test_a_name_is_taken_once(call):
    response = insert(call, name="bucket")
    assert (response.status, reason(response)) == (409, "conflict")


@pytest.mark.parametrize("name", ["ab", "Upper", "a" * 64, "-abc", "abc-", "a..b", "a b", "ä" * 3])
def test_a_name_that_gcs_rejects_is_400(call, name):
    response = insert(call, name=name)
    assert (response.status, reason(response)) == (400, "invalid")


@pytest.mark.parametrize("name", ["abc", "a-b_c", "0.example.com", "a" * 63])
def test_a_name_that_gcs_allows_works(call, name):
    assert insert(call, name=name).status == 200
    assert call("GET", f"/storage/v1/b/{name}").status == 200


def test_a_bucket_without_a_name_is_400(call):
    response = insert(call)
    assert (response.status, reason(response)) == (400, "required")


def test_buckets_are_listed_in_pages(server, call):
    for name in ("b1", "b2", "c1"):
        server.create_bucket(name)
    page = read(call("GET", "/storage/v1/b?project=p&maxResults=2"))
    assert [item["name"] for item in page["items"]] == ["b1", "b2"]
    token = page["nextPageToken"]
    page = read(call("GET", f"/storage/v1/b?project=p&pageToken={token}"))
    assert [item["name"] for item in page["items"]] == ["bucket", "c1"]
    assert "nextPageToken" not in page
    page = read(call("GET", "/storage/v1/b?project=p&prefix=c&fields=items/name"))
    assert page == {"items": [{"name": "c1"}]}


def test_a_patch_changes_labels(call):
    call("PATCH", PATH, b'{"labels": {"a": "1", "b": "2"}}')
    changed = read(call("PATCH", PATH, b'{"labels": {"a": null, "c": "3"}}'))
    assert changed["labels"] == {"b": "2", "c": "3"}
    assert changed["metageneration"] == "3"
    assert read(call("GET", PATH)) == changed


def test_a_patch_keeps_the_objects(server, call):
    server.put("bucket", "key", b"data")
    call("PATCH", PATH, b'{"storageClass": "NEARLINE"}')
    assert server.get("bucket", "key") == b"data"


def test_preconditions_on_a_bucket(call):
    for method in ("GET", "PATCH", "DELETE"):
        assert call(method, f"{PATH}?ifMetagenerationMatch=7").status == 412
    assert call("GET", f"{PATH}?ifMetagenerationNotMatch=1").status == 304
    assert call("DELETE", f"{PATH}?ifMetagenerationMatch=1").status == 204


def test_only_an_empty_bucket_is_deleted(server, call):
    server.put("bucket", "key", b"data")
    response = call("DELETE", PATH)
    assert (response.status, reason(response)) == (409, "conflict")
    call("DELETE", f"{PATH}/o/key")
    assert call("DELETE", PATH).status == 204
    assert call("GET", PATH).status == 404


def test_every_permission_that_is_requested_is_granted(call):
    query = "permissions=storage.objects.get&permissions=storage.objects.list"
    response = read(call("GET", f"{PATH}/iam/testPermissions?{query}"))
    assert response["permissions"] == ["storage.objects.get", "storage.objects.list"]
    assert call("GET", f"/storage/v1/b/none/iam/testPermissions?{query}").status == 404
    assert call("GET", f"{PATH}/iam/testPermissions").status == 400


def test_a_permission_that_a_test_denies_is_not_granted(server, call):
    server.state.denied_permissions.add("storage.objects.get")
    query = "permissions=storage.objects.get&permissions=storage.objects.list"
    response = read(call("GET", f"{PATH}/iam/testPermissions?{query}"))
    assert response["permissions"] == ["storage.objects.list"]
    response = read(call("GET", f"{PATH}/iam/testPermissions?permissions=storage.objects.get"))
    assert response == {"kind": "storage#testIamPermissionsResponse"}


OBJECT = f"{PATH}/o/key"
REQUESTS = {
    "get": ("GET", OBJECT, {"objects.get"}),
    "media": ("GET", f"{OBJECT}?alt=media", {"objects.get"}),
    "list": ("GET", f"{PATH}/o", {"objects.list"}),
    "insert": (
        "POST",
        f"/upload{PATH}/o?uploadType=media&name=new",
        {"objects.create"},
    ),
    "resumable": (
        "POST",
        f"/upload{PATH}/o?uploadType=resumable&name=new",
        {"objects.create"},
    ),
    "patch": ("PATCH", OBJECT, {"objects.get", "objects.update"}),
    "rewrite": (
        "POST",
        f"{OBJECT}/rewriteTo/b/bucket/o/copy",
        {"objects.get", "objects.create"},
    ),
    "delete": ("DELETE", OBJECT, {"objects.delete"}),
    "bucket": ("GET", PATH, {"buckets.get"}),
    "buckets": ("GET", "/storage/v1/b", {"buckets.list"}),
    "new bucket": ("POST", "/storage/v1/b", {"buckets.create"}),
    "xml get": ("GET", "/bucket/key", {"objects.get"}),
    "xml head": ("HEAD", "/bucket/key", {"objects.get"}),
    "xml put": ("PUT", "/bucket/new", {"objects.create"}),
    "xml delete": ("DELETE", "/bucket/key", {"objects.delete"}),
    "xml list": ("GET", "/bucket?list-type=2", {"objects.list"}),
    "xml uploads": ("GET", "/bucket?uploads", {"multipartUploads.list"}),
    "xml upload": (
        "POST",
        "/bucket/new?uploads",
        {"multipartUploads.create", "objects.create"},
    ),
    "xml abort": ("DELETE", "/bucket/key?uploadId=x", {"multipartUploads.abort"}),
}
"""Method, target and needed permissions of requests, without "storage."."""
PERMISSIONS = set().union(*(needed for _, _, needed in REQUESTS.values()))


@pytest.mark.parametrize(("method", "target", "needed"), REQUESTS.values(), ids=REQUESTS)
def test_requests_that_need_a_denied_permission_are_rejected_and_no_others(
    server, call, method, target, needed
):
    body = b"{}" if method in {"POST", "PATCH"} else None
    server.put("bucket", "key", b"data")
    for permission in PERMISSIONS:
        server.state.denied_permissions = {f"storage.{permission}"}
        response = call(method, target, body)
        assert (response.status == 403) == (permission in needed)
        server.put("bucket", "key", b"data")  # not as a request


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
def test_an_absent_bucket_is_404(call, method):
    response = call(method, "/storage/v1/b/none")
    assert (response.status, reason(response)) == (404, "notFound")


@pytest.mark.parametrize(
    "settings",
    [{"labels": 5}, {"labels": {"a": 5}}, {"storageClass": 5}, {"location": 5}],
    ids=str,
)
def test_settings_of_the_wrong_type_are_400_and_make_no_bucket(server, call, settings):
    """A rejected insert leaves nothing behind."""
    body = json.dumps({"name": "second", **settings}).encode()
    assert call("POST", "/storage/v1/b", body).status == 400
    assert list(server.state.buckets) == ["bucket"]


def test_update_replaces_all_labels(call):
    """PUT leaves no label that it does not name; the storage class stays."""
    path = "/storage/v1/b/bucket"
    body = {"labels": {"a": "1", "b": "2"}, "storageClass": "NEARLINE"}
    assert call("PATCH", path, json.dumps(body).encode()).status == 200
    response = call("PUT", path, json.dumps({"labels": {"b": "3"}}).encode())
    assert response.status == 200
    found = json.loads(response.body)
    assert (found["labels"], found["storageClass"]) == ({"b": "3"}, "NEARLINE")
    assert found["metageneration"] == "3"

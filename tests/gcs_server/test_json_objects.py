"""objects.get, patch, update and delete, and what errors look like."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest

PATH = "/storage/v1/b/bucket/o/key"
UPLOAD = "/upload/storage/v1/b/bucket/o?uploadType=media&name=key"


def read(response) -> dict:
    assert response.status == 200, response.body
    return json.loads(response.body)


def reason(response) -> str:
    return json.loads(response.body)["error"]["errors"][0]["reason"]


def patch(call, changes: dict, query: str = ""):
    return call("PATCH", PATH + query, json.dumps(changes).encode())


def test_a_resource_describes_the_object(server, call):
    generation = server.put("bucket", "a/ü", b"123456789")
    resource = read(call("GET", f"/storage/v1/b/bucket/o/{quote('a/ü', safe='')}"))
    assert resource["id"] == f"bucket/a/ü/{generation}"
    assert (resource["name"], resource["bucket"]) == ("a/ü", "bucket")
    assert (resource["generation"], resource["metageneration"]) == (str(generation), "1")
    assert (resource["size"], resource["storageClass"]) == ("9", "STANDARD")
    assert resource["crc32c"] == "4waSgw=="  # of the check value in RFC 3720
    assert resource["md5Hash"] == "JfnnlDI7RTiF9RgfG2JNCw=="
    assert resource["timeCreated"] == resource["updated"]
    assert resource["updated"].endswith("Z")


@pytest.mark.parametrize("link", ["selfLink", "mediaLink"])
def test_links_lead_back_to_the_object(server, call, link):
    server.put("bucket", "a/ü b", b"data")
    resource = read(call("GET", f"/storage/v1/b/bucket/o/{quote('a/ü b', safe='')}"))
    assert resource[link].startswith(server.url)
    response = call("GET", resource[link].removeprefix(server.url))
    if link == "mediaLink":
        assert response.body == b"data"
    else:
        assert read(response) == resource


def test_bucket_and_name_are_percent_decoded(server, call):
    server.put("bucket", "a b", b"data")
    assert read(call("GET", "/storage/v1/b/bu%63ket/o/a%20b"))["name"] == "a b"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ("name,size", {"name", "size"}),
        ("name, size", {"name", "size"}),
        ("metadata/colour", {"metadata"}),
        ("nothing", set()),
    ],
)
def test_fields_selects_what_is_sent(server, call, fields, names):
    server.put("bucket", "key", b"data")
    patch(call, {"metadata": {"colour": "red", "size": "9"}})
    resource = read(call("GET", f"{PATH}?projection=full&fields={quote(fields)}"))
    assert set(resource) == names
    if "metadata" in names:
        assert resource["metadata"] == {"colour": "red"}


@pytest.mark.parametrize("fields", ["a(b", "a)", "a(", ",a", "a,,b", "a//b", "a(b)c", "/"])
def test_malformed_fields_are_400(server, call, fields):
    server.put("bucket", "key", b"data")
    response = call("GET", f"{PATH}?fields={quote(fields)}")
    assert (response.status, reason(response)) == (400, "invalidParameter")


def test_a_patch_changes_what_it_names(server, call):
    server.put("bucket", "key", b"data")
    before = read(patch(call, {"contentType": "a/b", "metadata": {"x": "1", "y": "2"}}))
    after = read(patch(call, {"cacheControl": "no-store", "metadata": {"y": None, "z": "3"}}))
    assert after["metageneration"] == "3"
    assert after["generation"] == before["generation"]
    assert (after["contentType"], after["cacheControl"]) == ("a/b", "no-store")
    assert after["metadata"] == {"x": "1", "z": "3"}
    assert read(call("GET", PATH)) == after
    assert server.get("bucket", "key") == b"data"


def test_null_in_a_patch_removes(server, call):
    server.put("bucket", "key", b"data")
    patch(call, {"contentType": "a/b", "metadata": {"x": "1"}})
    after = read(patch(call, {"contentType": None, "metadata": None}))
    assert after.keys().isdisjoint({"contentType", "metadata"})


def test_a_patch_does_not_touch_what_cannot_be_written(server, call):
    server.put("bucket", "key", b"data")
    after = read(patch(call, {"size": "9", "name": "other", "generation": "1", "acl": []}))
    assert (after["size"], after["name"]) == ("4", "key")


def test_an_update_replaces_all_attributes(server, call):
    server.put("bucket", "key", b"data")
    patch(call, {"contentType": "a/b", "metadata": {"x": "1"}})
    after = read(call("PUT", PATH, b'{"contentLanguage": "de"}'))
    assert after["contentLanguage"] == "de"
    assert after.keys().isdisjoint({"contentType", "metadata"})
    assert (after["metageneration"], after["storageClass"]) == ("3", "STANDARD")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"metadata": 1}', b'{"metadata": {"a": 1}}'])
def test_a_patch_that_cannot_be_read_is_400(server, call, body):
    server.put("bucket", "key", b"data")
    assert call("PATCH", PATH, body).status == 400


def test_a_deleted_object_is_404(server, call):
    server.put("bucket", "key", b"data")
    response = call("DELETE", PATH)
    assert (response.status, response.body) == (204, b"")
    for method in ("GET", "DELETE", "PATCH", "PUT"):
        response = call(method, PATH)
        assert (response.status, reason(response)) == (404, "notFound")


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
def test_another_generation_is_404(server, call, method):
    generation = server.put("bucket", "key", b"data")
    assert call(method, f"{PATH}?generation={generation + 1}").status == 404
    assert call(method, f"{PATH}?generation={generation}").status in (200, 204)


CONDITIONS = ["ifGenerationMatch", "ifMetagenerationMatch"]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("method", ["GET", "PATCH", "PUT", "DELETE"])
def test_a_match_that_fails_is_412_and_changes_nothing(server, call, method, condition):
    server.put("bucket", "key", b"data")
    before = read(call("GET", PATH))
    response = call(method, f"{PATH}?{condition}=7", b"{}" if method[0] == "P" else None)
    assert (response.status, reason(response)) == (412, "conditionNotMet")
    assert read(call("GET", PATH)) == before


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("method", ["GET", "PATCH", "PUT", "DELETE"])
def test_a_match_that_holds_lets_the_request_through(server, call, method, condition):
    generation = server.put("bucket", "key", b"data")
    value = generation if condition == "ifGenerationMatch" else 1
    body = b"{}" if method[0] == "P" else None
    assert call(method, f"{PATH}?{condition}={value}", body).status in (200, 204)


@pytest.mark.parametrize(
    "condition", ["ifGenerationNotMatch", "ifMetagenerationNotMatch"], ids=["generation", "meta"]
)
def test_a_not_match_that_fails_is_304_whatever_the_method(server, call, condition):
    generation = server.put("bucket", "key", b"data")
    query = f"?{condition}={generation if condition == 'ifGenerationNotMatch' else 1}"
    response = call("GET", PATH + query)
    assert (response.status, response.body) == (304, b"")
    assert call("GET", f"{PATH}{query}&alt=media").status == 304
    assert patch(call, {}, query).status == 304
    assert call("DELETE", PATH + query).status == 304
    assert call("POST", UPLOAD + query.replace("?", "&"), b"new").status == 304
    assert server.get("bucket", "key") == b"data"
    assert server.keys("bucket") == ["key"]


def test_a_condition_that_is_no_number_is_400(server, call):
    server.put("bucket", "key", b"data")
    assert call("GET", f"{PATH}?ifGenerationMatch=x").status == 400


def test_a_patch_keeps_the_generation_for_preconditions(server, call):
    generation = server.put("bucket", "key", b"data")
    patch(call, {"contentType": "a/b"})
    assert (
        call("GET", f"{PATH}?ifMetagenerationMatch=2&ifGenerationMatch={generation}").status == 200
    )
    assert call("POST", f"{UPLOAD}&ifGenerationMatch={generation}", b"new").status == 200


@pytest.mark.parametrize("root", ["/storage/v1", "/download/storage/v1"])
def test_errors_of_a_download_are_plain_text(call, root):
    response = call("GET", f"{root}/b/bucket/o/none?alt=media")
    assert (response.status, response.body) == (404, b"No such object: bucket/none")
    assert response.headers["Content-Type"].startswith("text/html")


def test_an_error_has_code_message_and_reason(call):
    error = json.loads(call("GET", "/storage/v1/b/none/o/key").body)["error"]
    assert error["code"] == 404
    assert error["message"] == error["errors"][0]["message"]
    assert error["errors"][0]["domain"] == "global"


def test_an_unknown_path_is_404_and_an_unknown_method_405(call):
    assert call("GET", "/storage/v1/nothing").status == 404
    assert call("POST", PATH).status == 405

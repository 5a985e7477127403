"""compose, rewriteTo, copyTo and moveTo."""

from __future__ import annotations

import base64
import json
import struct

import google_crc32c
import pytest

ROOT = "/storage/v1/b/bucket/o"
MIB = 1 << 20


def post(call, path: str, body: dict | None = None):
    return call("POST", ROOT + path, None if body is None else json.dumps(body).encode())


def compose(call, sources: list, query: str = "", **body):
    rows = [source if isinstance(source, dict) else {"name": source} for source in sources]
    return post(call, f"/whole/compose{query}", {"sourceObjects": rows, **body})


def read(response) -> dict:
    assert response.status == 200, response.body
    return json.loads(response.body)


def crc32c(data: bytes) -> str:
    return base64.b64encode(struct.pack(">I", google_crc32c.value(data))).decode()


@pytest.fixture
def parts(server) -> bytes:
    pieces = {"a": b"first", "b": b"", "c": bytes(300_000), "d": b"last"}
    for name, data in pieces.items():
        server.put("bucket", name, data)
    return b"".join(pieces.values())


def test_a_composite_has_a_crc32c_and_a_count_and_no_md5(server, call, parts):
    made = read(compose(call, ["a", "b", "c", "d"]))
    assert server.get("bucket", "whole") == parts
    assert made["crc32c"] == crc32c(parts)
    assert made["componentCount"] == 4
    assert "md5Hash" not in made
    assert made["size"] == str(len(parts))


def test_components_of_composites_are_added(call, parts):
    compose(call, ["a", "d"])
    assert read(compose(call, ["whole", "a", "whole"]))["componentCount"] == 5


def test_the_destination_may_be_a_source(server, call, parts):
    server.put("bucket", "whole", b"before ")
    compose(call, ["whole", "a"])
    compose(call, ["whole", "whole"])
    assert server.get("bucket", "whole") == b"before first" * 2


def test_sources_outlive_and_do_not_bind_the_composite(server, call, parts):
    compose(call, ["a", "c"])
    for name in ("a", "c"):
        assert call("DELETE", f"{ROOT}/{name}").status == 204
    assert server.get("bucket", "whole") == b"first" + bytes(300_000)


def test_the_destination_brings_its_attributes(call, parts):
    destination = {"contentType": "x/y", "metadata": {"k": "v"}, "storageClass": "NEARLINE"}
    made = read(compose(call, ["a"], destination=destination))
    assert {name: made[name] for name in destination} == destination
    assert "contentType" not in read(compose(call, ["a"]))


def test_32_sources_are_the_most(call, parts):
    assert compose(call, ["a"] * 33).status == 400
    assert read(compose(call, ["a"] * 32))["componentCount"] == 32


@pytest.mark.parametrize("rows", [[], [{}], ["a", {"name": ""}], [{"name": 5}]])
def test_sources_that_are_not_named_are_400(server, call, rows, parts):
    assert compose(call, rows).status == 400
    assert "whole" not in server.keys("bucket")


def test_a_missing_source_is_404(server, call, parts):
    assert compose(call, ["a", "none"]).status == 404
    assert "whole" not in server.keys("bucket")


def test_a_source_may_be_bound_to_a_generation(server, call, parts):
    generation = server.put("bucket", "a", b"new")
    assert compose(call, [{"name": "a", "generation": str(generation)}]).status == 200
    assert compose(call, [{"name": "a", "generation": generation - 1}]).status == 404


def test_a_source_may_have_a_precondition(server, call, parts):
    generation = server.put("bucket", "a", b"new")
    met = {"name": "a", "objectPreconditions": {"ifGenerationMatch": str(generation)}}
    unmet = {"name": "a", "objectPreconditions": {"ifGenerationMatch": 1}}
    assert compose(call, [met]).status == 200
    assert compose(call, ["d", unmet]).status == 412


def test_compose_judges_preconditions_of_the_destination(server, call, parts):
    assert compose(call, ["a"], "?ifGenerationMatch=0").status == 200
    assert compose(call, ["d"], "?ifGenerationMatch=0").status == 412
    assert compose(call, ["d"], "?ifMetagenerationMatch=1").status == 200
    assert server.get("bucket", "whole") == b"last"


def test_compose_may_delete_its_sources(server, call, parts):
    compose(call, ["a", "a", "d"], deleteSourceObjects=True)
    assert server.keys("bucket") == ["b", "c", "whole"]


def test_a_copy_keeps_bytes_hashes_and_attributes(server, call):
    server.create_bucket("other")
    server.put("bucket", "a/ü", b"data")
    call("PATCH", f"{ROOT}/a%2F%C3%BC", b'{"contentType": "x/y", "metadata": {"k": "v"}}')
    for verb in ("copyTo", "rewriteTo"):
        response = read(post(call, f"/a%2F%C3%BC/{verb}/b/other/o/{verb}%2Fx"))
        made = response["resource"] if verb == "rewriteTo" else response
        assert (made["bucket"], made["name"]) == ("other", f"{verb}/x")
        assert (made["contentType"], made["metadata"]) == ("x/y", {"k": "v"})
        assert made["metageneration"] == "1"
        assert server.get("other", f"{verb}/x") == b"data"


def test_a_copy_without_a_resource_may_send_null(server, call):
    """As rclone does."""
    server.put("bucket", "a", b"data")
    read(call("POST", f"{ROOT}/a/rewriteTo/b/bucket/o/b", b"null"))
    assert server.get("bucket", "b") == b"data"


def test_a_copy_with_a_resource_has_its_attributes_only(server, call):
    server.put("bucket", "a", b"data")
    call("PATCH", f"{ROOT}/a", b'{"contentType": "x/y", "metadata": {"k": "v"}}')
    made = read(post(call, "/a/copyTo/b/bucket/o/b", {"cacheControl": "no-store"}))
    assert (made["cacheControl"], made["contentType"]) == ("no-store", "x/y")
    assert "metadata" not in made


def test_a_copy_onto_itself_is_a_new_generation(server, call):
    before = server.put("bucket", "a", b"data")
    made = read(post(call, "/a/rewriteTo/b/bucket/o/a", {"storageClass": "NEARLINE"}))["resource"]
    assert int(made["generation"]) > before
    assert made["storageClass"] == "NEARLINE"
    assert server.get("bucket", "a") == b"data"


def test_a_copy_of_a_composite_stays_one(call, parts):
    compose(call, ["a", "d"])
    made = read(post(call, "/whole/copyTo/b/bucket/o/copy"))
    assert made["componentCount"] == 2
    assert "md5Hash" not in made


VERBS = ["copyTo/b/bucket", "rewriteTo/b/bucket", "moveTo"]


@pytest.mark.parametrize("verb", VERBS)
def test_preconditions_of_both_sides_are_judged(server, call, verb):
    source = server.put("bucket", "a", b"new")
    target = server.put("bucket", "b", b"old")
    path = f"/a/{verb}/o/b"
    for query in (
        "ifSourceGenerationMatch=1",
        "ifSourceMetagenerationMatch=2",
        "ifGenerationMatch=0",
        "ifMetagenerationMatch=2",
    ):
        assert post(call, f"{path}?{query}").status == 412
    assert server.get("bucket", "b") == b"old"
    query = f"ifSourceGenerationMatch={source}&ifGenerationMatch={target}"
    assert post(call, f"{path}?{query}").status == 200
    assert server.get("bucket", "b") == b"new"


@pytest.mark.parametrize("verb", VERBS)
def test_a_source_that_is_absent_is_404(server, call, verb):
    assert post(call, f"/none/{verb}/o/b").status == 404


def test_a_copy_may_name_the_generation_of_its_source(server, call):
    generation = server.put("bucket", "a", b"data")
    path = "/a/rewriteTo/b/bucket/o/b?sourceGeneration="
    assert post(call, f"{path}{generation + 1}").status == 404
    assert post(call, f"{path}{generation}").status == 200


def test_a_copy_to_a_bucket_or_name_that_cannot_be_is_rejected(server, call):
    server.put("bucket", "a", b"data")
    assert post(call, "/a/copyTo/b/none/o/b").status == 404
    assert post(call, "/a/copyTo/b/bucket/o/..").status == 400


def test_a_bounded_rewrite_takes_several_calls(server, call):
    server.put("bucket", "a", bytes(2 * MIB + 5))
    path = f"/a/rewriteTo/b/bucket/o/b?maxBytesRewrittenPerCall={MIB}"
    first = read(post(call, path))
    assert (first["done"], first["totalBytesRewritten"]) == (False, str(MIB))
    assert (first["objectSize"], "resource" in first) == (str(2 * MIB + 5), False)
    second = read(post(call, f"{path}&rewriteToken={first['rewriteToken']}"))
    assert (second["done"], second["totalBytesRewritten"]) == (False, str(2 * MIB))
    assert server.keys("bucket") == ["a"]
    last = read(post(call, f"{path}&rewriteToken={second['rewriteToken']}"))
    assert (last["done"], "rewriteToken" in last) == (True, False)
    assert last["resource"]["name"] == "b"
    assert len(server.get("bucket", "b")) == 2 * MIB + 5


@pytest.mark.parametrize("bound", ["0", "-1048576", "1000", "x"])
def test_the_bound_of_a_rewrite_is_in_mib(server, call, bound):
    server.put("bucket", "a", b"data")
    assert post(call, f"/a/rewriteTo/b/bucket/o/b?maxBytesRewrittenPerCall={bound}").status == 400


def test_a_token_serves_its_own_rewrite_only(server, call):
    server.put("bucket", "a", bytes(2 * MIB))
    bound = f"maxBytesRewrittenPerCall={MIB}"
    token = read(post(call, f"/a/rewriteTo/b/bucket/o/b?{bound}"))["rewriteToken"]
    assert post(call, f"/a/rewriteTo/b/bucket/o/c?rewriteToken={token}").status == 400
    assert post(call, "/a/rewriteTo/b/bucket/o/b?rewriteToken=x").status == 400
    server.put("bucket", "a", bytes(2 * MIB))
    assert post(call, f"/a/rewriteTo/b/bucket/o/b?rewriteToken={token}").status == 400


def test_a_move_renames(server, call):
    generation = server.put("bucket", "a", b"data")
    call("PATCH", f"{ROOT}/a", b'{"contentType": "x/y"}')
    made = read(post(call, "/a/moveTo/o/dir%2Fb"))
    assert (made["name"], made["contentType"]) == ("dir/b", "x/y")
    assert int(made["generation"]) > generation
    assert server.keys("bucket") == ["dir/b"]
    assert server.get("bucket", "dir/b") == b"data"


def test_a_move_onto_itself_is_400(server, call):
    server.put("bucket", "a", b"data")
    assert post(call, "/a/moveTo/o/a").status == 400
    assert server.get("bucket", "a") == b"data"


def test_null_in_a_source_asks_nothing(server, call, parts):
    """`generation` and `objectPreconditions` may be null, as Google's client sends them."""
    source = {"name": "a", "generation": None, "objectPreconditions": {"ifGenerationMatch": None}}
    read(compose(call, [source, {"name": "d", "objectPreconditions": None}]))
    assert server.get("bucket", "whole") == b"firstlast"


@pytest.mark.parametrize(
    ("source", "body"),
    [({"objectPreconditions": [1]}, {}), ({"generation": [1]}, {}), ({}, {"destination": 5})],
    ids=str,
)
def test_what_is_no_object_or_number_in_a_composition_is_400(call, parts, source, body):
    """Values of the wrong type are the caller's error."""
    assert compose(call, [{"name": "a", **source}], **body).status == 400

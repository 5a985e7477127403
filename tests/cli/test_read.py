"""`ls`, `cat`, `stat`, `rm` and `clean`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from aioflux._services.base import WriteRequest

OBJECT_FIELDS = [
    "type",
    "uri",
    "size",
    "updated",
    "generation",
    "etag",
    "crc32c",
    "content_type",
    "content_encoding",
    "content_disposition",
    "cache_control",
    "storage_class",
    "metadata",
]
"""The fields of a JSON row, in order. Scripts depend on them."""


@pytest.fixture
def filled(bucket):
    for key in ("a", "p/b", "p/c/d", "p/c/e", "p", "q"):
        bucket.put(key, key.encode())
    return bucket


def test_ls_lists_one_level_by_key(aioflux, filled) -> None:
    ended = aioflux("ls", filled.uri)
    assert (ended.status, ended.err) == (0, "")
    assert ended.lines == [f"{filled.uri}/{key}" for key in ("a", "p", "p/", "q")]


@pytest.mark.parametrize("slash", ["", "/"])
def test_ls_of_a_prefix(aioflux, filled, slash) -> None:
    keys = ["p"] * (not slash) + ["p/b", "p/c/"]
    assert aioflux("ls", f"{filled.uri}/p{slash}").lines == [f"{filled.uri}/{key}" for key in keys]


def test_ls_saves_a_manifest_that_datasets_open(aioflux, filled) -> None:
    from aioflux import Listing

    for _ in range(2):  # the second time it is there itself, and not in the listing
        ended = aioflux("ls", f"{filled.uri}/p", "--manifest", f"{filled.uri}/p/manifest")
        assert (ended.status, ended.err) == (0, "")
        assert ended.lines == [f"{filled.uri}/p/manifest: 3 objects, 13 bytes (13 B)"]
        listing = Listing.from_bytes(filled.get("p/manifest"))
        assert [meta.key for meta in listing] == ["b", "c/d", "c/e"]
        assert listing[0].uri == f"{filled.uri}/p/b"


def test_a_manifest_lists_a_directory_too(aioflux, filled, tmp_path) -> None:
    from aioflux import Listing

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"1")
    target = tmp_path / "m"
    assert aioflux("ls", str(tmp_path / "data"), "--manifest", str(target)).status == 0
    [meta] = Listing.from_bytes(target.read_bytes())
    assert (meta.key, meta.size) == ("a", 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a", "b"], "takes one URI"),
        (["a", "-l"], "takes one URI"),
        (["a", "--json"], "takes one URI"),
    ],
)
def test_a_manifest_is_of_one_uri(aioflux, filled, arguments, says) -> None:
    uris = [f"{filled.uri}/{each}" if each.isalpha() else each for each in arguments]
    ended = aioflux("ls", *uris, "--manifest", f"{filled.uri}/m")
    assert ended.status == 2
    assert says in ended.err


@pytest.mark.parametrize(("key", "target"), [("nothing", "m"), ("p", "")])
def test_a_manifest_of_nothing_or_without_a_name_is_an_error(aioflux, filled, key, target) -> None:
    ended = aioflux("ls", f"{filled.uri}/{key}", "--manifest", f"{filled.uri}/{target}")
    assert ended.status != 0
    assert ended.err
    assert "m" not in filled.contents()


def test_ls_of_all_below(aioflux, filled) -> None:
    keys = ["p/b", "p/c/d", "p/c/e"]
    assert aioflux("ls", "-r", f"{filled.uri}/p/").lines == [f"{filled.uri}/{key}" for key in keys]


def test_a_long_listing_has_sizes_times_generations_and_a_sum(aioflux, filled) -> None:
    first, *_, total = aioflux("ls", "-l", f"{filled.uri}/p/").lines
    size, updated, generation, uri = first.split()
    assert (size, uri) == ("3", f"{filled.uri}/p/b")
    assert updated.endswith("Z")
    assert generation.isdigit()
    assert total == "1 object, 3 bytes (3 B)"


def test_ls_json_has_these_fields(aioflux, filled) -> None:
    rows = [json.loads(line) for line in aioflux("ls", "--json", f"{filled.uri}/p/").lines]
    assert [list(row) for row in rows] == [OBJECT_FIELDS, ["type", "uri"]]
    assert rows[0]["size"] == 3
    assert len(rows[0]["crc32c"]) == 8
    assert rows[1] == {"type": "prefix", "uri": f"{filled.uri}/p/c/"}


def test_ls_of_an_empty_bucket_is_empty_and_of_nothing_an_error(aioflux, bucket) -> None:
    assert aioflux("ls", bucket.uri).status == 0
    ended = aioflux("ls", f"{bucket.uri}/none")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == (
        f"Error: there is no object or prefix {bucket.uri}/none; check the spelling\n"
    )


def test_ls_of_local_paths(aioflux) -> None:
    os.makedirs("d/e")
    for name in ("d/f", "d/e/g"):
        open(name, "w").close()
    assert [line.rpartition("/here/")[2] for line in aioflux("ls", "d").lines] == ["d/e/", "d/f"]
    assert len(aioflux("ls", "-r", ".").lines) == 2


def test_cat_writes_objects_one_after_the_other(aioflux, filled) -> None:
    ended = aioflux("cat", f"{filled.uri}/p/b", f"{filled.uri}/q")
    assert (ended.status, ended.out, ended.err) == (0, "p/bq", "")


@pytest.mark.parametrize(("text", "data"), [("0-2", "p/"), ("1-", "/b"), ("1-99", "/b")])
def test_cat_of_a_range(aioflux, filled, text, data) -> None:
    assert aioflux("cat", "--range", text, f"{filled.uri}/p/b").out == data


@pytest.mark.parametrize("text", ["5-2", "x", "-5", "2-2"])
def test_cat_rejects_invalid_ranges(aioflux, filled, text) -> None:
    assert aioflux("cat", f"--range={text}", f"{filled.uri}/p/b").status == 2


def test_stat_prints_the_same_in_both_forms(aioflux, filled) -> None:
    row = json.loads(aioflux("stat", "--json", f"{filled.uri}/q").out)
    assert list(row) == OBJECT_FIELDS
    text = aioflux("stat", f"{filled.uri}/q").out
    assert row["generation"] in text
    assert row["crc32c"] in text


def test_stat_goes_on_after_one_that_is_not_there(aioflux, filled) -> None:
    ended = aioflux("stat", f"{filled.uri}/none", f"{filled.uri}/q")
    assert ended.status == 1
    assert f"{filled.uri}/none" in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out.startswith(f"{filled.uri}/q\n")


def test_rm_deletes_what_there_is_and_names_what_is_not(aioflux, filled) -> None:
    ended = aioflux("rm", f"{filled.uri}/a", f"{filled.uri}/none")
    assert ended.status == 1
    assert ended.err.splitlines() == [
        f"Error: there is no object {filled.uri}/none",
        "deleted 1 object; 1 failed",
    ]
    assert filled.keys()[0] != "a"


def test_rm_of_a_prefix_needs_r(aioflux, filled) -> None:
    assert aioflux("rm", f"{filled.uri}/p/").status == 1
    assert aioflux("rm", "-r", "--dry-run", f"{filled.uri}/p").status == 0
    assert len(filled.keys()) == 6
    assert aioflux("rm", "-r", f"{filled.uri}/p").status == 0
    assert filled.keys() == ["a", "p", "q"]


def leave_behind(bucket, command) -> None:
    import asyncio

    import aioflux

    async def leave() -> None:
        store = aioflux.open_store(bucket.uri, endpoint_url=bucket.server.url)
        async with store:
            session = store._sessions.current()
            await session.service.initiate_upload(WriteRequest("run/u"))

    asyncio.run(leave())
    bucket.put("run/.aioflux-uploads/1")
    bucket.put("aioflux-composed-objects/2")
    bucket.put("run/kept")


def test_clean_removes_left_overs_from_that_age_on(aioflux, bucket, command) -> None:
    leave_behind(bucket, command)
    for arguments in ([], ["--older-than", "1h"]):
        ended = aioflux("clean", bucket.uri, *arguments)
        assert (ended.status, ended.out) == (0, "")
        assert ended.err == "aborted 0 uploads, deleted 0 objects\n"
    plan = aioflux("clean", bucket.uri, "--older-than", "0s", "--dry-run", "--json")
    rows = [json.loads(line) for line in plan.lines]
    assert [list(row) for row in rows] == [["type", "uri", "upload_id", "initiated"]] + [
        ["type", "uri"]
    ] * 2
    assert [row["uri"].removeprefix(f"{bucket.uri}/") for row in rows] == [
        "run/u",
        "aioflux-composed-objects/2",
        "run/.aioflux-uploads/1",
    ]
    assert bucket.num_uploads() == 1
    ended = aioflux("clean", bucket.uri, "--older-than", "0s")
    assert ended.err == "aborted 1 upload, deleted 2 objects\n"
    assert (bucket.keys(), bucket.num_uploads()) == (["run/kept"], 0)


def test_clean_of_local_disk_removes_temporary_files(aioflux, tmp_path) -> None:
    old, young = (tmp_path / "here" / f".aioflux-{digit * 32}" for digit in "ab")
    for path in (old, young):
        path.write_bytes(b"1")
    day_ago = time.time() - 90_000
    os.utime(old, (day_ago, day_ago))
    assert aioflux("clean", ".").status == 0
    assert [path.exists() for path in (old, young)] == [False, True]


@pytest.mark.parametrize(
    "arguments",
    [["clean", "gs://b", "--older-than", "soon"], ["ls"], ["ls", "--nonsense"], ["nonsense"], []],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(aioflux, arguments) -> None:
    ended = aioflux(*arguments)
    assert ended.status == 2
    assert ended.err.count("\n") == bool(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "ftp://x"],
        ["ls", "gs://"],
        ["cat", "/"],
        ["stat", "gs://bucket-that-is-not/x"],
        ["ls", "--endpoint-url", "http://x", "."],
        ["cp", "/none", "gs://b/x"],
    ],
    ids=" ".join,
)
def test_a_failure_is_one_line_and_status_1(aioflux, arguments) -> None:
    ended = aioflux(*arguments)
    assert ended.status == 1
    assert ended.err.startswith("Error: ")
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()) <= 2


def test_debug_shows_the_traceback(aioflux) -> None:
    assert "Traceback" in aioflux("--debug", "ls", "ftp://x").err


@pytest.mark.parametrize("arguments", [["ls"], ["cat"], ["stat", "--json"]], ids=" ".join)
def test_one_bad_argument_does_not_stop_the_others(aioflux, filled, arguments) -> None:
    bad = [f"{filled.uri}/none", "gs://bucket-that-is-not/x", "here-is-nothing/"]
    ended = aioflux(*arguments, *bad, f"{filled.uri}/q")
    assert ended.status == 1
    assert ended.err.count("\n") == 3
    assert ended.out.startswith("q" if arguments == ["cat"] else ("gs://", '{"type"'))


def test_rm_goes_on_after_a_bad_argument(aioflux, filled) -> None:
    for option in ("--dry-run", "-r"):
        ended = aioflux("rm", option, "gs://bucket-that-is-not/x", f"{filled.uri}/q")
        assert ended.status == 1
        assert ended.err.splitlines()[-1].endswith("1 object; 1 failed")
    assert "q" not in filled.contents()


def test_an_object_whose_key_ends_in_a_slash_is_one(aioflux, bucket) -> None:
    bucket.put("p/", b"data")
    bucket.put("p/x")
    assert aioflux("cat", f"{bucket.uri}/p/").out == "data"
    assert aioflux("stat", f"{bucket.uri}/p/").out.startswith(f"{bucket.uri}/p/\n")
    assert aioflux("rm", f"{bucket.uri}/p/").err == "deleted 1 object\n"
    assert bucket.keys() == ["p/x"]
    assert aioflux("rm", f"{bucket.uri}/p/").status == 1


def test_links_are_read_wherever_they_lead(aioflux, tmp_path) -> None:
    (tmp_path / "blob").write_bytes(b"data")
    Path("out").symlink_to(tmp_path / "blob")
    uri = f"file://{tmp_path}/here/out"
    assert aioflux("cat", "out").out == "data"
    assert aioflux("stat", "out").lines[0] == uri
    assert json.loads(aioflux("stat", "--json", "out").out)["size"] == 4
    assert aioflux("ls", "out").lines == [uri]


@pytest.mark.parametrize("options", [[], ["-r"]], ids=str)
def test_rm_of_a_link_deletes_the_link(aioflux, tmp_path, options) -> None:
    (tmp_path / "blob").write_bytes(b"data")
    for name, goal in (("out", tmp_path / "blob"), ("dangling", "nowhere")):
        Path(name).symlink_to(goal)
        assert aioflux("rm", *options, "--dry-run", name).status == 0
        assert Path(name).is_symlink()
        assert aioflux("rm", *options, name).err == "deleted 1 object\n"
        assert not Path(name).is_symlink()
    assert (tmp_path / "blob").exists()


@pytest.mark.parametrize("slash", ["", "/"])
def test_rm_does_not_follow_a_link_to_a_directory(aioflux, tmp_path, slash) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "k").touch()
    Path("lnk").symlink_to(tmp_path / "real")
    ended = aioflux("rm", "-r", f"lnk{slash}")
    assert ended.status == 1
    assert "link to a directory" in ended.err
    assert (tmp_path / "real" / "k").exists()
    assert aioflux("rm", "lnk").status == 0
    assert (tmp_path / "real" / "k").exists()
    assert not Path("lnk").is_symlink()


@pytest.mark.parametrize("name", ["/", "//", "/.", "file:///", "~", "~/..", "~/../home/"])
def test_rm_rejects_the_root_and_the_home(aioflux, tmp_path, monkeypatch, name) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "k").touch()
    monkeypatch.setenv("HOME", str(home))
    # A dry run: if it is not rejected, nothing is lost.
    ended = aioflux("rm", "-r", "--dry-run", name.replace("~", str(home)))
    assert (ended.status, ended.out) == (1, "")
    assert "root, your home directory or" in ended.err
    (home / "d").mkdir()
    (home / "d" / "k").touch()
    assert aioflux("rm", "-r", home / "d").status == 0


@pytest.mark.parametrize("command", ["ls", "clean", "rm"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_a_directory_that_is_not_there_is_a_failure(aioflux, command, slash) -> None:
    ended = aioflux(command, *(["-r"] if command == "rm" else []), f"none{slash}")
    assert ended.status == 1
    assert "none" in ended.err


def test_the_version_is_printed(aioflux) -> None:
    import aioflux as library

    ended = aioflux("--version")
    assert (ended.status, ended.out) == (0, f"aioflux {library.__version__}\n")


def test_a_name_that_is_not_utf_8_is_an_error(aioflux, bucket) -> None:
    ended = aioflux("stat", f"{bucket.uri}/\udcff")
    assert ended.status == 1
    assert "is not valid UTF-8" in ended.err
    assert "codec" not in ended.err


def test_an_object_whose_key_ends_in_a_slash_is_copied_by_itself(aioflux, bucket) -> None:
    bucket.put("p/", b"data")
    for target in ("out", "-"):
        assert aioflux("cp", f"{bucket.uri}/p/", target).status == 0
    assert Path("out").read_bytes() == b"data"
    assert aioflux("cp", f"{bucket.uri}/p/", f"{bucket.uri}/q").status == 0
    assert bucket.get("q") == b"data"
    ended = aioflux("cp", f"{bucket.uri}/none/", "out")
    assert ended.status == 1
    assert "use -r to copy what is below" in ended.err


def test_a_uri_in_json_is_text_and_names_the_object_again(aioflux) -> None:
    name = os.fsdecode(b"caf\xe9 %41")
    Path("d", name).parent.mkdir()
    Path("d", name).write_bytes(b"data")
    [row] = [json.loads(line) for line in aioflux("ls", "--json", "d").lines]
    assert row["uri"].endswith("/d/caf%E9 %2541")
    assert aioflux("cat", row["uri"]).out == "data"

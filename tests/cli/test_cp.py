"""`aioflux cp`: names of copies, and names that are rejected."""

from __future__ import annotations

import gzip
import json
import os
import urllib.request
from pathlib import Path

import pytest

from tests.cli.conftest import read_files, write_files

MIB = 1024 * 1024
TREE = {"a": b"1", "d/b": b"2", "d/e/c": b"", "z.txt": b"4" * 1000}


def fill(bucket, prefix: str = "") -> None:
    for key, data in TREE.items():
        bucket.put(prefix + key, data)


@pytest.mark.parametrize("slash", ["", "/"], ids=["plain", "slash"])
@pytest.mark.parametrize("end", ["", "/"], ids=["plain", "slash"])
def test_r_copies_what_is_below_whatever_the_slashes(aioflux, bucket, slash, end) -> None:
    write_files(Path("src"), TREE)
    assert aioflux("cp", "-r", f"src{slash}", f"{bucket.uri}/p{end}").status == 0
    assert bucket.contents() == {f"p/{key}": data for key, data in TREE.items()}
    ended = aioflux("cp", "-r", f"{bucket.uri}/p{slash}", f"out{end}")
    assert ended.err.startswith("copied 4 objects, 1002 B in ")
    assert ended.out == ""
    assert read_files(Path("out")) == TREE


def test_r_copies_a_whole_bucket(aioflux, bucket) -> None:
    fill(bucket)
    assert aioflux("cp", "-r", bucket.uri, "out").status == 0
    assert read_files(Path("out")) == TREE


@pytest.mark.parametrize(
    ("target", "key"), [("", "z.txt"), ("/", "z.txt"), ("/d/", "d/z.txt"), ("/d", "d")]
)
def test_one_file_keeps_its_name_in_a_directory_only(aioflux, bucket, target, key) -> None:
    write_files(Path(), TREE)
    assert aioflux("cp", "z.txt", bucket.uri + target).status == 0
    assert bucket.contents() == {key: TREE["z.txt"]}


@pytest.mark.parametrize(
    ("target", "path"), [("new", "new"), ("new/", "new/z.txt"), ("d", "d/z.txt"), (".", "z.txt")]
)
def test_one_object_to_disk(aioflux, bucket, target, path) -> None:
    fill(bucket)
    Path("d").mkdir()
    assert aioflux("cp", f"{bucket.uri}/z.txt", target).status == 0
    assert read_files(Path()) == {path: TREE["z.txt"]}


def test_several_sources_need_a_directory(aioflux, bucket) -> None:
    write_files(Path(), TREE)
    assert aioflux("cp", "a", "z.txt", f"{bucket.uri}/x").status == 2
    assert aioflux("cp", "a", "z.txt", f"{bucket.uri}/x/").status == 0
    assert bucket.keys() == ["x/a", "x/z.txt"]


def test_two_sources_of_one_name_do_not_replace_each_other(aioflux, bucket) -> None:
    write_files(Path(), {"d/a": b"1", "e/a": b"2"})
    ended = aioflux("cp", "d/a", "e/a", f"{bucket.uri}/")
    assert ended.status == 1
    assert "d/a has the same name there" in ended.err
    assert bucket.contents() == {"a": b"1"}


def test_between_buckets_metadata_goes_along(aioflux, bucket, cli_server) -> None:
    import aioflux as library

    with library.sync.open_store(bucket.uri, endpoint_url=cli_server.url) as store:
        attributes = {"content_type": "image/png", "cache_control": "no-store"}
        store.put("a", b"1", metadata={"k": "v"}, **attributes)
    cli_server.create_bucket(f"{bucket.name}-2")
    for target in (f"{bucket.uri}/b", f"{bucket.uri}-2/b"):
        assert aioflux("cp", f"{bucket.uri}/a", target).status == 0
        row = json.loads(aioflux("stat", "--json", target).out)
        assert (row["content_type"], row["metadata"]) == ("image/png", {"k": "v"})
        assert row["cache_control"] == "no-store"


def test_a_compressed_object_keeps_its_content_encoding(aioflux, bucket, cli_server) -> None:
    """A copy to disk has the stored bytes."""
    url = f"{cli_server.url}/upload/storage/v1/b/{bucket.name}/o?uploadType=media&name=a"
    with urllib.request.urlopen(f"{url}&contentEncoding=gzip", data=gzip.compress(b"1")):
        pass
    cli_server.create_bucket(f"{bucket.name}-2")
    for target in (f"{bucket.uri}/b", f"{bucket.uri}-2/b"):
        assert aioflux("cp", f"{bucket.uri}/a", target).status == 0
        assert json.loads(aioflux("stat", "--json", target).out)["content_encoding"] == "gzip"
        assert aioflux("cp", target, "a").status == 0
        assert gzip.decompress(Path("a").read_bytes()) == b"1"


@pytest.mark.parametrize("command", ["cp", "sync"])
def test_options_give_attributes_to_all_written_objects(aioflux, bucket, command) -> None:
    words = "--content-type text/x --cache-control max-age=1 --storage-class COLDLINE --metadata"
    options = [*words.split(), "a=b=c", "--metadata", "k=v"]
    write_files(Path("src"), {"x.json": b"1"})
    recursive = ["-r"] if command == "cp" else []
    assert aioflux(command, *options, *recursive, "src", f"{bucket.uri}/p").status == 0
    row = json.loads(aioflux("stat", "--json", f"{bucket.uri}/p/x.json").out)
    expected = {"content_type": "text/x", "cache_control": "max-age=1", "storage_class": "COLDLINE"}
    assert {name: row[name] for name in expected} == expected
    assert row["metadata"] == {"a": "b=c", "k": "v"}
    ended = aioflux(command, *options, *recursive, f"{bucket.uri}/p", "out")
    assert ended.status == 2
    assert "TARGET is none" in ended.err
    assert "NAME=VALUE, not '=v'" in aioflux("cp", "--metadata", "=v", "src", bucket.uri).err


def test_a_copy_within_a_bucket_can_have_other_attributes(aioflux, bucket) -> None:
    write_files(Path(), {"a.json": b"1"})
    aioflux("cp", "--cache-control", "no-store", "a.json", f"{bucket.uri}/")
    arguments = ["--content-type", "text/x", f"{bucket.uri}/a.json", f"{bucket.uri}/b"]
    assert aioflux("cp", *arguments).status == 0
    row = json.loads(aioflux("stat", "--json", f"{bucket.uri}/b").out)
    assert (row["content_type"], row["cache_control"]) == ("text/x", "no-store")


def test_attributes_go_along_although_listings_of_s3_lack_them(
    aioflux, bucket, moto, monkeypatch
) -> None:
    attributes = {"ContentType": "image/png", "CacheControl": "no-store", "Metadata": {"k": "v"}}
    moto.door().put_object(Bucket="bucket", Key="attributes/a", Body=b"1", **attributes)
    moto.sign_in(monkeypatch)
    assert aioflux("cp", "-r", "s3://bucket/attributes", f"{bucket.uri}/d").status == 0
    row = json.loads(aioflux("stat", "--json", f"{bucket.uri}/d/a").out)
    assert (row["content_type"], row["cache_control"]) == ("image/png", "no-store")
    assert row["metadata"] == {"k": "v"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.json", "application/json"), ("a.txt.gz", "application/octet-stream")],
)
def test_the_media_type_is_that_of_the_name(aioflux, bucket, name, kind) -> None:
    write_files(Path(), {name: b"1"})
    aioflux("cp", name, f"{bucket.uri}/")
    assert json.loads(aioflux("stat", "--json", f"{bucket.uri}/{name}").out)["content_type"] == kind


def test_a_dry_run_prints_and_copies_nothing(aioflux, bucket) -> None:
    fill(bucket)
    ended = aioflux("cp", "-r", "--dry-run", bucket.uri, "out")
    assert (ended.status, ended.err) == (0, "would copy 4 objects, 1002 B\n")
    assert ended.lines == [f"would copy {bucket.uri}/{key} to out/{key}" for key in sorted(TREE)]
    assert not Path("out").exists()


def test_a_dry_run_counts_what_the_real_run_counts(aioflux, bucket) -> None:
    """Of objects and files that exist, too, with -n."""
    write_files(Path("src"), TREE)
    bucket.put("p/d/b")
    bucket.put("p/d/", b"")
    for source, target in (("src", f"{bucket.uri}/p"), (f"{bucket.uri}/p", "src")):
        plan = aioflux("cp", "-rn", "--dry-run", source, target)
        done = aioflux("cp", "-rn", source, target)
        assert (plan.status, done.status) == (0, 0)
        planned = plan.err.strip().removeprefix("would copy ")
        objects, _, skipped = planned.rpartition(", ")
        last = done.err.splitlines()[-1]
        assert last.startswith(f"copied {objects} in ")
        assert f", {skipped}" in last
        assert len(plan.lines) == int(objects.split()[0])
        assert "skipped" in skipped


@pytest.mark.parametrize("size", [10, 17 * MIB], ids=["small", "large"])
def test_no_clobber_leaves_what_exists(aioflux, bucket, size) -> None:
    bucket.put("k", b"old")
    write_files(Path(), {"k": b"n" * size, "old": b"old"})
    ended = aioflux("cp", "-n", "k", f"{bucket.uri}/k")
    assert (ended.status, bucket.get("k")) == (0, b"old")
    assert "copied 0 objects" in ended.err
    assert "1 skipped" in ended.err
    bucket.put("big", b"n" * size)
    assert aioflux("cp", "-n", f"{bucket.uri}/big", "old").status == 0
    assert Path("old").read_bytes() == b"old"
    assert aioflux("cp", f"{bucket.uri}/big", "old").status == 0
    assert Path("old").stat().st_size == size


def test_a_key_never_leaves_the_target_directory(aioflux, bucket, tmp_path) -> None:
    for key in ("p/../../x", "p/..", "p//etc/y", "p//abs", "p/ok", "p/./z"):
        bucket.put(key, b"evil")
    ended = aioflux("cp", "-r", f"{bucket.uri}/p", "out")
    assert ended.status == 1
    assert read_files(tmp_path) == {"here/out/ok": b"evil"}
    assert len(ended.err.splitlines()) == 6
    assert f"{bucket.uri}/p/../../x" in ended.err


@pytest.mark.parametrize("size", [4, 17 * MIB], ids=["small", "large"])
def test_a_link_in_the_target_leads_nothing_out_of_it(aioflux, bucket, tmp_path, size) -> None:
    """The target itself may be one: it is what the user named."""
    for key in ("sub/x", "sub/deep/x", "sub/made/", "d/up/x", "d/ok", "link"):
        bucket.put(f"p/{key}", b"" if key.endswith("/") else b"e" * size)
    write_files(tmp_path, {"out/deep/old": b"", "out/old": b"", "real/d/old": b""})
    os.symlink(tmp_path / "out", tmp_path / "real" / "sub")
    os.symlink("../../out", tmp_path / "real" / "d" / "up")
    os.symlink(tmp_path / "out" / "old", tmp_path / "real" / "link")
    os.symlink(tmp_path / "real", "target")
    ended = aioflux("cp", "-r", f"{bucket.uri}/p", "target")
    assert ended.status == 1
    assert ended.err.count(": it is a link, which may lead out of the target directory") == 4
    assert sorted(read_files(tmp_path / "out")) == ["deep/old", "old"]
    assert not Path("../out/made").exists()
    assert Path("target/d/ok").stat().st_size == size
    assert Path("target/link").stat().st_size == size
    assert not Path("target/link").is_symlink()


@pytest.mark.parametrize(("mode", "size"), [(0o600, 4), (0o666, 4), (0o400, 17 * MIB)])
def test_a_file_that_is_replaced_keeps_its_mode(aioflux, bucket, mode, size) -> None:
    bucket.put("k", b"n" * size)
    Path("k").write_bytes(b"private")
    Path("k").chmod(mode)
    assert aioflux("cp", f"{bucket.uri}/k", "k").status == 0
    assert (Path("k").stat().st_mode & 0o7777, Path("k").stat().st_size) == (mode, size)


def test_a_new_file_has_the_mode_that_any_other_has(aioflux, bucket) -> None:
    bucket.put("k")
    Path("other").touch()
    assert aioflux("cp", f"{bucket.uri}/k", "k").status == 0
    assert Path("k").stat().st_mode == Path("other").stat().st_mode


def test_only_writes_under_way_are_left_out(aioflux, bucket) -> None:
    kept = {".aioflux-mine": b"1", ".aioflux-d/a": b"2", "d/.aioflux-lock-x": b"3", "z": b"4"}
    name = f".aioflux-{'0a' * 16}"
    write_files(Path("src"), kept | {name: b"", f"d/{name}": b"", f".aioflux-lock-{name[9:]}": b""})
    assert aioflux("cp", "-r", "src", bucket.uri).status == 0
    assert bucket.contents() == kept
    ended = aioflux("cp", "-r", "src", "out")
    assert ended.status == 1
    assert [path for path in kept if f"cannot copy src/{path} to" in ended.err] == list(kept)[:3]
    assert read_files(Path("out")) == {"z": b"4"}


def test_a_file_and_a_directory_of_one_name(aioflux, bucket) -> None:
    for key in ("a", "a-", "a/b", "a/c", "b"):
        bucket.put(key, key.encode())
    ended = aioflux("cp", "-r", bucket.uri, "out")
    assert ended.status == 1
    assert read_files(Path("out")) == {"a": b"a", "a-": b"a-", "b": b"b"}
    first, *_, last = ended.err.splitlines()
    assert f"{bucket.uri}/a/b" in first
    assert f"{bucket.uri}/a is a file" in first
    assert last.endswith("; 2 failed")


def test_a_key_that_is_not_written_does_not_clash(aioflux, bucket) -> None:
    for key in ("odd/..", "odd/../x", "odd/.aioflux-x", "odd/.aioflux-x/y", "odd/z"):
        bucket.put(key)
    ended = aioflux("cp", "-r", bucket.uri, "out")
    assert (ended.status, len(ended.err.splitlines())) == (1, 5)
    assert "is a file" not in ended.err
    assert ended.err.count("'..' would leave the directory") == 2
    assert read_files(Path("out")) == {"odd/z": b"data"}


def test_a_directory_on_disk_in_the_place_of_a_file(aioflux, bucket) -> None:
    fill(bucket)
    write_files(Path("out"), {"a/old": b"", "d": b""})
    ended = aioflux("cp", "-r", bucket.uri, "out")
    assert ended.status == 1
    assert read_files(Path("out")) == {"a/old": b"", "d": b"", "z.txt": TREE["z.txt"]}
    assert "it is a directory where this object needs a file" in ended.err
    assert "it is a file where this object needs a directory" in ended.err


def test_markers_become_directories(aioflux, bucket) -> None:
    bucket.put("d/", b"")
    bucket.put("d/e/", b"")
    bucket.put("f/", b"not empty")
    ended = aioflux("cp", "-r", bucket.uri, "out")
    assert ended.status == 1
    assert Path("out/d/e").is_dir()
    assert "out/f/" in ended.err
    assert ended.err.count("\n") == 2


def test_r_does_not_copy_an_object_with_the_name_of_the_prefix(aioflux, bucket) -> None:
    bucket.put("f/", b"not empty")
    bucket.put("f/x")
    ended = aioflux("cp", "-r", f"{bucket.uri}/f", "out")
    assert (ended.status, list(read_files(Path("out")))) == (1, ["x"])
    assert "copy it to another name, without -r" in ended.err
    for target in ("g", "here/"):
        assert aioflux("cp", f"{bucket.uri}/f/", target).status == 0
    assert aioflux("cp", f"{bucket.uri}/f/", f"{bucket.uri}/g").status == 0
    assert Path("g").read_bytes() == Path("here/f").read_bytes() == bucket.get("g") == b"not empty"


def test_many_failures_are_ten_lines_and_a_count(aioflux, bucket) -> None:
    for at in range(25):
        bucket.put(f"x//{at}")
    bucket.put("x/ok")
    ended = aioflux("cp", "-r", f"{bucket.uri}/x", "out")
    lines = ended.err.splitlines()
    assert (ended.status, len(lines)) == (1, 12)
    assert lines[10] == "and 15 more failures"
    assert lines[11].endswith("; 25 failed")


def test_links_and_pipes_are_reported_and_not_followed(aioflux, bucket) -> None:
    write_files(Path("src"), {"a": b"1", "d/b": b"2"})
    os.symlink("a", "src/link")
    os.symlink("..", "src/d/up")
    os.symlink("none", "src/dangling")
    os.mkfifo("src/pipe")
    ended = aioflux("cp", "-r", "src", bucket.uri)
    assert ended.status == 1
    assert bucket.contents() == {"a": b"1", "d/b": b"2", "link": b"1"}
    assert len(ended.err.splitlines()) == 4
    assert "src/d/up: it is a link to a directory" in ended.err


def test_a_device_is_not_replaced(aioflux, bucket) -> None:
    fill(bucket)
    os.mkfifo("pipe")
    assert aioflux("cp", f"{bucket.uri}/a", "pipe").status == 1
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(
    ("source", "target"),
    [("{b}/p", "{b}/p"), ("{b}/p/", "{b}/p/q"), ("{b}", "{b}/q"), ("src", "src/x"), ("src", "src")],
)
def test_nothing_is_copied_into_itself(aioflux, bucket, source, target) -> None:
    fill(bucket, "p/")
    write_files(Path("src"), TREE)
    ended = aioflux("cp", "-r", source.format(b=bucket.uri), target.format(b=bucket.uri))
    assert ended.status == 1
    assert "into itself" in ended.err
    assert read_files(Path()) == {f"src/{key}": data for key, data in TREE.items()}


@pytest.mark.parametrize("target", ["{t}/q", "{t}"], ids=["prefix", "root"])
@pytest.mark.parametrize("is_local", [True, False], ids=["disk", "bucket"])
def test_sources_are_not_overwritten(aioflux, bucket, is_local, target) -> None:
    """The source is below the target: some names there are names of the source."""
    own = "ov/" if target.endswith("q") else "q/ov/"
    top = "q/" if target.endswith("q") else ""
    contents = {f"q/ov/{key}": key.encode() for key in (f"{own}x", f"{own}y", "x", "y", "ovz/x")}
    if is_local:
        write_files(Path("t"), contents)
    for key, data in contents.items():
        bucket.put(key, data)
    tree = "t" if is_local else bucket.uri
    ended = aioflux("cp", "-r", f"{tree}/q/ov", target.format(t=tree))
    assert ended.status == 1
    assert ended.err.count(f"the target is below {tree}/q/ov, which is being copied") == 2
    copied = {f"{top}{key}": key.encode() for key in ("x", "y", "ovz/x")}
    assert (read_files(Path("t")) if is_local else bucket.contents()) == contents | copied


@pytest.mark.parametrize("name", ["{b}/a", "a"])
def test_one_object_is_not_copied_onto_itself(aioflux, bucket, name) -> None:
    fill(bucket)
    write_files(Path(), TREE)
    name = name.format(b=bucket.uri)
    ended = aioflux("cp", name, name)
    assert ended.status == 1
    assert "are the same" in ended.err


def test_nothing_below_is_an_error_and_makes_no_directory(aioflux, bucket) -> None:
    Path("src").mkdir()
    assert aioflux("cp", "-r", f"{bucket.uri}/none", "out").status == 1
    assert aioflux("cp", "-r", "src", "out").status == 1
    assert not Path("out").exists()


def test_a_directory_needs_r(aioflux, bucket) -> None:
    Path("src").mkdir()
    fill(bucket, "p/")
    bucket.put("marker/", b"")
    for source in ("src", f"{bucket.uri}/p/", f"{bucket.uri}/marker/", bucket.uri):
        ended = aioflux("cp", source, "out")
        assert ended.status == 1
        assert "use -r to copy what is below" in ended.err


def test_large_and_small_objects_both_ways(aioflux, bucket) -> None:
    contents = {f"{at:03}": bytes([at % 256]) * (at * 100) for at in range(200)}
    contents["big"] = os.urandom(17 * MIB)
    contents["other/big"] = os.urandom(17 * MIB)
    write_files(Path("src"), contents)
    assert aioflux("cp", "-r", "src", bucket.uri).status == 0
    assert bucket.contents() == contents
    assert bucket.num_uploads() == 0
    assert aioflux("cp", "-r", bucket.uri, "out").status == 0
    assert read_files(Path("out")) == contents
    assert aioflux("cp", "-r", "out", "again").status == 0
    assert read_files(Path("again")) == contents


def test_a_name_that_the_disk_rejects_is_reported(aioflux, bucket) -> None:
    fill(bucket)
    bucket.put("x" * 300)
    ended = aioflux("cp", "-r", bucket.uri, "out")
    assert ended.status == 1
    assert "File name too long" in ended.err
    assert ended.err.count("\n") == 2
    assert read_files(Path("out")) == TREE


def test_r_of_one_file_or_object_copies_it(aioflux, bucket) -> None:
    fill(bucket)
    write_files(Path(), {"f": b"1"})
    assert aioflux("cp", "-r", f"{bucket.uri}/z.txt", "out").status == 0
    assert read_files(Path("out")) == {"z.txt": TREE["z.txt"]}
    assert aioflux("cp", "-r", "f", f"{bucket.uri}/new").status == 0
    assert bucket.get("new/f") == b"1"
    assert aioflux("rm", "-r", f"{bucket.uri}/z.txt").status == 0
    ended = aioflux("cp", "-r", bucket.uri, "f")
    assert (ended.status, ended.err) == (1, "Error: f is a file; -r needs a directory\n")


def test_help_lists_errors_and_lost_metadata(aioflux) -> None:
    text = " ".join(aioflux("cp", "--help").out.split())
    assert "links to directories, which are not followed; files that are not regular" in text
    assert "do not keep content language and storage class" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["-r", "a", "b", "c"],
        ["-r", "-", "c"],
        ["-", "-", "c/"],
        ["-r", "a", "-"],
        ["a"],
        ["-", "c/"],
        ["a", "-", "."],
    ],
    ids=" ".join,
)
def test_wrong_usage_of_cp(aioflux, arguments) -> None:
    ended = aioflux("cp", *arguments)
    assert ended.status == 2
    assert ended.err.count("\n") == 1

"""`aioflux sync`: what it copies, deletes and keeps."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from typing import TYPE_CHECKING
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioflux.store import ObjectWriter, Store
from tests.cli.conftest import FAR_SECONDS, PROGRAM, Bucket, read_files, write_files
from tests.cli.test_process import slow
from tests.servers.clouds import open_bucket

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1024 * 1024
TREE = {"a": b"1", "d/b": b"22", "d/e/c": b"", "z.txt": b"4" * 1000}


def copied(ended) -> tuple[int, int, int]:
    """Return the numbers of copied, deleted and unchanged objects in the summary."""
    line = ended.err.splitlines()[-1].replace(",", "").replace("to delete", "deleted")
    words = line.split()
    at = words.index("deleted")
    start = words.index("copied" if "copied" in words else "copy")
    return int(words[start + 1]), int(words[at - 1]), int(words[at + 1])


@pytest.fixture
def sides(bucket, cli_server, tmp_path) -> Callable[[str], tuple[Side, Side]]:
    """Return a function that makes an empty source and target: `up`, `down`, `across`, `disk`."""

    def make(direction: str) -> tuple[Side, Side]:
        kinds = {"up": "db", "down": "bd", "across": "bb", "disk": "dd"}[direction]
        return tuple(
            DiskSide(tmp_path / uuid.uuid4().hex) if kind == "d" else BucketSide(Bucket(cli_server))
            for kind in kinds
        )

    return make


class DiskSide:
    """A local directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)
        root.mkdir()

    def put(self, name: str, data: bytes) -> None:
        write_files(self.root, {name: data})

    def delete(self, name: str) -> None:
        (self.root / name).unlink()

    def contents(self) -> dict[str, bytes]:
        return read_files(self.root)

    def num_names(self) -> int:
        return len(os.listdir(self.root))


class BucketSide:
    """A prefix of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.uri = f"{bucket.uri}/p"

    def put(self, name: str, data: bytes) -> None:
        self.bucket.put(f"p/{name}", data)

    def delete(self, name: str) -> None:
        url = f"{self.bucket.server.url}/storage/v1/b/{self.bucket.name}/o/"
        request = Request(url + quote(f"p/{name}", safe=""), method="DELETE")
        with urlopen(request):
            pass

    def contents(self) -> dict[str, bytes]:
        return {key[2:]: data for key, data in self.bucket.contents().items() if key[:2] == "p/"}

    def num_names(self) -> int:
        return len(self.bucket.keys())


Side = DiskSide | BucketSide
DIRECTIONS = ["up", "down", "across", "disk"]


def fill(side: Side, tree: dict[str, bytes]) -> None:
    for name, data in tree.items():
        side.put(name, data)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_second_run_copies_nothing_and_a_third_what_changed(aioflux, sides, direction) -> None:
    source, target = sides(direction)
    fill(source, TREE)
    ended = aioflux("sync", source.uri, target.uri)
    assert (ended.status, copied(ended)) == (0, (4, 0, 0))
    assert target.contents() == TREE
    assert copied(aioflux("sync", source.uri, target.uri)) == (0, 0, 4)
    source.put("d/b", b"33")  # the same size
    source.put("new", b"n")
    assert copied(aioflux("sync", source.uri, target.uri)) == (2, 0, 3)
    assert target.contents() == source.contents()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_delete_and_dry_run(aioflux, sides, direction) -> None:
    source, target = sides(direction)
    fill(source, TREE)
    fill(target, {"a": b"old", "gone/x": b"x", "kept.log": b"k"})
    before = target.contents()
    words = ("sync", "--delete", "--exclude", "*.log", source.uri, target.uri)
    plan = aioflux(*words, "--dry-run")
    assert (plan.status, target.contents()) == (3, before)
    assert [line.split()[1] for line in plan.lines] == ["copy"] * 4 + ["delete"]
    assert plan.lines[-1].endswith("gone/x")
    ended = aioflux(*words)
    assert (ended.status, copied(ended)) == (0, (4, 1, 0))
    assert target.contents() == TREE | {"kept.log": b"k"}
    again = aioflux(*words, "--dry-run")
    assert (again.status, again.out) == (0, "")
    if isinstance(target, DiskSide):
        assert not (target.root / "gone").exists()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_checksums_find_what_sizes_and_times_hide(aioflux, sides, direction) -> None:
    source, target = sides(direction)
    fill(source, TREE)
    assert aioflux("sync", source.uri, target.uri).status == 0
    disk = source if isinstance(source, DiskSide) else target
    file = disk.root / "d/b"
    times = os.stat(file).st_mtime_ns
    file.write_bytes(b"99")
    os.utime(file, ns=(times, times))
    # The clock of the attributes shows the change of a source; a target has only its time.
    expected = 1 if direction == "up" else 0
    assert copied(aioflux("sync", "--dry-run", source.uri, target.uri))[0] == expected
    assert copied(aioflux("sync", "--checksum", source.uri, target.uri)) == (1, 0, 3)
    assert target.contents() == source.contents()


def test_checksums_spare_files_with_other_times(aioflux, sides) -> None:
    source, target = sides("down")
    fill(source, TREE)
    fill(target, TREE)
    assert copied(aioflux("sync", "--dry-run", source.uri, target.uri))[0] == 4
    assert copied(aioflux("sync", "--checksum", source.uri, target.uri)) == (0, 0, 4)
    assert copied(aioflux("sync", source.uri, target.uri)) == (0, 0, 4)  # the times are set


def test_what_was_downloaded_is_not_uploaded_again(aioflux, sides) -> None:
    source, target = sides("down")
    fill(source, TREE)
    aioflux("sync", source.uri, target.uri)
    target.put("a", b"2")
    assert copied(aioflux("sync", target.uri, source.uri)) == (1, 0, 3)
    assert source.contents() == TREE | {"a": b"2"}


def test_an_older_file_of_the_same_size_is_uploaded(aioflux, sides, tmp_path) -> None:
    """Its attributes were changed later: it was moved over the other one."""
    source, target = sides("up")
    fill(source, TREE)
    aioflux("sync", source.uri, target.uri)
    (tmp_path / "old").write_bytes(b"9")
    os.utime(tmp_path / "old", (1, 1))
    shutil.move(tmp_path / "old", source.root / "a")
    assert copied(aioflux("sync", source.uri, target.uri)) == (1, 0, 3)
    assert target.contents()["a"] == b"9"


def test_a_file_in_place_of_a_directory_and_the_reverse(aioflux, sides) -> None:
    source, target = sides("down")
    fill(source, {"a": b"1", "b/c/d": b"2"})
    fill(target, {"a/x": b"3", "a/y/z": b"4", "b": b"5"})
    ended = aioflux("sync", source.uri, target.uri)
    assert ended.status == 1
    assert target.contents() == {"a/x": b"3", "a/y/z": b"4", "b": b"5"}
    assert aioflux("sync", "--delete", source.uri, target.uri).status == 0
    assert target.contents() == source.contents()


def test_an_empty_directory_in_place_of_a_file(aioflux, sides) -> None:
    source, target = sides("down")
    fill(source, {"a": b"1"})
    (target.root / "a/b/c").mkdir(parents=True)
    assert aioflux("sync", source.uri, target.uri).status == 1
    assert aioflux("sync", "--delete", source.uri, target.uri).status == 0
    assert target.contents() == source.contents()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"d": b"1", "d/x": b"22"}, "below SOURCE: d/x"),  # one of the two cannot be copied
        ({"d": b"1", "d/x": b"2", "z/../y": b"3"}, "was not deleted"),
        ({"a/../b": b"1", "z": b"3"}, "'..' would leave"),
        ({"d": b"1", "z": b"large"}, "it is not deleted"),
    ],
)
def test_nothing_in_the_way_is_deleted_before_an_error(
    aioflux, sides, cli_server, names, message
) -> None:
    source, target = sides("down")
    fill(source, names)
    kept = {"a": b"precious", "d/x": b"22", "d/y": b"mine"}
    fill(target, kept)
    name = source.bucket.name
    with cli_server.faults.inject("objects.media", bucket=name, key="p/z", status=403):
        ended = aioflux("sync", "--delete", source.uri, target.uri)
    assert (ended.status, message in ended.err) == (1, True), ended.err
    assert target.contents().items() >= kept.items()


def test_the_directory_of_a_marker_is_kept(aioflux, sides) -> None:
    source, target = sides("down")
    fill(source, {"m/": b"", "z": b"1"})
    fill(target, {"m/extra": b"1"})
    for _ in range(2):
        assert aioflux("sync", "--delete", source.uri, target.uri).status == 0
        assert (target.root / "m").is_dir()
    assert target.contents() == {"z": b"1"}


@pytest.mark.parametrize("size", [4, 17 * MIB])
@pytest.mark.parametrize("num_changes", [1, 3])
def test_a_change_after_the_read_is_copied(aioflux, sides, monkeypatch, size, num_changes) -> None:
    """The object is written after the change, and so looks newer than the file."""
    source, target = sides("up")
    fill(source, {"a": b"0" * size})
    left = list(range(num_changes))
    owner, name = (Store, "put") if size == 4 else (ObjectWriter, "aclose")
    put = getattr(owner, name)

    async def put_and_change(self, *arguments: object, **options: object) -> object:
        if left:
            fill(source, {"a": b"%d" % (1 + left.pop(0)) * size})
        return await put(self, *arguments, **options)

    monkeypatch.setattr(owner, name, put_and_change)
    ended = aioflux("sync", source.uri, target.uri)
    if num_changes == 3:
        assert (ended.status, "changed while it was copied" in ended.err) == (1, True)
        return
    assert ended.status == 0
    assert target.contents() == source.contents()
    assert copied(aioflux("sync", source.uri, target.uri)) == (0, 0, 1)


def test_checksums_set_no_times_beyond_links(aioflux, sides, tmp_path) -> None:
    source, target = sides("down")
    fill(source, {"a": b"1"})
    (tmp_path / "other").write_bytes(b"1")
    os.utime(tmp_path / "other", (1, 1))
    (target.root / "a").symlink_to(tmp_path / "other")
    assert copied(aioflux("sync", "--checksum", source.uri, target.uri)) == (0, 0, 1)
    assert (tmp_path / "other").stat().st_mtime == 1


def test_a_malformed_filter_is_wrong_usage(aioflux, sides) -> None:
    source, target = sides("up")
    ended = aioflux("sync", "--include", "[", source.uri, target.uri)
    assert (ended.status, "'[' is not a pattern" in ended.err) == (2, True)


def test_filters_that_admit_nothing_are_named(aioflux, sides) -> None:
    source, target = sides("up")
    fill(source, {"a": b"1"})
    ended = aioflux("sync", "--delete", "--exclude", "a", source.uri, target.uri)
    assert (ended.status, "no file that --include" in ended.err) == (1, True)


def test_nothing_is_deleted_if_a_listing_failed(aioflux, sides, cli_server) -> None:
    for direction, denied in (("down", 0), ("up", 1), ("across", 0), ("across", 1)):
        both = sides(direction)
        fill(both[0], TREE)
        fill(both[1], {"extra": b"1"})
        with cli_server.faults.inject("objects.list", bucket=both[denied].bucket.name, status=403):
            ended = aioflux("sync", "--delete", both[0].uri, both[1].uri)
        assert ended.status == 1
        assert both[1].contents() == {"extra": b"1"}


def test_nothing_is_deleted_if_a_name_cannot_be_copied(aioflux, sides) -> None:
    source, target = sides("up")
    fill(source, TREE)
    fill(target, {"extra": b"1"})
    os.mkfifo(source.root / "pipe")
    (source.root / "link").symlink_to(source.root / "d")
    ended = aioflux("sync", "--delete", source.uri, target.uri)
    assert ended.status == 1
    assert "what only TARGET has was not deleted" in ended.err
    assert target.contents() == TREE | {"extra": b"1"}
    words = ("--exclude", "pipe", "--exclude", "link")
    assert aioflux("sync", "--delete", *words, source.uri, target.uri).status == 0
    assert target.contents() == TREE


def test_a_prefix_without_objects_deletes_nothing(aioflux, sides) -> None:
    source, target = sides("down")
    fill(target, TREE)
    ended = aioflux("sync", "--delete", source.uri, target.uri)
    assert ended.status == 1
    assert "there is no object below" in ended.err
    assert target.contents() == TREE


@pytest.mark.parametrize("direction", ["up", "down"])
def test_delete_does_not_delete_the_source(aioflux, sides, direction) -> None:
    """A source below the target is not in the source's listing, and would be what is left."""
    side = sides(direction)[0]
    fill(side, TREE)
    ended = aioflux("sync", "--delete", f"{side.uri}/d", side.uri)
    assert (ended.status, "would delete" in ended.err) == (1, True)
    assert side.contents() == TREE
    assert aioflux("sync", f"{side.uri}/d", side.uri).status == 0
    assert side.contents() == TREE | {"b": b"22", "e/c": b""}


def test_an_object_is_no_prefix(aioflux, bucket, tmp_path) -> None:
    bucket.put("p")
    write_files(tmp_path / "out", {"a": b"1"})
    ended = aioflux("sync", "--delete", f"{bucket.uri}/p", tmp_path / "out")
    assert (ended.status, "is an object, not a prefix" in ended.err) == (1, True)
    assert read_files(tmp_path / "out") == {"a": b"1"}


def test_an_empty_directory_deletes_nothing(aioflux, sides) -> None:
    """It is probably a disk that is not mounted."""
    source, target = sides("up")
    fill(target, TREE)
    ended = aioflux("sync", "--delete", source.uri, target.uri)
    assert ended.status == 1
    assert "there is no file below" in ended.err
    assert target.contents() == TREE
    assert copied(aioflux("sync", source.uri, target.uri)) == (0, 0, 0)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_nothing_is_deleted_after_a_copy_that_failed(aioflux, sides, cli_server, direction) -> None:
    source, target = sides(direction)
    fill(source, {"new": b"1"})
    fill(target, {"old": b"1"})
    bucket = (target if direction == "up" else source).bucket.name
    operation = "objects.insert" if direction == "up" else "objects.media"
    with cli_server.faults.inject(operation, bucket=bucket, status=403):
        ended = aioflux("sync", "--delete", source.uri, target.uri)
    assert ended.status == 1
    assert "was not deleted" in ended.err
    assert target.contents() == {"old": b"1"}
    assert copied(aioflux("sync", "--delete", source.uri, target.uri)) == (1, 1, 0)


def test_a_change_of_metadata_hides_no_change_of_the_file(aioflux, sides, cli_server) -> None:
    source, target = sides("up")
    fill(source, {"a": b"one"})
    assert copied(aioflux("sync", source.uri, target.uri)) == (1, 0, 0)
    fill(source, {"a": b"two"})
    url = f"{cli_server.url}/storage/v1/b/{target.bucket.name}/o/p%2Fa"
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(url, b'{"metadata":{"k":"v"}}', headers, method="PATCH")):
        pass
    assert copied(aioflux("sync", source.uri, target.uri)) == (1, 0, 0)
    assert target.contents() == {"a": b"two"}


def test_an_object_that_changes_meanwhile_is_not_deleted(aioflux, sides, cli_server) -> None:
    source, target = sides("across")
    fill(source, {"a": b"1"})
    fill(target, {"extra": b"1", "more": b"2"})
    with cli_server.faults.inject("objects.delete", bucket=target.bucket.name, status=412, times=1):
        ended = aioflux("sync", "--delete", source.uri, target.uri)
    assert ended.status == 1
    assert len(target.contents()) == 2  # and the other one is deleted


def test_a_sync_into_itself_is_rejected(aioflux, sides) -> None:
    source, _ = sides("across")
    fill(source, TREE)
    assert "into itself" in aioflux("sync", source.uri, f"{source.uri}/d").err
    assert "is not a directory" in aioflux("sync", "none", source.uri).err


@pytest.mark.parametrize("direction", ["up", "down"])
def test_after_a_kill_the_next_run_goes_on(environment, cli_server, sides, direction) -> None:
    source, target = sides(direction)
    tree = {f"{number:03}": os.urandom(200_000) for number in range(200)}
    fill(source, tree)
    program = [*PROGRAM, "sync", source.uri, target.uri]
    with slow(cli_server, 20 * MIB):
        process = subprocess.Popen(program, env=environment, stderr=subprocess.DEVNULL)
        while target.num_names() < 40:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(FAR_SECONDS)
    arrived = {name: data for name, data in target.contents().items() if ".aioflux-" not in name}
    assert arrived == {name: tree[name] for name in arrived}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    words = ended.stderr.replace(",", "").split()
    assert int(words[words.index("unchanged") - 1]) >= len(arrived) - 4
    assert tree == {name: data for name, data in target.contents().items() if name in tree}


NAMES = st.sampled_from(["a", "b", "c.txt", "d/a", "d/b", "d/e/f", "e", "f/g", "ü", "x y"])
TREES = st.dictionaries(NAMES, st.binary(max_size=3), max_size=8)
CHANGES = st.lists(st.tuples(NAMES, st.none() | st.binary(max_size=3)), max_size=5)


@pytest.mark.parametrize(
    ("direction", "options"), [*((each, ()) for each in DIRECTIONS), ("up", ("--checksum",))]
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=TREES, second=TREES, rounds=st.lists(st.tuples(CHANGES, CHANGES, NAMES), max_size=3))
def test_both_sides_are_equal_after_any_changes(
    aioflux, sides, cli_server, direction, options, first, second, rounds
) -> None:
    """Whatever was changed on either side, and whichever object failed in the run before.

    An object of the same size that another program wrote at the target is found by its checksum
    only: without it, such writes have other sizes here.
    """
    if direction == "up" and not options:
        second = {name: data + b"1234" for name, data in second.items()}
    source, target = sides(direction)
    fill(source, first | {"always": b"1"})  # a prefix without objects is an error
    fill(target, second)
    words = ("sync", "--delete", *options, source.uri, target.uri)
    for changes, disturbances, failing in [([], [], "a"), *rounds]:
        for side, edits in ((source, changes), (target, disturbances)):
            for name, data in edits:
                if data is not None:
                    is_blind = direction == "up" and not options and side is target
                    side.put(name, data + b"1234" if is_blind else data)
                elif name in side.contents():
                    side.delete(name)
        for side in (source, target):
            if isinstance(side, BucketSide):
                key, name = f"p/{failing}", side.bucket.name
                with (
                    cli_server.faults.inject("objects.media", bucket=name, key=key, status=403),
                    cli_server.faults.inject("objects.insert", bucket=name, key=key, status=403),
                ):
                    aioflux(*words)
        ended = aioflux(*words)
        assert ended.status == 0, ended.err
        assert target.contents() == source.contents()
        assert aioflux(*words, "--dry-run").status == 0


@pytest.mark.more
@pytest.mark.parametrize("service", ["s3", "az"])
def test_other_services_are_mirrored_too(aioflux, request, monkeypatch, tmp_path, service) -> None:
    """Their listings have times of whole seconds, and no crc32c."""
    source, out = tmp_path / "src", tmp_path / "out"
    with open_bucket(service, request, monkeypatch) as bucket:
        write_files(source, TREE)
        words = ["sync", "--delete", source, f"{bucket.root}/p"]
        assert copied(aioflux(*words)) == (4, 0, 0)
        (source / "d/b").write_bytes(b"33")
        (source / "a").unlink()
        assert aioflux(*words, "--dry-run").status == 3
        assert copied(aioflux(*words))[1] == 1
        time.sleep(1.1)  # what is as old as a second gets its time
        down = ["sync", f"{bucket.root}/p", out]
        assert copied(aioflux(*down)) == (3, 0, 0)
        assert read_files(out) == read_files(source)
        assert copied(aioflux(*down)) == (0, 0, 3)
        assert copied(aioflux("sync", out, f"{bucket.root}/p")) == (0, 0, 3)
        copy = f"{bucket.root}/q"
        assert copied(aioflux("sync", f"{bucket.root}/p", copy)) == (3, 0, 0)
        assert copied(aioflux("sync", f"{bucket.root}/p", copy)) == (0, 0, 3)

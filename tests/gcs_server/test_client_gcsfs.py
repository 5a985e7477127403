"""gcsfs, unmodified."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

# Read at import: otherwise gcsfs asks for the kind of a bucket over gRPC, and waits for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
import gcsfs

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

KEYS = ["plain", "a/b/c.bin", "sp ace +plus", "100%25", "käse/\u732b"]


@pytest.fixture
def fs(shared: GCSServer) -> gcsfs.GCSFileSystem:
    options = {"endpoint_url": shared.url, "token": "anon", "project": "p"}
    return gcsfs.GCSFileSystem(**options, skip_instance_cache=True, use_listings_cache=False)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_makes_the_round_trip(fs, name, key):
    path = f"{name}/{key}"
    fs.pipe(path, b"data")
    assert fs.cat(path) == b"data"
    assert fs.info(path)["size"] == 4
    assert fs.exists(path)
    fs.rm(path)
    assert not fs.exists(path)


@pytest.mark.parametrize("size", [0, 10, (5 << 20) + 7], ids=["empty", "small", "resumable"])
def test_a_file_goes_up_and_down(shared, fs, name, tmp_path, size):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(os.urandom(size))
    fs.put(str(source), f"{name}/dir/key", chunksize=1 << 20)
    assert shared.get(name, "dir/key") == source.read_bytes()
    fs.get(f"{name}/dir/key", str(copy))
    assert copy.read_bytes() == source.read_bytes()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # what gcsfs does
@pytest.mark.parametrize("size", [0, 1000, (2 << 20) + 7])
def test_a_writer_and_a_reader_agree(fs, name, size):
    data = os.urandom(size)
    with fs.open(f"{name}/key", "wb", block_size=1 << 20) as writer:
        writer.write(data)
    with fs.open(f"{name}/key", "rb", block_size=1 << 18) as reader:
        assert reader.read() == data


def test_ranges_are_read(shared, fs, name):
    shared.put(name, "key", b"0123456789")
    assert fs.cat_file(f"{name}/key", start=3, end=5) == b"34"
    assert fs.cat_file(f"{name}/key", start=-3) == b"789"
    ranges = fs.cat_ranges([f"{name}/key"] * 2, [0, 8], [2, 10])
    assert ranges == [b"01", b"89"]


def test_directories_are_listed_found_and_walked(shared, fs, name):
    for key in ("a/1", "a/b/2", "c"):
        shared.put(name, key, b"data")
    assert fs.ls(name, detail=False) == [f"{name}/a", f"{name}/c"]
    assert fs.find(name) == [f"{name}/a/1", f"{name}/a/b/2", f"{name}/c"]
    assert fs.glob(f"{name}/a/**/2") == [f"{name}/a/b/2"]
    assert fs.glob(f"{name}/*/1") == [f"{name}/a/1"]
    assert fs.isdir(f"{name}/a")
    assert not fs.isdir(f"{name}/c")
    assert fs.info(f"{name}/a")["type"] == "directory"
    assert fs.du(name) == 12


def test_a_listing_of_several_pages_is_whole(shared, fs, name):
    for number in range(1100):
        shared.put(name, f"{number:04}", b"")
    assert len(fs.ls(name)) == 1100


def test_objects_are_copied_and_moved(shared, fs, name):
    shared.put(name, "a/1", b"data")
    fs.cp(f"{name}/a/1", f"{name}/a/2")
    fs.mv(f"{name}/a/1", f"{name}/b/3")
    assert shared.keys(name) == ["a/2", "b/3"]
    assert shared.get(name, "b/3") == b"data"


def test_objects_are_merged(shared, fs, name):
    shared.put(name, "a", b"one ")
    shared.put(name, "b", b"two")
    fs.merge(f"{name}/whole", [f"{name}/a", f"{name}/b"])
    assert shared.get(name, "whole") == b"one two"


def test_trees_are_removed(shared, fs, name):
    for number in range(30):
        shared.put(name, f"a/{number}", b"")
    shared.put(name, "b", b"")
    fs.rm(f"{name}/a", recursive=True)
    assert shared.keys(name) == ["b"]


def test_metadata_is_written_and_read(fs, name):
    fs.pipe_file(f"{name}/key", b"data", metadata={"colour": "red"}, content_type="x/y")
    assert fs.getxattr(f"{name}/key", "colour") == "red"
    fs.setxattrs(f"{name}/key", size="large")
    assert fs.info(f"{name}/key")["metadata"] == {"colour": "red", "size": "large"}
    assert fs.info(f"{name}/key")["contentType"] == "x/y"


def test_an_exclusive_write_fails_where_something_is(fs, name):
    fs.pipe_file(f"{name}/key", b"data", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{name}/key", b"other", mode="create")


def test_an_absent_object_is_not_found(fs, name):
    with pytest.raises(FileNotFoundError):
        fs.cat(f"{name}/none")
    with pytest.raises(FileNotFoundError):
        fs.info(f"{name}/none")


def test_buckets_are_made_and_removed(fs):
    fs.mkdir("made-by-gcsfs")
    assert fs.exists("made-by-gcsfs")
    assert "made-by-gcsfs" in [path.rstrip("/") for path in fs.ls("", detail=False)]
    fs.rmdir("made-by-gcsfs")
    assert not fs.exists("made-by-gcsfs")

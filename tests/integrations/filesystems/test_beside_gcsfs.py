"""gcsfs and aioflux on one server give the same answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

# Read at import: otherwise gcsfs asks for the kind of a bucket over gRPC, and waits for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
import gcsfs

if TYPE_CHECKING:
    from aioflux.integrations.fsspec import GSFileSystem
    from aioflux.testing import GCSServer

KEYS = [
    "top",
    "a/1",
    "a/2.bin",
    "a/b/3",
    "a/b/c/4",
    "a-b/5",
    "both",
    "both/below",
    "käse/\u732b",
    "sp ace +plus",
    "100%25",
]
PATHS = ["", "/a", "/a/b", "/a/1", "/both", "/top", "/none", "/a/none", "/käse", "/a/"]


@pytest.fixture
def theirs(shared: GCSServer, bucket: str) -> Any:
    for key in KEYS:
        shared.put(bucket, key, key.encode() * 3)
    options = {"endpoint_url": shared.url, "token": "anon", "project": "p"}
    return gcsfs.GCSFileSystem(**options, skip_instance_cache=True, use_listings_cache=False)


def shape(infos: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    return sorted((each["name"], each["type"], each["size"]) for each in infos)


def outcome(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except FileNotFoundError:
        return FileNotFoundError


@pytest.mark.parametrize("path", PATHS)
def test_info_and_what_it_is(theirs: Any, fs: GSFileSystem, bucket: str, path: str) -> None:
    def info(system: Any) -> Any:
        found = system.info(bucket + path)
        return found["name"], found["type"], found["size"]

    assert outcome(info, fs) == outcome(info, theirs)
    for method in ("exists", "isdir", "isfile"):
        assert getattr(fs, method)(bucket + path) == getattr(theirs, method)(bucket + path)


@pytest.mark.parametrize("path", PATHS)
def test_ls(theirs: Any, fs: GSFileSystem, bucket: str, path: str) -> None:
    def ls(system: Any) -> Any:
        return shape(system.ls(bucket + path, detail=True))

    assert outcome(ls, fs) == outcome(ls, theirs)
    names = outcome(fs.ls, bucket + path, detail=False)
    assert names == outcome(theirs.ls, bucket + path, detail=False)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("maxdepth", [None, 1, 2])
@pytest.mark.parametrize("withdirs", [False, True])
def test_find(
    theirs: Any, fs: GSFileSystem, bucket: str, path: str, maxdepth: int | None, withdirs: bool
) -> None:
    ours = fs.find(bucket + path, maxdepth=maxdepth, withdirs=withdirs)
    expected = theirs.find(bucket + path, maxdepth=maxdepth, withdirs=withdirs)
    if withdirs and not path:
        # fsspec has the path itself among the directories, for a bucket, too; gcsfs leaves it out.
        expected = [bucket, *expected]
    if path == "/both":
        # What is called as the path is not below it. gcsfs has it as its own directory.
        assert set(ours) == set(expected) - (set() if withdirs else {f"{bucket}/both"})
    else:
        assert ours == sorted(set(expected))


@pytest.mark.parametrize(
    "pattern", ["*", "a/*", "a/**", "**/3", "a*/[0-9]*", "*/b", "none*", "a/?", "a/1"]
)
def test_glob(theirs: Any, fs: GSFileSystem, bucket: str, pattern: str) -> None:
    assert fs.glob(f"{bucket}/{pattern}") == theirs.glob(f"{bucket}/{pattern}")


def test_a_pattern_that_ends_with_a_slash_means_directories(
    theirs: Any, fs: GSFileSystem, bucket: str
) -> None:
    """As in a shell; gcsfs finds none."""
    assert fs.glob(f"{bucket}/a*/") == [f"{bucket}/a", f"{bucket}/a-b"]


@pytest.mark.parametrize("path", ["", "/a", "/none"])
@pytest.mark.parametrize("topdown", [True, False])
def test_walk(theirs: Any, fs: GSFileSystem, bucket: str, path: str, topdown: bool) -> None:
    def walk(system: Any) -> Any:
        steps = system.walk(bucket + path, topdown=topdown)
        return [(name, sorted(dirs), sorted(files)) for name, dirs, files in steps]

    assert walk(fs) == walk(theirs)


def test_sizes_and_contents(theirs: Any, fs: GSFileSystem, bucket: str) -> None:
    assert fs.du(bucket) == theirs.du(bucket)
    assert fs.du(f"{bucket}/a", total=False) == theirs.du(f"{bucket}/a", total=False)
    assert fs.cat(f"{bucket}/a/[12]*") == {
        path: theirs.cat_file(path) for path in (f"{bucket}/a/1", f"{bucket}/a/2.bin")
    }
    assert fs.modified(f"{bucket}/top") == theirs.modified(f"{bucket}/top")


@pytest.mark.parametrize(
    ("start", "end"),
    [(None, None), (0, 4), (2, 5), (2, None), (-4, None), (None, -2), (-6, -2), (3, 3), (2, 99)],
)
def test_ranges(
    theirs: Any, fs: GSFileSystem, bucket: str, start: int | None, end: int | None
) -> None:
    path = f"{bucket}/a/2.bin"
    expected = (b"a/2.bin" * 3)[start:end]
    assert fs.cat_file(path, start, end) == expected
    assert theirs.cat_file(path, start, end) == expected
    assert fs.cat_ranges([path] * 2, [start, 0], [end, 1]) == [expected, b"a"]

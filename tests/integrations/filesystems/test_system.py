"""Promises of an AiofluxFileSystem beyond fsspec: no silent error, no partial object."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import _registry as registry
from fsspec.spec import AbstractFileSystem

import aioflux
from aioflux.integrations.fsspec import (
    AzureFileSystem,
    GSFileSystem,
    LocalFileSystem,
    MemoryFileSystem,
    S3FileSystem,
    register,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer

LARGE = 5 * 1024 * 1024 + 11
SCHEMES = {
    kind.scheme: kind
    for kind in (GSFileSystem, S3FileSystem, AzureFileSystem, LocalFileSystem, MemoryFileSystem)
}


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(registry)
    register()
    yield
    registry.clear()
    registry.update(before)


@pytest.fixture
def gs_is_ours(registered: None) -> None:
    register(replace=("gs", "gcs"))


def test_urls_are_opened_by_protocol(registered: None, shared: GCSServer, bucket: str) -> None:
    shared.put(bucket, "a", b"data")
    with fsspec.open(f"aiogs://{bucket}/a", endpoint_url=shared.url) as file:
        assert file.read() == b"data"


def test_an_installed_aioflux_is_known_to_fsspec() -> None:
    """By the entry points that the project declares."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    declared = project.get("entry-points", {}).get("fsspec.specs")
    if declared is None:
        pytest.skip("the project declares no filesystems")
    for name, target in declared.items():
        module, _, kind = target.partition(":")
        assert name in getattr(importlib.import_module(module), kind).protocol
    assert set(declared) == {f"aio{scheme}" for scheme in SCHEMES}


def test_plain_protocols_are_replaced_on_request(
    gs_is_ours: None, shared: GCSServer, bucket: str
) -> None:
    fs, path = fsspec.url_to_fs(f"gs://{bucket}/a", endpoint_url=shared.url)
    assert isinstance(fs, GSFileSystem)
    assert path == f"{bucket}/a"
    assert fs.unstrip_protocol(path) == f"gs://{bucket}/a"


def test_a_path_gets_the_protocol_that_leads_back(registered: None) -> None:
    registry.pop("gs", None)
    fs = GSFileSystem()
    for path in ("b/a", "gs://b/a", "gcs://b/a", "aiogs://b/a"):
        assert fs._strip_protocol(path) == "b/a"
        assert fs.unstrip_protocol(path) == "aiogs://b/a"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_protocol_is_registered(registered: None, scheme: str) -> None:
    assert fsspec.get_filesystem_class(f"aio{scheme}") is SCHEMES[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_protocol_looks_like_a_local_path(scheme: str) -> None:
    """For xarray, a protocol with other characters than letters and digits is a directory."""
    assert all(re.fullmatch("[a-z][a-z0-9]*", name) for name in SCHEMES[scheme].protocol)


def test_schemes_do_not_share_a_filesystem(registered: None) -> None:
    assert fsspec.filesystem("aiogs") is not fsspec.filesystem("aios3")


@pytest.mark.parametrize("name", ["file", "memory", "abfs", "aiogs"])
def test_other_protocols_are_not_replaced(name: str) -> None:
    with pytest.raises(ValueError, match="can replace gs, gcs"):
        register(replace=(name,))


def test_one_protocol_is_given_as_several() -> None:
    with pytest.raises(TypeError, match=r'\("gs",\)'):
        register(replace="gs")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"account_key": "k"}, "'account_key' is for az://, not for gs://"),
        ({"requests_timeout": 3}, "instead of requests_timeout= give timeouts"),
        ({"endpoint": "x"}, "no storage option 'endpoint'"),
        ({"transfer": {"max_inflight": 1}}, "TransferOptions has no field 'max_inflight'"),
        ({"retry": 3}, "retry must be aioflux.RetryPolicy"),
    ],
)
def test_unknown_options_are_rejected(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        GSFileSystem(**options)


def test_options_without_effect_are_rejected() -> None:
    with pytest.raises(ValueError, match="neither credentials nor an endpoint_url"):
        MemoryFileSystem(endpoint_url="http://localhost")
    with pytest.raises(ValueError, match="caches no listings"):
        GSFileSystem(use_listings_cache=True)


def test_without_fsspec_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['fsspec'] = None\n"
        "try: import aioflux.integrations.fsspec\n"
        "except ModuleNotFoundError as exc: print(exc.name, exc)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "fsspec aioflux.integrations.fsspec needs fsspec" in run.stdout
    assert "pip install 'aioflux-storage[fsspec]'" in run.stdout


def test_policies_may_be_mappings(shared: GCSServer, bucket: str) -> None:
    fs = GSFileSystem(endpoint_url=shared.url, transfer={"max_in_flight": 3}, retry={})
    fs.pipe_file(f"{bucket}/a", b"data")
    assert fs.options["transfer"] == aioflux.TransferOptions(max_in_flight=3)
    assert fs.options["retry"] == aioflux.RetryPolicy()


def test_paths_without_a_bucket_or_object_are_rejected(fs: GSFileSystem) -> None:
    with pytest.raises(ValueError, match="names no bucket"):
        fs.ls("")
    with pytest.raises(ValueError, match="names no object"):
        fs.cat_file("bucket")
    with pytest.raises(ValueError, match="not absolute"):
        LocalFileSystem().ls("aiofile://here")
    assert fs.isdir("")


def test_depths_are_counted_from_1(fs: GSFileSystem, bucket: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        fs.find(bucket, maxdepth=0)
    with pytest.raises(ValueError, match="at least 1"):
        list(fs.walk(bucket, maxdepth=0))


def test_a_missing_bucket_is_no_directory(fs: GSFileSystem) -> None:
    assert not fs.exists("no-such-bucket")
    with pytest.raises(FileNotFoundError, match="no-such-bucket"):
        fs.ls("no-such-bucket")


@pytest.mark.parametrize("method", ["exists", "isdir", "isfile"])
def test_a_service_that_cannot_be_reached_is_an_error(method: str) -> None:
    """fsspec's own methods say False."""
    fs = GSFileSystem(endpoint_url="http://127.0.0.1:9", retry=aioflux.RetryPolicy(max_attempts=1))
    with pytest.raises(aioflux.TransientError):
        getattr(fs, method)("bucket/a")


def test_markers_of_directories_are_directories(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    """Consoles put an empty object `dir/` in the place of a directory."""
    shared.put(bucket, "dir/", b"")
    shared.put(bucket, "dir/sub/", b"")
    shared.put(bucket, "dir/sub/a", b"1")
    assert fs.isdir(f"{bucket}/dir")
    assert fs.find(bucket) == [f"{bucket}/dir/sub/a"]
    assert fs.ls(f"{bucket}/dir/sub", detail=False) == [f"{bucket}/dir/sub/a"]
    fs.rm(f"{bucket}/dir", recursive=True)
    assert shared.keys(bucket) == []


def test_walk_skips_directories_that_the_caller_removes(fs: GSFileSystem, bucket: str) -> None:
    fs.pipe({f"{bucket}/{key}": b"" for key in ("a/1", "b/2", "b/c/3")})
    seen = []
    for path, directories, _ in fs.walk(bucket):
        seen.append(path)
        if "b" in directories:
            directories.remove("b")
    assert seen == [bucket, f"{bucket}/a"]


def test_create_fails_if_the_object_exists(fs: GSFileSystem, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"new")
    fs.pipe_file(f"{bucket}/a", b"old", mode="create")
    with pytest.raises(FileExistsError):
        fs.put_file(tmp_path / "a", f"{bucket}/a", mode="create")
    assert fs.cat(f"{bucket}/a") == b"old"


@pytest.mark.parametrize("size", [0, 10, LARGE], ids=["empty", "small", "large"])
def test_files_are_uploaded_and_downloaded(
    shared: GCSServer, fs: GSFileSystem, bucket: str, tmp_path: Path, size: int
) -> None:
    class Count(Callback):
        pass

    (tmp_path / "a").write_bytes(data := os.urandom(size))
    up, down = Count(), Count()
    fs.put_file(tmp_path / "a", f"{bucket}/a", callback=up)
    assert shared.get(bucket, "a") == data
    fs.get_file(f"{bucket}/a", tmp_path / "deep" / "b", callback=down)
    assert (tmp_path / "deep" / "b").read_bytes() == data
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["b"]
    assert (up.size, up.value) == (down.size, down.value) == (size, size)


def test_a_download_that_fails_keeps_the_old_file(
    shared: GCSServer, bucket: str, tmp_path: Path
) -> None:
    fs = GSFileSystem(endpoint_url=shared.url, retry={"max_attempts": 1}, skip_instance_cache=True)
    shared.put(bucket, "a", bytes(LARGE))
    (tmp_path / "a").write_bytes(b"old")
    shared.faults.add(operation="objects.media", status=403)
    try:
        with pytest.raises(PermissionError):
            fs.get_file(f"{bucket}/a", tmp_path / "a")
    finally:
        shared.faults.clear()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_object_is_downloaded_to_an_open_file(
    shared: GCSServer, fs: GSFileSystem, bucket: str, tmp_path: Path
) -> None:
    shared.put(bucket, "a", b"data")
    with (tmp_path / "x").open("w+b") as file:
        fs.get_file(f"{bucket}/a", file)
    assert (tmp_path / "x").read_bytes() == b"data"


def test_a_move_keeps_objects_that_are_written_meanwhile(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    shared.put(bucket, "a/1", b"old")

    class Raced(GSFileSystem):
        async def _cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
            await super()._cp_file(path1, path2, **kwargs)
            if path1.endswith("/1"):
                shared.put(bucket, "a/1", b"new")
                shared.put(bucket, "a/2", b"another")

    raced = Raced(endpoint_url=shared.url)
    with pytest.raises(aioflux.PreconditionFailedError):
        raced.mv(f"{bucket}/a", f"{bucket}/b", recursive=True)
    assert shared.get(bucket, "a/1") == b"new"
    assert shared.keys(bucket) == ["a/1", "a/2", "b/1"]


def test_moves(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    fs.pipe({f"{bucket}/{key}": key.encode() for key in ("a/1", "a/b/2", "x")})
    fs.mv(f"{bucket}/a", f"{bucket}/moved", recursive=True)
    fs.rename(f"{bucket}/x", f"{bucket}/y")
    fs.mv_file(f"{bucket}/y", f"{bucket}/z")
    assert shared.keys(bucket) == ["moved/1", "moved/b/2", "z"]
    with pytest.raises(FileNotFoundError):
        fs.mv(f"{bucket}/x", f"{bucket}/y")
    with pytest.raises(IsADirectoryError):
        fs.mv_file(f"{bucket}/moved", f"{bucket}/y")


def test_every_coroutine_of_fsspec_has_a_blocking_method(fs: GSFileSystem) -> None:
    """Those that fsspec adds to a filesystem by itself, if it may."""
    for name in dir(AsyncFileSystem):
        blocking = getattr(AbstractFileSystem, name[1:], None)
        is_coroutine = inspect.iscoroutinefunction(getattr(fs, name, None))
        if name.startswith("_") and blocking is not None and is_coroutine:
            assert getattr(type(fs), name[1:]) is not blocking, name


def test_names_that_fsspec_gives_to_other_methods(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    fs.pipe({f"{bucket}/{key}": b"" for key in ("a", "d/b")})
    assert "b" in fs.tree(bucket)
    fs.cp(f"{bucket}/a", f"{bucket}/c")
    fs.delete(f"{bucket}/a")
    fs.rename(f"{bucket}/c", f"{bucket}/e")
    assert shared.keys(bucket) == ["d/b", "e"]
    assert fs.stat(f"{bucket}/e") == fs.info(f"{bucket}/e")
    assert fs.disk_usage(bucket) == 0


@pytest.mark.parametrize("size", [10, LARGE], ids=["small", "large"])
def test_copies_between_buckets(
    shared: GCSServer, fs: GSFileSystem, bucket: str, size: int
) -> None:
    shared.create_bucket(f"{bucket}-2")
    data = os.urandom(size)
    fs.pipe_file(f"{bucket}/a", data, content_type="text/x", metadata={"k": "v"})
    fs.copy(f"{bucket}/a", f"{bucket}-2/b")
    info = fs.info(f"{bucket}-2/b")
    assert (info["contentType"], info["metadata"]) == ("text/x", {"k": "v"})
    assert shared.get(f"{bucket}-2", "b") == data


def test_a_removal_is_rejected_before_any_delete(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    fs.pipe({f"{bucket}/{key}": b"" for key in ("a", "dir/b")})
    with pytest.raises(FileNotFoundError, match=r"gs://.*/none"):
        fs.rm([f"{bucket}/a", f"{bucket}/none"])
    with pytest.raises(IsADirectoryError):
        fs.rm([f"{bucket}/a", f"{bucket}/dir"])
    with pytest.raises(IsADirectoryError):
        fs.rm_file(f"{bucket}/dir")
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{bucket}/none*")
    assert shared.keys(bucket) == ["a", "dir/b"]


def test_many_are_removed(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    keys = [f"d/{number}" for number in range(30)]
    fs.pipe({f"{bucket}/{key}": b"" for key in [*keys, "d/deep/er/x", "d2", "keep"]})
    fs.rm(f"{bucket}/d", recursive=True, maxdepth=1)
    assert shared.keys(bucket) == ["d/deep/er/x", "d2", "keep"]
    fs.rm([f"{bucket}/d", f"{bucket}/d2"], recursive=True)
    assert shared.keys(bucket) == ["keep"]


def test_a_failed_removal_is_counted(shared: GCSServer, bucket: str) -> None:
    fs = GSFileSystem(endpoint_url=shared.url, retry={"max_attempts": 1}, skip_instance_cache=True)
    fs.pipe({f"{bucket}/{key}": b"" for key in ("a/1", "a/2")})
    shared.faults.add(operation="objects.delete", status=403)
    try:
        with pytest.raises(PermissionError) as caught:
            fs.rm(f"{bucket}/a", recursive=True)
    finally:
        shared.faults.clear()
    assert caught.value.__notes__ == ["2 of 2 objects were not deleted"]


def test_many_are_read_at_once(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    expected = {f"{bucket}/d/{number:02}": b"%d" % number for number in range(40)}
    fs.pipe(expected)
    assert fs.cat(f"{bucket}/d", recursive=True) == expected
    paths = [*expected, f"{bucket}/none"]
    assert fs.cat(paths, on_error="omit") == expected
    assert isinstance(fs.cat(paths, on_error="return")[f"{bucket}/none"], aioflux.NotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat(paths)


def test_times_and_fingerprints_follow_the_content(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    path = f"{bucket}/d/a"
    fs.pipe_file(path, b"1")
    first = fs.ukey(path), fs.checksum(path)
    assert (fs.ukey(path), fs.checksum(path)) == first
    assert datetime.now(UTC) - fs.modified(path) < timedelta(minutes=5)
    assert fs.created(path) == fs.modified(path) == fs.modified(f"{bucket}/d")
    fs.pipe_file(path, b"2")
    assert fs.ukey(path) != first[0]
    assert fs.checksum(path) != first[1]


def test_touch(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    fs.touch(f"{bucket}/a")
    assert shared.get(bucket, "a") == b""
    fs.pipe_file(f"{bucket}/a", b"data")
    before = fs.ukey(f"{bucket}/a")
    fs.touch(f"{bucket}/a", truncate=False)
    fs.touch(f"{bucket}/b", truncate=False)
    assert shared.get(bucket, "a") == b"data"
    assert shared.get(bucket, "b") == b""
    assert fs.ukey(f"{bucket}/a") != before
    fs.touch(f"{bucket}/a")
    assert shared.get(bucket, "a") == b""


def test_heads_and_tails(fs: GSFileSystem, bucket: str) -> None:
    fs.pipe_file(f"{bucket}/a", b"0123456789")
    assert fs.head(f"{bucket}/a", 3) == b"012"
    assert fs.tail(f"{bucket}/a", 3) == b"789"
    assert fs.tail(f"{bucket}/a", 99) == b"0123456789"
    assert fs.read_block(f"{bucket}/a", 2, 4) == b"2345"


def test_times_are_those_of_the_last_write(fs: GSFileSystem, bucket: str) -> None:
    before = datetime.now(UTC)
    fs.pipe({f"{bucket}/d/a": b"1", f"{bucket}/d/b": b"2"})
    times = [fs.modified(f"{bucket}/d/{key}") for key in "ab"]
    assert all(before - timedelta(seconds=1) <= time <= datetime.now(UTC) for time in times)
    assert fs.created(f"{bucket}/d/a") == times[0] == fs.info(f"{bucket}/d/a")["mtime"]
    assert fs.modified(f"{bucket}/d") == max(times)
    with pytest.raises(FileNotFoundError):
        fs.modified(f"{bucket}/none")


def test_a_moved_object_is_the_one_that_was_compared(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    """The service copies the bytes, and the copy is compared before the source is deleted."""
    fs.pipe_file(f"{bucket}/a", b"data" * 1000)
    shared.stats.reset()
    fs.mv_file(f"{bucket}/a", f"{bucket}/b")
    assert shared.keys(bucket) == ["b"]
    assert shared.stats.total.bytes_in + shared.stats.total.bytes_out < 4000
    with pytest.raises(ValueError, match="own name"):
        fs.mv_file(f"{bucket}/b", f"{bucket}/b")
    assert fs.cat_file(f"{bucket}/b") == b"data" * 1000


def test_objects_move_to_another_bucket(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    shared.create_bucket(f"{bucket}-other")
    fs.pipe_file(f"{bucket}/a", b"data")
    fs.mv_file(f"{bucket}/a", f"{bucket}-other/b")
    assert shared.keys(bucket) == []
    assert shared.get(f"{bucket}-other", "b") == b"data"


def test_credentials_that_cannot_sign_are_an_error(fs: GSFileSystem) -> None:
    with pytest.raises(aioflux.CredentialsError):
        fs.sign("bucket/a")
    with pytest.raises(NotImplementedError):
        fsspec.filesystem("aiomemory").sign("bucket/a")


def test_mappers_and_other_filesystems_use_it(fs: GSFileSystem, bucket: str) -> None:
    mapper = fs.get_mapper(f"{bucket}/map")
    mapper["a"] = b"1"
    mapper.setitems({"b": b"2", "c/d": b"3"})
    assert mapper.getitems(["a", "b"]) == {"a": b"1", "b": b"2"}
    assert sorted(mapper) == ["a", "b", "c/d"]
    directory = DirFileSystem(f"{bucket}/map", fs)
    assert directory.cat("c/d") == b"3"
    assert directory.find("") == ["a", "b", "c/d"]

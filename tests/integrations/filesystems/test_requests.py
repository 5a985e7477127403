"""How many requests a call costs, and ranges of several objects in the order of the arguments."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import (
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    RetryPolicy,
)
from aioflux.integrations.fsspec import GSFileSystem, LocalFileSystem
from aioflux.store import sessions_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aioflux.testing import GCSServer

KEYS = ("a-b", "a/1", "both", "both/below", "many/", *(f"many/{number}" for number in range(50)))
DATA = bytes(range(256)) * 20_000


@pytest.fixture
def fs(shared: GCSServer) -> GSFileSystem:
    # Over http ranges are read twice by default.
    return GSFileSystem(endpoint_url=shared.url, transfer={"verify_ranges": False})


@pytest.fixture
def filled(shared: GCSServer, bucket: str) -> str:
    for key in KEYS:
        shared.put(bucket, key, key.encode())
    return bucket


@pytest.fixture
def large(shared: GCSServer, bucket: str) -> str:
    shared.put(bucket, "large", DATA)
    return f"{bucket}/large"


def count(server: GCSServer, call: Callable[[], Any]) -> tuple[Any, int]:
    server.stats.reset()
    return call(), server.stats.total.requests


@pytest.mark.parametrize(
    ("method", "path", "expected", "num_requests"),
    [
        ("isdir", "/many", True, 1),
        ("isdir", "/both", False, 1),
        ("isdir", "/both/below", False, 1),
        ("isdir", "/none", False, 1),
        ("isdir", "", True, 1),
        ("isdir", "/a", True, 2),  # `a-b` comes first
        ("isdir", "/a-", False, 2),
        ("isfile", "/many", False, 1),
        ("isfile", "/both", True, 1),
        ("isfile", "/none", False, 1),
        ("isfile", "", False, 0),
        ("exists", "/both", True, 1),
        ("exists", "/many", True, 2),
        ("exists", "/none", False, 2),
    ],
)
def test_requests_of_a_lookup(
    shared: GCSServer,
    fs: GSFileSystem,
    filled: str,
    method: str,
    path: str,
    expected: bool,
    num_requests: int,
) -> None:
    found = count(shared, lambda: getattr(fs, method)(filled + path))
    assert found == (expected, num_requests)


def test_a_lookup_of_a_directory_lists_one_name(
    shared: GCSServer, fs: GSFileSystem, filled: str
) -> None:
    """However many are in it."""
    fs.isdir(f"{filled}/many")
    few = shared.stats.total.bytes_out
    for call in (fs.isdir, fs.exists, fs.info):
        shared.stats.reset()
        assert call(f"{filled}/many")
        assert shared.stats.operation("objects.list").bytes_out < 500
    assert few > 0


def test_a_pending_upload_makes_no_directory(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    shared.put(bucket, ".aioflux-uploads/x", b"")
    assert fs.ls(bucket) == []
    shared.put(bucket, "z", b"")
    assert fs.isdir(bucket)
    assert not fs.isdir(f"{bucket}/z")


def test_lookups_of_local_paths(tmp_path: Path) -> None:
    for key in ("a-b", "a/1", "file"):
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(b"data")
    fs = LocalFileSystem()
    names = ("", "/a", "/file", "/none", "/a-")
    assert [fs.isdir(f"aiofile://{tmp_path}{name}") for name in names] == [1, 1, 0, 0, 0]
    assert [fs.isfile(f"aiofile://{tmp_path}{name}") for name in names] == [0, 0, 1, 0, 0]


def test_an_object_is_found_without_permission_to_list(
    shared: GCSServer, fs: GSFileSystem, filled: str
) -> None:
    fault = shared.faults.add(operation="objects.list", status=403)
    try:
        assert not fs.isdir(f"{filled}/both")
        with pytest.raises(PermissionDeniedError):
            fs.isdir(f"{filled}/many")
    finally:
        shared.faults.remove(fault)


def test_requests_of_a_read(shared: GCSServer, fs: GSFileSystem, filled: str) -> None:
    def read() -> bytes:
        with fs.open(f"{filled}/both") as file:
            data: bytes = file.read()
            return data

    assert count(shared, read) == (b"both", 2)
    assert count(shared, lambda: fs.cat_file(f"{filled}/both")) == (b"both", 1)


# --- ranges ------------------------------------------------------------------------------


def test_near_ranges_are_one_request(shared: GCSServer, fs: GSFileSystem, large: str) -> None:
    starts = [5000, 0, 3000, 10]
    ends = [5010, 20, 3001, 30]
    found, num_requests = count(shared, lambda: fs.cat_ranges([large] * 4, starts, ends))
    assert found == [DATA[start:end] for start, end in zip(starts, ends, strict=True)]
    assert num_requests == 1
    _, num_requests = count(shared, lambda: fs.cat_ranges([large] * 4, starts, ends, max_gap=0))
    assert num_requests == 4  # its metadata, [0, 30), [3000, 3001) and [5000, 5010)


def test_ranges_are_slices(fs: GSFileSystem, large: str, filled: str) -> None:
    """From the end, to the end, of nothing, of several objects and of the whole."""
    slices: list[tuple[int | None, int | None]] = [
        (None, 5),
        (-7, None),
        (-10, -3),
        (4_000_000, None),
        (5, -5_119_000),
        (7, 7),
        (9, 2),
        (6_000_000, 7_000_000),
        (None, None),
    ]
    paths = [large] * len(slices) + [f"{filled}/both"] * 2
    wanted = [*slices, (None, None), (None, None)]
    found = fs.cat_ranges(paths, [start for start, _ in wanted], [end for _, end in wanted])
    assert found == [*(DATA[start:end] for start, end in slices), b"both", b"both"]
    assert fs.cat_ranges([large, f"gs://{filled}/both"], 1, 3) == [DATA[1:3], b"ot"]
    assert fs.cat_ranges([], 0, 1) == []


def test_errors_are_returned_or_raised(fs: GSFileSystem, large: str, bucket: str) -> None:
    paths = [large, f"{bucket}/none", large, bucket]
    first, error, last, other = fs.cat_ranges(paths, 0, 3)
    assert first == last == DATA[:3]
    assert isinstance(error, NotFoundError)
    assert isinstance(other, ValueError)
    with pytest.raises(NotFoundError):
        fs.cat_ranges(paths, 0, 3, on_error="raise")
    with pytest.raises(TypeError, match="a list of paths"):
        fs.cat_ranges(large, 0, 3)
    with pytest.raises(ValueError, match="2 paths, 1 starts and 2 ends"):
        fs.cat_ranges([large] * 2, [0], [1, 2])


async def test_ranges_from_the_end_restart_if_the_object_is_replaced(
    shared: GCSServer, large: str, bucket: str
) -> None:
    """Libraries that read parts take a NotFoundError for a missing object."""
    retry = RetryPolicy(initial_seconds=1e-3, max_seconds=1e-3)
    options: dict[str, Any] = {"endpoint_url": shared.url, "skip_instance_cache": True}

    class Replacing(GSFileSystem):
        num_replaced = 1

        def _store(self, path: Any) -> Any:
            store = super()._store(path)
            session = sessions_of(store).current()
            inner = session.head

            async def head(key: str, generation: str = "") -> Any:
                meta = await inner(key, generation)
                if self.num_replaced:
                    self.num_replaced -= 1
                    shared.put(bucket, "large", DATA[::-1])
                return meta

            session.head = head  # type: ignore[method-assign]
            return store

    fs = Replacing(retry=retry, **options)
    try:
        assert await fs._cat_file(large, -5) == DATA[::-1][-5:]
        fs.num_replaced = 100
        [found] = await fs._cat_ranges([large], -5, None)
        assert isinstance(found, PreconditionFailedError)
    finally:
        await fs.aclose()


def test_a_file_reads_ranges_of_its_generation(
    shared: GCSServer, fs: GSFileSystem, large: str, bucket: str
) -> None:
    with fs.open(large) as file:
        assert file._fetch_range(10, 20) == DATA[10:20]
        assert file._fetch_range(len(DATA) - 1, len(DATA) + 100) == DATA[-1:]
        assert file._fetch_range(5, 5) == b""
        shared.put(bucket, "large", os.urandom(100))
        with pytest.raises(NotFoundError):
            file._fetch_range(0, 1)

"""Uploads and downloads of local files: interruptions, wrong bytes, disks and directories."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux.store import sessions_of
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

MIB = 1024 * 1024
SIZE = 10 * MIB + 12_345
DATA = random.Random(1).randbytes(SIZE)
OTHER = random.Random(2).randbytes(SIZE)
OPTIONS = aioflux.TransferOptions(
    max_in_flight=2,
    max_in_flight_bytes=12 * MIB,
    range_size_bytes=MIB,
    part_size_bytes=5 * MIB,
    max_buffered_bytes=10 * MIB,
)


@pytest.fixture
def server() -> Iterator[GCSServer]:
    with GCSServer(buckets=["bucket"]) as server:
        server.put("bucket", "a", DATA)
        yield server


@pytest.fixture
async def store(server: GCSServer) -> AsyncIterator[aioflux.Store]:
    retry = aioflux.RetryPolicy(initial_seconds=0.001)
    async with aioflux.open_store(
        "gs://bucket", endpoint_url=server.url, transfer=OPTIONS, retry=retry
    ) as store:
        session = sessions_of(store).current()
        yield store
        assert session.file_memory.held_bytes == 0


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.write_bytes(b"old")
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def partial(directory: Path) -> Path:
    (path,) = directory.glob(".aioflux-partial-*")
    return path


def content(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, data: bytes, offset: int = 0) -> None:
    """Write into a file that exists."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def after(num_bytes: int, act: Callable[[], object]) -> Callable[[int], None]:
    """Return a progress hook that acts once, when so many bytes are done."""
    num_left = [num_bytes]

    def hook(change: int) -> None:
        before, num_left[0] = num_left[0], num_left[0] - abs(change)
        if num_left[0] <= 0 < before:
            act()

    return hook


async def break_off(store: aioflux.Store, target: Path) -> None:
    """Cancel a download in the middle."""
    task = asyncio.create_task(
        store.download_file("a", target, progress=after(5 * MIB, lambda: task.cancel()))
    )
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_download_continues(store: aioflux.Store, target: Path) -> None:
    await break_off(store, target)
    assert content(target) == b"old"
    before, received = store.stats.bytes_received, list[int]()
    assert 4 * MIB < before < SIZE
    meta = await store.download_file("a", target, progress=received.append)
    assert content(target) == DATA
    assert meta == await store.head("a")
    assert store.stats.bytes_received - before <= SIZE - 5 * MIB
    assert (sum(received), names(target.parent)) == (SIZE, ["target"])


async def test_bytes_that_changed_on_the_disk_are_read_again(
    store: aioflux.Store, target: Path
) -> None:
    """After a power failure a recorded range may be missing; only this range is read again."""
    await break_off(store, target)
    before = store.stats.bytes_received
    write(partial(target.parent), bytes(1000), 100)
    await store.download_file("a", target)
    assert content(target) == DATA
    assert MIB <= store.stats.bytes_received - before <= SIZE - 4 * MIB


@pytest.mark.parametrize("garbage", [b"", b"x" * 50, bytes(SIZE), bytes(SIZE + 500)], ids=len)
async def test_a_damaged_partial_file_is_not_used(
    store: aioflux.Store, target: Path, garbage: bytes
) -> None:
    await break_off(store, target)
    partial(target.parent).write_bytes(garbage)
    await store.download_file("a", target)
    assert content(target) == DATA


async def test_a_record_that_says_the_bytes_of_another_object_is_found_by_the_whole_checksum(
    server: GCSServer, store: aioflux.Store, target: Path
) -> None:
    """Kept bytes with the right record, of the wrong object: all bytes are read once more."""
    await break_off(store, target)
    kept = partial(target.parent).read_bytes()
    server.put("bucket", "a", OTHER)
    await break_off(store, target)
    record = slice(SIZE, SIZE + 32)
    changed = bytearray(kept)
    changed[record] = partial(target.parent).read_bytes()[record]
    partial(target.parent).write_bytes(changed)
    received = list[int]()
    await store.download_file("a", target, progress=received.append)
    assert content(target) == OTHER
    assert sum(received) == SIZE
    assert -SIZE in received
    assert store.stats.num_checksum_mismatches == 1


async def test_an_object_that_is_replaced_meanwhile_is_read_anew(
    server: GCSServer, store: aioflux.Store, target: Path
) -> None:
    received = list[int]()
    replace = after(3 * MIB, lambda: server.put("bucket", "a", OTHER))

    def hook(change: int) -> None:
        received.append(change)
        replace(change)

    await store.download_file("a", target, progress=hook)
    assert content(target) == OTHER
    assert sum(received) == SIZE
    assert names(target.parent) == ["target"]


async def test_listed_metadata_is_pinned(
    server: GCSServer, store: aioflux.Store, target: Path
) -> None:
    meta = await store.head("a")
    server.put("bucket", "a", OTHER)
    with pytest.raises(aioflux.NotFoundError):
        await store.download_file(meta, target)
    assert content(target) == b"old"
    assert names(target.parent) == ["target"]


async def test_wrong_bytes_are_no_file(
    server: GCSServer, store: aioflux.Store, target: Path
) -> None:
    with (
        server.faults.inject("objects.media", flip_at=1000),
        pytest.raises(aioflux.ChecksumError, match="bucket/a"),
    ):
        await store.download_file("a", target)
    assert content(target) == b"old"
    assert names(target.parent) == ["target"]


async def test_wrong_bytes_are_read_again(
    server: GCSServer, store: aioflux.Store, target: Path
) -> None:
    with server.faults.inject("objects.media", flip_at=1000, times=1):
        await store.download_file("a", target)
    assert content(target) == DATA


async def test_two_downloads_to_one_path_do_not_mix(
    server: GCSServer, store: aioflux.Store, target: Path
) -> None:
    server.put("bucket", "b", OTHER)
    both = [store.download_file(key, target) for key in ("a", "b", "a", "b")]
    await asyncio.gather(*both)
    assert content(target) in {DATA, OTHER}
    assert names(target.parent) == ["target"]


async def test_a_partial_file_that_another_download_holds_is_not_touched(
    server: GCSServer, store: aioflux.Store, target: Path
) -> None:
    server.put("bucket", "b", OTHER)
    with server.faults.inject("objects.media", key="b", skip=3, stall_at=0):
        begun = asyncio.Event()
        held = asyncio.create_task(store.download_file("b", target, progress=after(1, begun.set)))
        await asyncio.wait_for(begun.wait(), 60)
        async with aioflux.open_store("gs://bucket", endpoint_url=server.url) as other:
            await other.download_file("a", target)
        assert content(target) == DATA
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
    before = store.stats.bytes_received
    await store.download_file("b", target)
    assert content(target) == OTHER
    assert store.stats.bytes_received - before < SIZE
    assert names(target.parent) == ["target"]


@pytest.mark.parametrize("kind", ["symlink", "directory"])
async def test_a_foreign_file_in_its_place_is_left_alone(
    store: aioflux.Store, target: Path, tmp_path: Path, kind: str
) -> None:
    await break_off(store, target)
    place, elsewhere = partial(tmp_path), tmp_path / "elsewhere"
    place.unlink()
    if kind == "symlink":
        elsewhere.write_bytes(b"mine")
        place.symlink_to(elsewhere)
    else:
        place.mkdir()
    await store.download_file("a", target)
    assert content(target) == DATA
    assert kind == "directory" or elsewhere.read_bytes() == b"mine"


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_full_disk_is_an_error_that_names_the_path(
    store: aioflux.Store, target: Path
) -> None:
    with full_disk(4 * MIB), pytest.raises(OSError, match="target") as caught:
        await store.download_file("a", target)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(target))
    assert content(target) == b"old"
    assert names(target.parent) == ["target"]


async def test_a_directory_that_cannot_be_written_is_an_error_that_names_the_path(
    store: aioflux.Store, tmp_path: Path
) -> None:
    missing = tmp_path / "missing" / "target"
    with pytest.raises(FileNotFoundError) as caught:
        await store.download_file("a", missing)
    assert caught.value.filename == str(missing)
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="file/target"):
        await store.download_file("a", file / "target")
    with pytest.raises(ValueError, match="is a directory"):
        await store.download_file("a", tmp_path)
    with pytest.raises(ValueError, match="not a regular file"):
        await store.download_file("a", "/dev/null")
    with pytest.raises(TypeError, match="text"):
        await store.download_file("a", b"target")  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_directory_without_permission_is_an_error(
    store: aioflux.Store, tmp_path: Path
) -> None:
    os.chmod(tmp_path, 0o500)
    with pytest.raises(PermissionError) as caught:
        await store.download_file("a", tmp_path / "target")
    assert caught.value.filename == str(tmp_path / "target")


async def test_a_file_that_changes_is_not_published(
    server: GCSServer, store: aioflux.Store, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    for change in ("write", "append", "truncate"):
        source.write_bytes(DATA * 2)
        os.utime(source, (1, 1))

        def act(change: str = change) -> None:
            if change == "truncate":
                os.truncate(source, 3 * MIB)
            else:
                write(source, b"new", 0 if change == "write" else 2 * SIZE)

        with pytest.raises(ValueError, match=r"source: it changed while it was read"):
            await store.upload_file(source, "new", progress=after(1, act))
    assert server.keys("bucket") == ["a"]
    assert server.stats.open_uploads == 0


async def test_a_change_while_the_last_parts_are_sent_is_found(
    server: GCSServer, store: aioflux.Store, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    os.utime(source, (1, 1))
    sent: list[int] = []

    def change(num_bytes: int) -> None:
        sent.append(num_bytes)
        if sum(sent) == SIZE:
            write(source, b"new", 0)

    with pytest.raises(ValueError, match=r"source: it changed while it was read"):
        await store.upload_file(source, "new", progress=change)
    assert server.keys("bucket") == ["a"]
    assert server.stats.open_uploads == 0


async def test_a_cancelled_upload_publishes_nothing(
    server: GCSServer, store: aioflux.Store, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA * 2)
    task = asyncio.create_task(
        store.upload_file(source, "new", progress=after(1, lambda: task.cancel()))
    )
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.aclose()  # waits for the abort
    assert (server.keys("bucket"), server.stats.open_uploads) == (["a"], 0)


async def test_a_file_that_cannot_be_read_is_an_error_that_names_the_path(
    store: aioflux.Store, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        await store.upload_file(tmp_path / "missing", "new")
    assert caught.value.filename == str(tmp_path / "missing")
    with pytest.raises(ValueError, match="not a regular file"):
        await store.upload_file(tmp_path, "new")


async def test_buffers_of_many_transfers_share_one_budget(
    server: GCSServer, store: aioflux.Store, tmp_path: Path
) -> None:
    """At no time do all transfers hold more than the budget, and all of them end."""
    budget, held = sessions_of(store).current().file_memory, list[int]()

    def note(_: int) -> None:
        held.append(budget.held_bytes)

    for at in range(4):
        (tmp_path / f"{at}").write_bytes(DATA * 2)
    await asyncio.gather(
        *(store.upload_file(tmp_path / f"{at}", f"{at}", progress=note) for at in range(4)),
        *(store.download_file("a", tmp_path / f"new-{at}", progress=note) for at in range(4)),
    )
    assert 5 * MIB < max(held) <= OPTIONS.max_in_flight_bytes
    assert [server.get("bucket", f"{at}") for at in range(4)] == [DATA * 2] * 4
    assert [(tmp_path / f"new-{at}").read_bytes() for at in range(4)] == [DATA] * 4


async def test_a_progress_hook_runs_on_the_loop_and_its_exception_ends_the_transfer(
    store: aioflux.Store, target: Path
) -> None:
    threads = set[int]()
    await store.download_file("a", target, progress=lambda _: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}

    def stop(_: int) -> None:
        raise SystemExit

    with pytest.raises(RuntimeError, match="progress hook raised SystemExit"):
        await store.download_file("a", target, progress=stop)
    with pytest.raises(RuntimeError, match="progress hook raised SystemExit"):
        await store.upload_file(target, "new", progress=stop)


async def test_clean_removes_old_partial_files(store: aioflux.Store, target: Path) -> None:
    await break_off(store, target)
    async with aioflux.open_store(f"file://{target.parent}") as directory:
        assert [meta.key async for meta in directory.list()] == ["target"]
        result = await directory.clean(older_than_seconds=0)
    assert len(result.aborted) == 1
    assert names(target.parent) == ["target"]

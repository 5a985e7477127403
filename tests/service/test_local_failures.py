"""What goes wrong with files is said with a type, names the object and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioflux import NotFoundError, PermissionDeniedError, StorageError, TransientError
from aioflux._services.base import (
    ListRequest,
    PartRequest,
    Precondition,
    ReadRequest,
    Source,
    WriteRequest,
)
from tests.service.opening import open_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aioflux._services.base import Service

ANY = Precondition()
CREATE = Precondition(if_absent=True)
NOBODY = 65534
LARGE_BYTES = 32 * 1024 * 1024
"""Two blocks, each of which is read or written by one call."""


@pytest.fixture
def root() -> Iterator[Path]:
    """Make a directory that an ordinary user owns, and be that user."""
    made = Path(tempfile.mkdtemp(prefix="aioflux-test-"))
    superuser = os.geteuid() == 0
    if superuser:
        os.chown(made, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield made
    finally:
        if superuser:
            os.seteuid(0)
        shutil.rmtree(made)


@pytest.fixture
def service(root: Path) -> Service:
    return open_service(root.as_uri())


async def put(service: Service, key: str, data: bytes = b"1") -> None:
    await service.put(WriteRequest(key), [data], crc32c=None)


def everything(root: Path) -> list[str]:
    # Not `rglob`, which fails where a directory goes meanwhile.
    return sorted(
        os.path.relpath(os.path.join(base, name), root)
        for base, directories, names in os.walk(root)
        for name in directories + names
    )


async def test_a_directory_that_may_not_be_written_to(root: Path, service: Service) -> None:
    await put(service, "d/a")
    (root / "d").chmod(0o500)
    for call in (
        put(service, "d/a"),
        put(service, "d/e/f/b"),
        service.delete("d/a"),
        service.initiate_upload(WriteRequest("d/b")),
        service.compose(WriteRequest("d/b", CREATE), [Source(key="d/a")]),
    ):
        with pytest.raises(
            PermissionDeniedError, match=rf"file://{root}/d/.*Permission denied.* {root}/d(/e)?$"
        ):
            await call
    assert everything(root) == ["d", "d/a"]
    assert bytes((await service.get(ReadRequest("d/a"))).data) == b"1"
    (root / "d").chmod(0o700)


async def test_what_may_not_be_read(root: Path, service: Service) -> None:
    """It is denied, and not taken for missing: a listing that leaves it out would lie."""
    await put(service, "a")
    await put(service, "d/b")
    (root / "a").chmod(0)
    (root / "d").chmod(0)
    for call in (
        service.get(ReadRequest("a")),
        service.get(ReadRequest("d/b")),
        service.head("d/b"),
        service.list_page(ListRequest("d/")),
        service.compose(WriteRequest("c"), [Source(key="a")]),
    ):
        with pytest.raises(PermissionDeniedError, match=root.as_uri()):
            await call
    (root / "d").chmod(0o700)
    assert everything(root) == ["a", "d", "d/b"]


async def test_a_listing_reports_what_comes_before_what_may_not_be_read(
    root: Path, service: Service
) -> None:
    for key in ("a", "b/c", "d/e", "f"):
        await put(service, key)
    (root / "d").chmod(0)
    page = await service.list_page(ListRequest(""))
    assert [meta.key for meta in page.objects] == ["a", "b/c"]
    # From the same walk, and from another that goes on by the token.
    for following in (service, open_service(root.as_uri())):
        with pytest.raises(PermissionDeniedError, match=f"permissions of {root}/d$"):
            await following.list_page(ListRequest("", page_token=page.next_token))
    page = await service.list_page(ListRequest("", delimiter="/"))
    assert page.prefixes == ["b/"]
    (root / "d").chmod(0o700)
    page = await service.list_page(ListRequest("", delimiter="/", page_token=page.next_token))
    assert (page.prefixes, [meta.key for meta in page.objects]) == (["d/"], ["f"])


async def until(condition: Callable[[], object]) -> None:
    """Wait for what a thread does: nothing in this loop could tell."""
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


LONG = "n" * 256


@pytest.mark.parametrize("key", [LONG, f"d/{LONG}", f"d/e/{LONG}/x", "/".join(["n" * 200] * 25)])
async def test_a_name_that_is_too_long(root: Path, service: Service, key: str) -> None:
    for call in (put(service, key), service.compose(WriteRequest(key), [])):
        with pytest.raises(StorageError, match="too long") as failure:
            await call
        assert failure.value.uri == f"file://{root}/{key}"
    with pytest.raises(NotFoundError):
        await service.get(ReadRequest(key))
    with pytest.raises(NotFoundError):
        await service.delete(key)
    assert list((await service.list_page(ListRequest(key))).objects) == []
    assert everything(root) == []


@pytest.fixture
def little_room() -> Iterator[int]:
    """Let no file grow beyond a few bytes: what a full disk does, one write earlier or later."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield most
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_disk_that_is_full(root: Path, service: Service, little_room: int) -> None:
    await put(service, "a", b"old")
    await put(service, "half", bytes(little_room))
    too_much = bytes(little_room + 1)
    upload = await service.initiate_upload(WriteRequest("d/w"))
    for call in (
        put(service, "a", too_much),
        put(service, "d/e/b", too_much),
        service.compose(WriteRequest("c"), [Source(key="half"), Source(key="half")]),
        service.put_part(PartRequest("d/w", upload, 1, (too_much,))),
    ):
        with pytest.raises(StorageError, match=f"file://{root}/") as failure:
            await call
        assert isinstance(failure.value.__cause__, OSError)
    await service.abort_upload("d/w", upload)
    assert everything(root) == ["a", "half"]
    assert bytes((await service.get(ReadRequest("a"))).data) == b"old"


async def test_a_file_that_is_changed_in_place_is_not_read(
    root: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No store does that, but others may: two contents are never mixed."""
    read = os.preadv

    def scribbled(*args: Any) -> int:
        number = read(*args)
        before = (root / "a").stat().st_mtime_ns
        with (root / "a").open("r+b", buffering=0) as file:
            while os.fstat(file.fileno()).st_mtime_ns == before:  # clocks of files tick slowly
                file.write(b"x")
        return number

    await put(service, "a", bytes(1000))
    monkeypatch.setattr(os, "preadv", scribbled)
    with pytest.raises(TransientError, match="another program changed it"):
        await service.get(ReadRequest("a"))


class Halting:
    """Passes calls on; each ends only when the test says so."""

    def __init__(self, inner: Callable[..., int]) -> None:
        self.num_made = 0
        self.may_end = threading.Event()
        self._inner = inner

    def __call__(self, *args: Any) -> int:
        number = self._inner(*args)
        self.num_made += 1
        assert self.may_end.wait(60)
        return number


async def cancel(task: asyncio.Task[Any], halting: Halting) -> None:
    """Cancel work while its thread is in a call, which ends afterwards."""
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    halting.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_write_is_never_published(
    root: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are the caller's memory, which may change from then on."""
    data = bytearray(LARGE_BYTES)
    write = os.pwrite
    for key in ("a", "d/b"):
        halting = Halting(write)
        monkeypatch.setattr(os, "pwrite", halting)
        task = asyncio.create_task(service.put(WriteRequest(key), [memoryview(data)], crc32c=None))
        await until(lambda halting=halting: halting.num_made)
        assert everything(root)
        await cancel(task, halting)
        await until(lambda: not everything(root))
        assert halting.num_made == 1


async def test_a_cancelled_read_leaves_the_callers_memory_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the cancellation is over, so is the reading."""
    size = LARGE_BYTES
    await put(service, "a", b"\1" * size)
    halting = Halting(os.preadv)
    monkeypatch.setattr(os, "preadv", halting)
    buffer = bytearray(size)
    task = asyncio.create_task(service.get(ReadRequest("a"), into=memoryview(buffer)))
    await until(lambda: halting.num_made)
    task.cancel()
    assert await asyncio.wait([task], timeout=0.05) == (set(), {task})
    await cancel(task, halting)
    assert halting.num_made == 1
    assert 0 < buffer.find(b"\0") < size

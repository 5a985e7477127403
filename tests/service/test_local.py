"""Objects as files: names, atomicity, and what else is in a directory."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import ChecksumError, NotFoundError, PreconditionFailedError, StorageError
from aioflux._services.base import (
    ListRequest,
    PartRequest,
    Precondition,
    ReadRequest,
    Source,
    WriteRequest,
)
from aioflux._values.meta import ObjectAttributes
from tests.service.opening import open_service

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from aioflux import ObjectMeta
    from aioflux._services.base import Service

ANY = Precondition()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return open_service((tmp_path / "root").as_uri())


def temporary_files(directory: Path) -> list[Path]:
    return list(directory.rglob(".aioflux-*"))


async def put(service: Service, key: str, data: bytes = b"1") -> ObjectMeta:
    return await service.put(WriteRequest(key), [data], crc32c=None)


@given(st.text(alphabet=st.sampled_from("a./\\\0-~ :") | st.characters(codec="utf-8")))
async def test_a_key_that_passes_stays_below_the_directory(key: str) -> None:
    try:
        await open_service("file:///srv/dir").head(key)
    except StorageError:
        pass  # no file has this key
    except ValueError as exc:
        assert repr(key) in str(exc)  # noqa: PT017  hypothesis and raises do not mix here
        return
    assert posixpath.normpath(f"/srv/dir/{key}") == "/srv/dir/" + key


@pytest.mark.parametrize(
    "key",
    ["", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\0b", "a/.aioflux-x/b"],
)
async def test_a_key_that_leaves_the_directory_is_refused(service: Service, key: str) -> None:
    with pytest.raises(ValueError, match="cannot be a file"):
        await service.head(key)


@pytest.mark.parametrize("key", ["...", "..a", "a..", ".a/b.c", "a b", "~", "*"])
async def test_other_keys_are_taken(service: Service, key: str) -> None:
    assert (await put(service, key)).key == key


async def test_every_operation_checks_the_key(service: Service) -> None:
    calls = [
        service.head("../a"),
        service.get(ReadRequest("../a")),
        put(service, "../a"),
        service.delete("../a"),
        service.compose(WriteRequest("../a"), [Source(key="b")]),
        service.compose(WriteRequest("b"), [Source(key="../a")]),
        service.copy(Source(key="../a"), "b", precondition=ANY),
        service.initiate_upload(WriteRequest("../a")),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="cannot be a file"):
            await call


async def test_a_write_under_way_is_in_no_listing(service: Service, tmp_path: Path) -> None:
    upload = await service.initiate_upload(WriteRequest("d/a"))
    await service.put_part(PartRequest("d/a", upload, 1, (b"12",)))
    assert len(temporary_files(tmp_path)) == 1
    page = await service.list_page(ListRequest(""))
    assert (list(page.objects), list(page.prefixes)) == ([], [])
    [listed] = await service.list_uploads("d/")
    assert (listed.key, listed.upload_id) == ("d/a", upload)
    await service.abort_upload("d/a", upload)
    await service.abort_upload("d/a", upload)
    assert await service.list_uploads("") == []
    assert temporary_files(tmp_path) == []


async def test_parts_may_arrive_in_any_order_and_again(service: Service) -> None:
    upload = await service.initiate_upload(WriteRequest("a"))
    second = await service.put_part(PartRequest("a", upload, 2, (b"cd", b"ef"), offset=2))
    await service.put_part(PartRequest("a", upload, 1, (b"xx",)))
    first = await service.put_part(PartRequest("a", upload, 1, (b"ab",)))
    await service.complete_upload(WriteRequest("a"), upload, [first, second])
    assert bytes((await service.get(ReadRequest("a"))).data) == b"abcdef"
    with pytest.raises(NotFoundError, match="no upload"):
        await service.complete_upload(WriteRequest("a"), upload, [first, second])


@pytest.mark.parametrize("operation", ["put", "compose", "complete"])
async def test_a_condition_that_fails_leaves_nothing(
    service: Service, tmp_path: Path, operation: str
) -> None:
    await put(service, "d/old", b"old")
    upload = await service.initiate_upload(WriteRequest("e/f/a"))
    part = await service.put_part(PartRequest("e/f/a", upload, 1, (b"1",)))
    unmet = Precondition(if_generation_match="other")
    calls = {
        "put": lambda: service.put(WriteRequest("e/f/a", unmet), [b"new"], crc32c=None),
        "compose": lambda: service.compose(WriteRequest("e/f/a", unmet), [Source(key="d/old")]),
        "complete": lambda: service.complete_upload(WriteRequest("e/f/a", unmet), upload, [part]),
    }
    with pytest.raises(PreconditionFailedError):
        await calls[operation]()
    await service.abort_upload("e/f/a", upload)
    assert temporary_files(tmp_path) == []
    assert [meta.key for meta in (await service.list_page(ListRequest(""))).objects] == ["d/old"]
    assert not tmp_path.joinpath("root/e").exists()


async def test_a_delete_takes_empty_directories_along(service: Service, tmp_path: Path) -> None:
    await put(service, "a/b/c/d")
    await put(service, "a/x")
    await service.delete("a/b/c/d")
    assert not (tmp_path / "root/a/b").exists()
    assert (tmp_path / "root/a/x").exists()
    await service.delete("a/x")
    assert (tmp_path / "root").exists()


async def test_neighbours_may_come_and_go(service: Service) -> None:
    async def come_and_go(name: str) -> None:
        for _ in range(60):
            await put(service, f"a/b/{name}", name.encode())
            assert bytes((await service.get(ReadRequest(f"a/b/{name}"))).data) == name.encode()
            await service.delete(f"a/b/{name}")

    await asyncio.gather(*(come_and_go(name) for name in "wxyz"))
    assert list((await service.list_page(ListRequest(""))).objects) == []


async def test_generations_never_repeat(service: Service) -> None:
    seen = [(await put(service, "a", bytes([at % 3]))).generation for at in range(100)]
    assert len(set(seen)) == 100


async def test_an_object_above_or_below_another_cannot_be_written(service: Service) -> None:
    await put(service, "a/b")
    for key in ("a", "a/b/c"):
        with pytest.raises(StorageError, match="/a"):
            await put(service, key)
        with pytest.raises(NotFoundError):
            await service.get(ReadRequest(key))
        with pytest.raises(NotFoundError):
            await service.delete(key)
    page = await service.list_page(ListRequest(""))
    assert [meta.key for meta in page.objects] == ["a/b"]


async def test_a_directory_that_is_not_there_is_an_empty_store(service: Service) -> None:
    assert list((await service.list_page(ListRequest(""))).objects) == []
    with pytest.raises(NotFoundError):
        await service.head("a")


async def test_a_delimiter_groups_keys(service: Service) -> None:
    for key in ("a", "b/1", "b/2", "c/d/e", "f"):
        await put(service, key)
    pages = []
    token = ""
    while True:
        page = await service.list_page(
            ListRequest("", delimiter="/", page_token=token, page_size=2)
        )
        pages.append(([meta.key for meta in page.objects], list(page.prefixes)))
        token = page.next_token
        if not token:
            break
    assert [name for objects, _ in pages for name in objects] == ["a", "f"]
    assert [name for _, prefixes in pages for name in prefixes] == ["b/", "c/"]


async def test_a_listing_starts_and_ends_at_its_offsets(service: Service) -> None:
    for at in range(10):
        await put(service, f"d{at}/k")
    page = await service.list_page(ListRequest("d", start_offset="d3", end_offset="d6/k"))
    assert [meta.key for meta in page.objects] == ["d3/k", "d4/k", "d5/k"]


async def test_metadata_is_refused_rather_than_lost(service: Service) -> None:
    with pytest.raises(StorageError, match="metadata"):
        await service.put(
            WriteRequest("a", attributes=ObjectAttributes(metadata={"label": "cat"})),
            [b""],
            crc32c=None,
        )
    with pytest.raises(NotFoundError):
        await service.head("a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_a_file_without_permission_is_denied(service: Service, tmp_path: Path) -> None:
    await put(service, "a")
    (tmp_path / "root/a").chmod(0)
    with pytest.raises(PermissionError):
        await service.get(ReadRequest("a"))


async def test_any_time_that_a_file_system_keeps_is_a_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Years before 1 and above 9999 are those that a calendar ends with."""
    await put(service, "a")
    lstat = os.lstat
    for seconds, year in (
        (99_999_999_999_999, 9999),
        (-(10**14), 1),
        (60, 1970),
    ):

        def aged(path: str, *, seconds: int = seconds) -> os.stat_result:
            fields = {"st_mtime": float(seconds), "st_mtime_ns": seconds * 10**9}
            return os.stat_result((*tuple(lstat(path))[:8], seconds, 0), fields)

        monkeypatch.setattr(os, "lstat", aged)
        updated = (await service.head("a")).updated
        assert updated is not None
        assert updated.year == year
    assert updated == datetime(1970, 1, 1, 0, 1, tzinfo=UTC)


WHOLE = 0xE3069283
"""CRC32C of b"123456789" (RFC 3720, B.4)."""


def keeps_attributes(directory: Path) -> bool:
    """Return whether the file system keeps attributes of users."""
    probe = directory / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.aioflux.probe", b"1")
    except OSError:
        return False
    finally:
        probe.unlink()
    return True


@pytest.fixture
def attributes(tmp_path: Path) -> None:
    if not (hasattr(os, "setxattr") and keeps_attributes(tmp_path)):
        pytest.skip("the file system keeps no extended attributes of users")


async def write(service: Service, way: str) -> ObjectMeta:
    """Write b"123456789" to "a"."""
    if way == "put":
        return await put(service, "a", b"123456789")
    if way == "parts":
        upload = await service.initiate_upload(WriteRequest("a"))
        parts = [
            await service.put_part(PartRequest("a", upload, 1, (b"12", b"34"))),
            await service.put_part(PartRequest("a", upload, 2, (b"56789",), offset=4)),
        ]
        return await service.complete_upload(WriteRequest("a"), upload, parts)
    await put(service, "b", b"1234")
    await put(service, "c", b"56789")
    return await service.compose(WriteRequest("a"), [Source(key="b"), Source(key="c")])


@pytest.mark.usefixtures("attributes")
@pytest.mark.parametrize("way", ["put", "parts", "compose"])
async def test_a_written_file_has_a_crc32c(service: Service, way: str) -> None:
    """Writes return it, and so do `head` and reads, of a part too."""
    meta = await write(service, way)
    body = await service.get(ReadRequest("a", start=2, end=3))
    assert meta.crc32c == WHOLE
    assert (await service.head("a")).crc32c == WHOLE
    assert (body.crc32c, body.meta().crc32c) == (WHOLE, WHOLE)


@pytest.mark.usefixtures("attributes")
async def test_a_file_changed_by_another_program_has_no_crc32c(
    service: Service, tmp_path: Path
) -> None:
    """The crc32c is of the size and modification time that were recorded with it."""
    path = tmp_path / "root" / "a"
    await write(service, "put")
    path.write_bytes(b"987654321")
    assert (await service.head("a")).crc32c is None
    assert (await service.get(ReadRequest("a"))).crc32c is None
    await write(service, "put")
    os.setxattr(path, "user.aioflux.crc32c", b"no checksum")
    assert (await service.head("a")).crc32c is None


@pytest.mark.usefixtures("attributes")
async def test_a_damaged_file_is_not_composed(service: Service, tmp_path: Path) -> None:
    """The copy would get a crc32c of the wrong bytes."""
    await write(service, "put")
    path = tmp_path / "root" / "a"
    status = path.stat()
    path.write_bytes(b"123456780")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ChecksumError, match="crc32c"):
        await service.compose(WriteRequest("b"), [Source(key="a")])
    assert temporary_files(tmp_path) == []


@pytest.mark.parametrize("way", ["put", "part"])
async def test_bytes_that_do_not_match_their_crc32c_are_not_written(
    service: Service, tmp_path: Path, way: str
) -> None:
    writing: Awaitable[object]
    if way == "put":
        writing = service.put(WriteRequest("a"), [b"123456789"], crc32c=1)
    else:
        upload = await service.initiate_upload(WriteRequest("a"))
        writing = service.put_part(PartRequest("a", upload, 1, (b"123456789",), crc32c=1))
    with pytest.raises(ChecksumError, match="crc32c"):
        await writing
    assert not (tmp_path / "root" / "a").exists()


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="the system has no extended attributes")
@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EPERM, errno.ENOSPC])
async def test_a_file_system_without_attributes_is_written_to(
    service: Service, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "setxattr", refuse)
    meta = await write(service, "put")
    assert (meta.crc32c, (await service.head("a")).crc32c) == (None, None)
    assert bytes((await service.get(ReadRequest("a"))).data) == b"123456789"

"""What a directory holds: order, links, and things that are no objects."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux import NotFoundError, PermissionDeniedError, StorageError
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
    from collections.abc import Sequence

    from aioflux._services.base import Service

ANY = Precondition()
CREATE = Precondition(if_absent=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


@pytest.fixture
def service(root: Path) -> Service:
    return open_service(root.as_uri())


def write(root: Path, *keys: str) -> None:
    for key in keys:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(key.encode())


def temporary_files(directory: Path) -> dict[str, int]:
    """Return the sizes of the temporary files of writers, by path."""
    hexadecimal = "[0-9a-f]" * 32
    found = [
        *directory.rglob(f".aioflux-{hexadecimal}"),
        *directory.rglob(f".aioflux-lock-{hexadecimal}"),
    ]
    return {str(path.relative_to(directory)): path.stat().st_size for path in found}


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


async def keys(service: Service, prefix: str = "", **options: str) -> list[str]:
    names: list[str] = []
    token = ""
    while True:
        page = await service.list_page(
            ListRequest(prefix, page_token=token, page_size=3, **options)
        )
        assert len(page.objects) + len(page.prefixes) <= 3
        names += sorted([meta.key for meta in page.objects] + list(page.prefixes))
        token = page.next_token
        if not token:
            return names


def listed(names: Sequence[str], prefix: str, start: str, end: str, delimiter: str) -> list[str]:
    """Return what a listing gives, said the short way."""
    found = [
        key
        for key in sorted(names, key=str.encode)
        if key.startswith(prefix) and key >= start and (not end or key < end)
    ]
    if not delimiter:
        return found
    cuts = ((key, key.find(delimiter, len(prefix))) for key in found)
    return list(dict.fromkeys(key if at < 0 else key[: at + len(delimiter)] for key, at in cuts))


SEGMENTS = st.text(alphabet="ab-.\u00e9\uff5e\U0001f600", min_size=1, max_size=3).filter(
    lambda text: text not in {".", ".."}
)
KEYS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)
ANYWHERE = st.one_of(st.just(""), KEYS, KEYS.map(lambda key: key + "/"), KEYS.map(lambda k: k[:1]))


@given(
    st.sets(KEYS, max_size=12),
    ANYWHERE,
    ANYWHERE,
    ANYWHERE,
    st.sampled_from(["", "/", "-", "a/"]),
    st.booleans(),
)
@settings(max_examples=settings().max_examples // 2)
def test_a_listing_is_the_sorted_keys(
    names: set[str], prefix: str, start: str, end: str, delimiter: str, forget: bool
) -> None:
    """In pages of three, gone on with or begun anew from the token by another service."""
    names = {key for key in names if not any(other.startswith(f"{key}/") for other in names)}
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), *names)

        async def take() -> list[str]:
            service = open_service(f"file://{directory}")
            got: list[str] = []
            token = ""
            while True:
                page = await service.list_page(
                    ListRequest(
                        prefix,
                        start_offset=start,
                        end_offset=end,
                        delimiter=delimiter,
                        page_token=token,
                        page_size=3,
                    )
                )
                rows = [meta.key for meta in page.objects] + list(page.prefixes)
                got += sorted(rows, key=str.encode)
                token = page.next_token
                if not token:
                    return got
                if forget:
                    service = open_service(f"file://{directory}")

        assert asyncio.run(take()) == listed(sorted(names), prefix, start, end, delimiter)


async def test_each_directory_is_read_once(
    root: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many pages there are."""
    write(root, *(f"{a}/{b:02}" for a in "xyz" for b in range(30)))
    read: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (read.append(str(path)), scandir(path))[1])
    assert len(await keys(service)) == 90
    assert len(read) == 4
    read.clear()
    assert await keys(service, delimiter="/") == ["x/", "y/", "z/"]
    assert len(read) == 4
    read.clear()
    assert len(await keys(service, prefix="y/1")) == 10
    assert read == [str(root / "y")]
    read.clear()
    assert len(await keys(service, start_offset="z/28")) == 2
    assert read == [str(root), str(root / "z")]


async def test_two_listings_at_once_do_not_disturb_each_other(root: Path, service: Service) -> None:
    write(root, *(f"{at:02}" for at in range(10)))
    first = await service.list_page(ListRequest("", page_size=4))
    again = await service.list_page(ListRequest("", page_size=4))
    pages = [
        await service.list_page(ListRequest("", page_size=4, page_token=token))
        for token in (again.next_token, first.next_token, first.next_token)
    ]
    assert {tuple(meta.key for meta in page.objects) for page in pages} == {
        ("04", "05", "06", "07")
    }


async def test_deep_directories_are_no_deep_recursion(root: Path, service: Service) -> None:
    key = "/".join(["d"] * 1010) + "/k"
    await service.put(WriteRequest(key), [b"1"], crc32c=None)
    assert await keys(service) == [key]
    await service.delete(key)
    assert names_in(root) == []


async def test_a_link_below_the_directory_stands_for_what_it_leads_to(
    root: Path, service: Service
) -> None:
    write(root, "data/a", "data/b")
    (root / "data/c").symlink_to("a")
    (root / "more").symlink_to("data")
    (root / "one").symlink_to(root / "data/b")
    assert await keys(service) == [
        "data/a", "data/b", "data/c", "more/a", "more/b", "more/c", "one"
    ]  # fmt: skip
    assert bytes((await service.get(ReadRequest("more/c"))).data) == b"data/a"
    assert (await service.head("one")).size == len("data/b")
    assert await keys(service, prefix="more/b") == ["more/b"]


async def test_a_link_is_replaced_and_deleted_itself(root: Path, service: Service) -> None:
    write(root, "a")
    for name in ("l1", "l2", "nowhere"):
        (root / name).symlink_to("a" if name != "nowhere" else "gone")
    await service.put(WriteRequest("l1"), [b"new"], crc32c=None)
    await service.put(WriteRequest("nowhere"), [b"new"], crc32c=None)
    await service.delete("l2")
    assert (root / "a").read_bytes() == b"a"
    assert await keys(service) == ["a", "l1", "nowhere"]


async def test_links_never_lead_out(root: Path, service: Service, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/s").write_bytes(b"secret")
    # A neighbour whose path begins like the directory's is outside, too.
    (tmp_path / "root-secret").write_bytes(b"secret")
    write(root, "a", "d/b")
    (root / "up").symlink_to("..")
    (root / "s").symlink_to(tmp_path / "secret/s")
    (root / "n").symlink_to(tmp_path / "root-secret")
    (root / "d/out").symlink_to(tmp_path / "secret")
    assert await keys(service) == ["a", "d/b"]
    for prefix in ("up/", "d/out/", "up/secret/", "../", "d/../", "/", "d//"):
        assert await keys(service, prefix=prefix) == []
    for key in ("s", "n", "up/secret/s", "d/out/s"):
        with pytest.raises(NotFoundError, match=key):
            await service.get(ReadRequest(key))
        with pytest.raises(NotFoundError, match=key):
            await service.head(key)
        with pytest.raises(NotFoundError, match=key):
            await service.delete(key)
        with pytest.raises(NotFoundError, match=key):
            await service.compose(WriteRequest("c"), [Source(key=key)])
    for key in ("up/x", "d/out/x", "d/out/y/z"):
        with pytest.raises(PermissionDeniedError, match=r"leads out"):
            await service.put(WriteRequest(key), [b"1"], crc32c=None)
        with pytest.raises(PermissionDeniedError, match=r"leads out"):
            await service.initiate_upload(WriteRequest(key))
    assert (tmp_path / "secret/s").read_bytes() == b"secret"
    assert names_in(tmp_path) == ["root", "root-secret", "secret"]
    assert names_in(tmp_path / "secret") == ["s"]


async def test_links_never_lead_around(root: Path, service: Service) -> None:
    write(root, "x/a", "y/b")
    for name, target in {
        "itself": "itself",
        "x/here": ".",
        "x/top": "..",
        "x/y": "../y",
        "y/x": "../x",
        "ping": "pong",
        "pong": "ping",
        "gone": "nothing",
    }.items():
        (root / name).symlink_to(target)
    assert await keys(service) == ["x/a", "x/y/b", "y/b", "y/x/a"]
    for key in ("itself", "ping", "gone", "itself/a"):
        with pytest.raises(NotFoundError, match=key):
            await service.get(ReadRequest(key))


async def test_a_root_that_is_a_link_is_followed(root: Path, tmp_path: Path) -> None:
    write(root, "d/a")
    (tmp_path / "link").symlink_to("root")
    service = open_service((tmp_path / "link").as_uri())
    (root / "again").symlink_to("d")
    assert await keys(service) == ["again/a", "d/a"]
    await service.put(WriteRequest("again/b"), [b"1"], crc32c=None)
    assert (root / "d/b").exists()


async def test_what_is_no_file_is_not_there(root: Path, service: Service) -> None:
    """Pipes, sockets, devices and directories: not listed, not found, never waited for."""
    write(root, "a")
    os.mkfifo(root / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(root / "socket"))
    (root / "directory").mkdir()
    (root / "device").symlink_to("/dev/zero")
    (root / "link").symlink_to("pipe")
    names = ["pipe", "socket", "directory", "device", "link"]
    async with asyncio.timeout(100):
        assert await keys(service) == ["a"]
        for name in names:
            for call in (
                service.get(ReadRequest(name)),
                service.head(name),
                service.delete(name),
                service.compose(WriteRequest("c"), [Source(key=name)]),
            ):
                with pytest.raises(NotFoundError, match=name):
                    await call
        for name in ("pipe", "socket", "directory"):
            with pytest.raises(StorageError, match=name):
                await service.put(WriteRequest(name), [b"1"], crc32c=None)
    listener.close()
    assert names_in(root) == sorted(["a", *names])


async def test_names_that_are_not_utf8_are_listed_and_read(root: Path, service: Service) -> None:
    (root / os.fsdecode(b"caf\xe9")).write_bytes(b"latin")
    [key] = await keys(service)
    assert os.fsencode(key) == b"caf\xe9"
    assert bytes((await service.get(ReadRequest(key))).data) == b"latin"


async def test_what_killed_writers_left_is_found_and_removed(root: Path, service: Service) -> None:
    """Hidden from listings; each is aborted by its own path and name, from any process."""
    write(root, "d/e/a")
    upload = await service.initiate_upload(WriteRequest("d/e/b"))
    await service.put_part(PartRequest("d/e/b", upload, 1, (b"1",)))
    other = await service.initiate_upload(WriteRequest("new/b"))
    (root / f".aioflux-lock-{'0' * 32}").touch()
    for name in ("mine", "0" * 31, "g" * 32):
        (root / f".aioflux-{name}").touch()
    assert await keys(service) == ["d/e/a"]
    left = temporary_files(root)
    assert {path.rpartition("/")[0] for path in left} == {"", "d/e", "new"}
    assert left[f"d/e/{upload}"] == 1
    assert [each.key for each in await service.list_uploads("d/e/b")] == ["d/e/b"]
    cleaner = open_service(root.as_uri())
    found = await cleaner.list_uploads("")
    assert [each.key for each in found] == sorted(left)
    assert all(abs(each.initiated.timestamp() - time.time()) < 60 for each in found)
    assert [each.upload_id for each in await cleaner.list_uploads("d/")] == [upload]
    assert await cleaner.list_uploads("d/e/a") == []
    for each in found:
        await cleaner.abort_upload(each.key, each.upload_id)
    assert temporary_files(root) == {}
    assert sorted(names_in(root)) == [
        f".aioflux-{'0' * 31}",
        f".aioflux-{'g' * 32}",
        ".aioflux-mine",
        "d",
    ]
    with pytest.raises(NotFoundError):
        await service.put_part(PartRequest("new/b", other, 1, (b"1",)))


@pytest.mark.parametrize("upload_id", ["a", "../a", "", ".aioflux-x", "d/e", ".aioflux-../a"])
async def test_an_abort_removes_nothing_but_writes_under_way(
    root: Path, service: Service, upload_id: str
) -> None:
    write(root, "a", "d/e")
    await service.abort_upload("d/x", upload_id)
    await service.abort_upload("x", upload_id)
    assert await keys(service) == ["a", "d/e"]


async def test_what_comes_and_goes_during_a_walk_is_no_error(root: Path, service: Service) -> None:
    write(root, "a/1", "b/1", "c/1", "d")
    page = await service.list_page(ListRequest("", page_size=1))
    assert [meta.key for meta in page.objects] == ["a/1"]
    for name in ("b/1", "c/1", "d"):
        (root / name).unlink()
    (root / "c").rmdir()
    (root / "d").mkdir()
    page = await service.list_page(ListRequest("", page_token=page.next_token))
    assert (list(page.objects), page.next_token) == ([], "")

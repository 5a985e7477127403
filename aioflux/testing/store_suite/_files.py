"""Tests of `upload_file` and `download_file`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioflux.errors import AlreadyExistsError, NotFoundError
from aioflux.testing.store_suite._base import KIB, PART, SuiteBase, pattern

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.store import Store

SIZES = [0, 1000, PART, 2 * PART + 7]


class _BrokenOffError(Exception):
    pass


def names_in(directory: Path) -> list[str]:
    """Return the names of the files in a directory."""
    return [path.name for path in directory.iterdir()]


@pytest.mark.asyncio
class FileContract(SuiteBase):
    """Tests of transfers of local files."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """Return an empty directory, which is not that of a store of files."""
        path = tmp_path / "files"
        path.mkdir()
        return path

    @pytest.mark.parametrize("size", SIZES)
    async def test_a_file_is_uploaded_whole(self, store: Store, size: int, directory: Path) -> None:
        source, sent = directory / "file", list[int]()
        source.write_bytes(pattern(size))
        meta = await store.upload_file(source, "d/a", progress=sent.append)
        assert self.read_back_door("d/a") == pattern(size)
        assert (meta.key, meta.size, sum(sent)) == ("d/a", size, size)
        assert min(sent, default=1) > 0

    async def test_an_uploaded_file_has_conditions_and_metadata(
        self, store: Store, directory: Path
    ) -> None:
        self.require("keeps_metadata")
        source = directory / "file"
        source.write_bytes(b"new")
        self.write_back_door("a", b"old")
        with pytest.raises(AlreadyExistsError, match=r"/a\b"):
            await store.upload_file(source, "a", mode="create")
        assert self.read_back_door("a") == b"old"
        labels = {"label": "cat"}
        await store.upload_file(source, "b", content_type="image/png", metadata=labels)
        head = await store.head("b")
        assert (head.content_type, dict(head.metadata)) == ("image/png", {"label": "cat"})

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("is_listed", [False, True], ids=["by name", "listed"])
    async def test_an_object_is_downloaded_whole(
        self, store: Store, size: int, is_listed: bool, directory: Path
    ) -> None:
        """The file replaces the old one and keeps its mode; nothing else stays in the directory."""
        self.write_back_door("d/a", pattern(size))
        target, received = directory / "file", list[int]()
        target.write_bytes(b"old")
        target.chmod(0o640)
        key = (await store.list_all("d/"))[0] if is_listed else "d/a"
        meta = await store.download_file(key, str(target), progress=received.append)
        assert target.read_bytes() == pattern(size)
        assert (meta.key, meta.size, sum(received)) == ("d/a", size, size)
        assert (names_in(directory), target.stat().st_mode & 0o777) == (["file"], 0o640)

    async def test_a_failed_download_changes_no_file(self, store: Store, directory: Path) -> None:
        target = directory / "file"
        target.write_bytes(b"old")
        self.write_back_door("a", pattern(100 * KIB))
        meta = await store.head("a")
        self.write_back_door("a", pattern(100 * KIB, seed=1))
        for key in ("missing", meta):
            with pytest.raises(NotFoundError):
                await store.download_file(key, target)
        assert target.read_bytes() == b"old"
        assert names_in(directory) == ["file"]

    @pytest.mark.parametrize("is_replaced", [False, True], ids=["same", "replaced"])
    async def test_an_interrupted_download_continues(
        self, store: Store, is_replaced: bool, directory: Path
    ) -> None:
        """The next call reads only what is missing, or everything if the object was replaced."""
        size, target = 2000 * KIB, directory / "file"
        self.write_back_door("a", pattern(size))
        received = list[int]()

        def break_off(num_bytes: int) -> None:
            received.append(num_bytes)
            if sum(received) > size // 2:
                raise _BrokenOffError

        with pytest.raises(_BrokenOffError):
            await store.download_file("a", target, progress=break_off)
        assert not target.exists()
        if is_replaced:
            self.write_back_door("a", pattern(size, seed=1))
        before = store.stats.bytes_received
        await store.download_file("a", target)
        assert target.read_bytes() == pattern(size, seed=int(is_replaced))
        assert names_in(directory) == ["file"]
        num_read = store.stats.bytes_received - before
        assert num_read == size if is_replaced else num_read <= size - sum(received)

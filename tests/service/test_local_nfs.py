"""Files on NFS: what a client of it may answer, injected below the service."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

import aioflux
from aioflux import (
    AlreadyExistsError,
    NotFoundError,
    PreconditionFailedError,
    RetryPolicy,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QUICK = RetryPolicy(initial_seconds=1e-4, max_seconds=1e-3)


class Failing:
    """Passes calls on, but for the first ones, of which each may do something before it fails."""

    def __init__(
        self,
        inner: Callable[..., Any],
        number: int,
        *,
        times: int = 1,
        before: Callable[..., object] = lambda *_: None,
        only: Callable[..., bool] = lambda *_: True,
    ) -> None:
        self.num_failed = 0
        self._inner = inner
        self._number = number
        self._times = times
        self._before = before
        self._only = only

    def __call__(self, *args: Any, **settings: Any) -> Any:
        if self.num_failed < self._times and self._only(*args):
            self.num_failed += 1
            self._before(*args)
            raise OSError(self._number, os.strerror(self._number))
        return self._inner(*args, **settings)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Failing]:
    def install(name: str, number: int, **settings: Any) -> Failing:
        failing = Failing(getattr(os, name), number, **settings)
        monkeypatch.setattr(os, name, failing)
        return failing

    return install


def opened(root: Path, **settings: Any) -> aioflux.Store:
    return aioflux.open_store(f"file://{root}", **{"retry": QUICK, **settings})


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))


async def test_a_stale_handle_is_read_again(tmp_path: Path, fail: Callable[..., Failing]) -> None:
    """Another machine replaced the file: by name, the new one is read, whole."""

    def replaced(*_: object) -> None:
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").rename(tmp_path / "a")

    (tmp_path / "a").write_bytes(b"old!")
    failing = fail("preadv", errno.ESTALE, before=replaced)
    async with opened(tmp_path) as store:
        assert await store.get("a") == b"new"
    assert failing.num_failed == 1


async def test_a_stale_handle_of_a_generation_is_its_end(
    tmp_path: Path, fail: Callable[..., Failing]
) -> None:
    (tmp_path / "a").write_bytes(b"old!")
    async with opened(tmp_path) as store:
        seen = await store.head("a")
        fail("preadv", errno.ESTALE, before=lambda *_: (tmp_path / "a").unlink())
        with pytest.raises(NotFoundError, match=r"/a\b"):
            await store.get(seen)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT])
async def test_a_server_that_stays_away_is_reported_as_such(
    tmp_path: Path, fail: Callable[..., Failing], number: int
) -> None:
    (tmp_path / "a").write_bytes(b"1")
    fail("preadv", number, times=100)
    async with opened(tmp_path, retry=RetryPolicy(max_attempts=2, initial_seconds=1e-4)) as store:
        with pytest.raises(TransientError, match="another machine.*did not respond") as raised:  # noqa: RUF043
            await store.get("a")
    assert raised.value.uri == f"file://{tmp_path}/a"


async def test_a_write_that_meets_a_stale_handle_is_made_again(
    tmp_path: Path, fail: Callable[..., Failing]
) -> None:
    failing = fail("pwrite", errno.ESTALE)
    async with opened(tmp_path) as store:
        await store.put("d/a", b"1", mode="create")
        assert await store.get("d/a") == b"1"
    assert failing.num_failed == 1
    assert left(tmp_path) == ["a", "d"]


async def test_a_directory_that_is_stale_is_listed_again(
    tmp_path: Path, fail: Callable[..., Failing]
) -> None:
    """It is not taken for empty: it may have been made anew."""
    for key in ("a", "d/b", "e"):
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(b"1")
    failing = fail("scandir", errno.ESTALE, only=lambda path: str(path).endswith("/d"))
    async with opened(tmp_path) as store:
        assert [meta.key for meta in await store.list_all()] == ["a", "d/b", "e"]
    assert failing.num_failed == 1


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC, errno.EIO])
async def test_what_fsync_says_is_said_before_anything_is_visible(
    tmp_path: Path, fail: Callable[..., Failing], number: int
) -> None:
    """NFS takes writes into its cache, and tells only then that there is no room."""
    (tmp_path / "a").write_bytes(b"old")
    async with opened(tmp_path) as store:
        fail("fsync", number)
        with pytest.raises(StorageError, match=os.strerror(number)):
            await store.put("a", b"new")
        assert await store.get("a") == b"old"
    assert left(tmp_path) == ["a"]


@pytest.mark.parametrize("mode", ["overwrite", "create"])
async def test_an_answer_to_a_rename_that_was_lost_changes_nothing(
    tmp_path: Path, fail: Callable[..., Failing], mode: Any
) -> None:
    """A server on a `soft` mount that was away at the worst moment: it was done all the same."""
    operation = "link" if mode == "create" else "replace"
    inner = getattr(os, operation)
    fail(operation, errno.ETIMEDOUT, before=inner)
    async with opened(tmp_path) as store:
        meta = await store.put("a", b"1", mode=mode)
        assert (await store.head("a")).generation == meta.generation
        with pytest.raises(AlreadyExistsError):
            await store.put("a", b"2", mode="create")
        with pytest.raises(PreconditionFailedError):
            await store.put("a", b"2", if_generation_match="another")
    assert (tmp_path / "a").read_bytes() == b"1"
    assert left(tmp_path) == ["a"]


async def test_a_delete_that_was_sent_twice_is_done(
    tmp_path: Path, fail: Callable[..., Failing]
) -> None:
    """The answer to the second is that there is nothing."""
    (tmp_path / "a").write_bytes(b"1")
    fail("unlink", errno.ENOENT, before=os.unlink, only=lambda path, *_: str(path).endswith("/a"))
    async with opened(tmp_path) as store:
        await store.delete("a")
        with pytest.raises(NotFoundError):
            await store.delete("a")
    assert left(tmp_path) == []


async def test_files_deleted_while_open_are_no_objects(tmp_path: Path) -> None:
    name = ".nfs00000000abcdef0100000001"
    (tmp_path / name).write_bytes(b"deleted")
    (tmp_path / ".nfs-notes").write_bytes(b"1")
    async with opened(tmp_path) as store:
        assert [meta.key for meta in await store.list_all()] == [".nfs-notes"]
        for call in (store.get(name), store.put(name, b"1"), store.delete(name)):
            with pytest.raises(ValueError, match=r"\.nfs"):
                await call
        await store.clean(older_than_seconds=0)
    assert (tmp_path / name).exists()

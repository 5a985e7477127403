"""Files of an AiofluxFileSystem: visible when closed, whole, and not at all after an error."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch

import aioflux
from aioflux.integrations.fsspec import GSFileSystem, MemoryFileSystem

if TYPE_CHECKING:
    from collections.abc import Generator

    from aioflux.testing import GCSServer

MIB = 1024 * 1024
LARGE = 5 * MIB + 11


class BrokenError(Exception):
    """What a test raises in a block."""


def fail() -> None:
    raise BrokenError


@pytest.mark.parametrize("size", [0, 10, 3 * MIB + 1, 20 * MIB + 7], ids=["0", "10", "3M", "20M"])
def test_written_bytes_are_read(
    shared: GCSServer, fs: GSFileSystem, bucket: str, size: int
) -> None:
    data = os.urandom(size)
    with fs.open(f"{bucket}/a", "wb") as file:
        for start in range(0, size, 700_001):
            file.write(data[start : start + 700_001])
        file.flush()
        assert file.tell() == size
        assert shared.keys(bucket) == []
    assert shared.get(bucket, "a") == data
    with fs.open(f"{bucket}/a", "rb") as file:
        assert (file.size, file.path) == (size, f"{bucket}/a")
        assert file.read() == data
        assert file.read() == b""


def test_reads_after_seeks_return_the_right_bytes(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    data = random.Random(0).randbytes(9 * MIB)
    shared.put(bucket, "a", data)
    draw = random.Random(1)
    with fs.open(f"{bucket}/a", block_size=64 * 1024) as file:
        for _ in range(40):
            position = draw.choice((file.tell(), draw.randrange(len(data)), len(data) - 22))
            size = draw.choice((1, 100, 70_000, 3 * MIB))
            file.seek(position)
            assert file.read(size) == data[position : position + size]


def test_a_read_after_a_seek_reads_little(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    """A reader of columns reads the end of an object, and some of its middle."""
    shared.put(bucket, "a", bytes(64 * MIB))
    before = shared.stats.operation("objects.get").bytes_out
    with fs.open(f"{bucket}/a", block_size=64 * 1024) as file:
        file.seek(-8, io.SEEK_END)
        file.read(8)
        file.seek(20 * MIB)
        file.read(1000)
    # Twice: over plain http a range has no checksum, and is read a second time to compare. Beside
    # these there is the response with the size.
    metadata = 1024
    assert (
        shared.stats.operation("objects.get").bytes_out - before <= 2 * (8 + 64 * 1024) + metadata
    )


def test_a_reader_keeps_to_the_generation_it_opened(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    shared.put(bucket, "a", bytes(LARGE))
    with fs.open(f"{bucket}/a") as file:
        shared.put(bucket, "a", b"new" * MIB * 2)
        with pytest.raises(aioflux.NotFoundError):
            file.read()


def test_opening_a_missing_object_is_an_error(fs: GSFileSystem, bucket: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"gs://{bucket}/none"):
        fs.open(f"{bucket}/none")


def closed_by_fsspec(fs: GSFileSystem, path: str, mode: str) -> Any:
    return fsspec.core.OpenFile(fs, path, mode)


def opened(fs: GSFileSystem, path: str, mode: str) -> Any:
    return fs.open(path, mode)


def compressed(fs: GSFileSystem, path: str, mode: str) -> Any:
    return fs.open(path, mode, compression="gzip")


@pytest.mark.parametrize("how", [opened, closed_by_fsspec, compressed])
@pytest.mark.parametrize("mode", ["w", "wb", "x", "a"])
@pytest.mark.parametrize("num", [10, 3 * MIB], ids=["small", "large"])
def test_an_exception_in_the_block_stores_nothing(
    shared: GCSServer, fs: GSFileSystem, bucket: str, how: Any, mode: str, num: int
) -> None:
    """`with fsspec.open(...)` does not pass the exception on to its files."""
    if mode != "x":
        shared.put(bucket, "a", b"old")
    before = shared.keys(bucket)

    def write() -> None:
        with how(fs, f"{bucket}/a", mode) as file:
            file.write(b"x" * num if "b" in mode else "x" * num)
            raise BrokenError

    with pytest.raises(BrokenError):
        write()
    assert shared.keys(bucket) == before
    assert mode == "x" or shared.get(bucket, "a") == b"old"
    assert shared.stats.open_uploads == 0


def test_a_file_that_is_opened_and_closed_while_an_error_is_handled_is_stored(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    try:
        fail()
    except BrokenError:
        with closed_by_fsspec(fs, f"{bucket}/log", "w") as file:
            file.write("it broke")
        file = fs.open(f"{bucket}/log2", "wb")
        file.write(b"it broke")
        file.close()
    assert shared.keys(bucket) == ["log", "log2"]


def test_an_error_that_is_raised_again_in_the_block_stores_nothing(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    """It is handled when the file is opened, and when it is closed."""

    def write() -> None:
        try:
            fail()
        except BrokenError:
            with closed_by_fsspec(fs, f"{bucket}/a", "wb") as file:
                file.write(b"x")
                raise

    with pytest.raises(BrokenError):
        write()
    assert shared.keys(bucket) == []


def test_a_file_that_is_closed_while_an_error_is_handled_is_stored(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    """Outside of `with` blocks, errors end iterations of files that are complete."""

    def write(path: str) -> Generator[None, bytes, None]:
        file = fs.open(path, "wb")
        try:
            while True:
                file.write((yield))
        finally:
            file.close()

    writing = write(f"{bucket}/a")
    next(writing)
    writing.send(b"data")
    writing.close()
    items = iter([b"1", b"2"])
    file = fs.open(f"{bucket}/b", "wb")
    while not file.closed:
        try:
            file.write(next(items))
        except StopIteration:
            file.close()
    assert shared.get(bucket, "a") == b"data"
    assert shared.get(bucket, "b") == b"12"


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_dropped_file_stores_nothing(
    shared: GCSServer, fs: GSFileSystem, bucket: str, mode: str
) -> None:
    def write() -> None:
        file = fs.open(f"{bucket}/a", mode)
        file.write(b"x" if "b" in mode else "x")
        del file  # nothing else refers to it

    if mode == "w":
        write()
    else:
        with pytest.warns(RuntimeWarning, match="never closed"):
            write()
    assert shared.keys(bucket) == []


def test_an_error_of_a_write_is_raised_by_every_later_one(shared: GCSServer, bucket: str) -> None:
    fs = GSFileSystem(endpoint_url=shared.url, retry={"max_attempts": 1}, skip_instance_cache=True)
    shared.faults.add(operation="multipart.part", status=403)
    try:
        file = fs.open(f"{bucket}/a", "wb")
        for _ in range(40):
            try:
                file.write(bytes(4 * MIB))
            except PermissionError:
                break
        for action in (lambda: file.write(b"x"), file.close):
            with pytest.raises(PermissionError):
                action()
    finally:
        shared.faults.clear()
    assert file.closed
    assert shared.keys(bucket) == []


def test_closed_twice_and_flushed_often(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    file = fs.open(f"{bucket}/a", "wb")
    for _ in range(3):
        file.write(b"x")
        file.flush()
    file.close()
    generation = fs.info(f"{bucket}/a")["generation"]
    file.close()
    assert fs.info(f"{bucket}/a")["generation"] == generation
    with pytest.raises(ValueError, match="is closed"):
        file.write(b"x")


def test_text(fs: GSFileSystem, bucket: str) -> None:
    with fs.open(f"{bucket}/a", "w", encoding="latin-1", newline="\r\n") as file:
        file.write("Käse\n")
    assert fs.cat(f"{bucket}/a").decode("latin-1") == "Käse\r\n"
    assert fs.read_text(f"{bucket}/a", encoding="latin-1") == "Käse\n"
    fs.write_text(f"{bucket}/a", "1\n2\n")
    with fs.open(f"{bucket}/a", "r") as file:
        assert list(file) == ["1\n", "2\n"]
    with pytest.raises(ValueError, match="encoding has no effect"):
        fs.open(f"{bucket}/a", "rb", encoding="utf-8")


def test_compression(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    with fs.open(f"{bucket}/a.gz", "wt", compression="infer") as file:
        file.write("text " * 1000)
    assert gzip.decompress(shared.get(bucket, "a.gz")) == b"text " * 1000
    with fs.open(f"{bucket}/a.gz", "rt", compression="infer") as file:
        assert file.read(9) == "text text"


def test_appending(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    for line in ("1\n", "2\n"):
        with fs.open(f"{bucket}/log", "a") as file:
            file.write(line)
    assert shared.get(bucket, "log") == b"1\n2\n"
    with fs.open(f"{bucket}/log", "ab") as file:
        assert file.tell() == 4


def test_an_append_loses_nothing_of_another(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    shared.put(bucket, "log", b"1")
    file = fs.open(f"{bucket}/log", "ab")
    file.write(b"2")
    shared.put(bucket, "log", b"13")
    with pytest.raises(aioflux.PreconditionFailedError):
        file.close()
    assert shared.get(bucket, "log") == b"13"


def test_new_is_checked_again_at_the_end(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    file = fs.open(f"{bucket}/a", "xb")
    shared.put(bucket, "a", b"other")
    file.write(b"mine")
    with pytest.raises(FileExistsError):
        file.close()
    assert shared.get(bucket, "a") == b"other"


@pytest.mark.parametrize("mode", ["r+b", "w+b", "q"])
def test_other_modes_are_rejected(fs: GSFileSystem, bucket: str, mode: str) -> None:
    with pytest.raises(ValueError, match="mode must be one of rb, wb, xb, ab"):
        fs.open(f"{bucket}/a", mode)


def test_labels(fs: GSFileSystem, bucket: str) -> None:
    with fs.open(f"{bucket}/a", "wb", content_type="text/plain", metadata={"k": "v"}) as file:
        file.write(b"x")
    info = fs.info(f"{bucket}/a")
    assert (info["contentType"], info["metadata"]) == ("text/plain", {"k": "v"})
    with pytest.raises(TypeError, match="'acl'"):
        fs.open(f"{bucket}/a", "wb", acl="public")


def test_a_transaction_is_visible_at_its_end(
    shared: GCSServer, fs: GSFileSystem, bucket: str, tmp_path: Any
) -> None:
    (tmp_path / "local").write_bytes(b"local")
    with fs.transaction:
        with fs.open(f"{bucket}/a", "wb") as file:
            file.write(b"a" * 20 * MIB)
        with fs.open(f"{bucket}/b", "w") as file:
            file.write("b")
        fs.pipe_file(f"{bucket}/c", b"c")
        fs.put_file(tmp_path / "local", f"{bucket}/d")
        unclosed = fs.open(f"{bucket}/e", "wb")
        unclosed.write(b"e")
        assert shared.keys(bucket) == []
    assert shared.keys(bucket) == ["a", "b", "c", "d", "e"]
    assert shared.get(bucket, "d") == b"local"
    fs.pipe_file(f"{bucket}/f", b"")
    assert "f" in shared.keys(bucket)


def test_a_transaction_that_breaks_leaves_nothing(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    def work() -> None:
        with fs.transaction:
            with fs.open(f"{bucket}/a", "wb") as file:
                file.write(bytes(20 * MIB))
            fs.pipe_file(f"{bucket}/b", b"b")
            raise BrokenError

    with pytest.raises(BrokenError):
        work()
    assert shared.keys(bucket) == []
    assert shared.stats.open_uploads == 0


def test_a_transaction_does_not_commit_a_discarded_file(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    fs.start_transaction()
    with suppress(BrokenError), fs.open(f"{bucket}/a", "wb") as file:
        file.write(b"x")
        fail()
    with pytest.raises(ValueError, match="was discarded"):
        fs.end_transaction()
    assert shared.keys(bucket) == []


def test_a_transaction_whose_commit_fails_is_over(
    shared: GCSServer, fs: GSFileSystem, bucket: str
) -> None:
    def work() -> None:
        with fs.transaction:
            for name in ("a", "b", "c"):
                with fs.open(f"{bucket}/{name}", "xb") as file:
                    file.write(bytes(20 * MIB))
            shared.put(bucket, "b", b"other")

    with pytest.raises(FileExistsError):
        work()
    assert shared.keys(bucket) == ["a", "b"]
    assert shared.stats.open_uploads == 0
    with fs.open(f"{bucket}/d", "wb") as file:
        file.write(b"d")
    assert shared.get(bucket, "d") == b"d"


def test_a_nested_transaction_is_rejected(shared: GCSServer, fs: GSFileSystem, bucket: str) -> None:
    """fsspec's own forgets the writes of the outer one."""
    with fs.transaction:
        fs.pipe_file(f"{bucket}/a", b"a")
        with pytest.raises(RuntimeError, match="can have only one"):
            fs.transaction.start()
    assert shared.keys(bucket) == ["a"]


def test_torch_saves_and_loads(fs: GSFileSystem, bucket: str) -> None:
    state = {"w": torch.arange(3 * MIB, dtype=torch.float32), "step": 3}
    with fs.open(f"{bucket}/a.pt", "wb") as file:
        torch.save(state, file)
    with fs.open(f"{bucket}/a.pt") as file:
        loaded = torch.load(file)
    assert torch.equal(loaded["w"], state["w"])


def test_open_files_do_not_pickle(fs: GSFileSystem, bucket: str) -> None:
    fs.pipe_file(f"{bucket}/a", b"data")
    with fs.open(f"{bucket}/a") as file, pytest.raises(TypeError, match=r"fsspec\.open"):
        pickle.dumps(file)
    again = pickle.loads(pickle.dumps(fsspec.core.OpenFile(fs, f"{bucket}/a")))
    with again as file:
        assert file.read() == b"data"


async def test_files_may_be_awaited(bucket: str) -> None:
    fs = MemoryFileSystem(asynchronous=True)
    async with await fs.open_async(f"{bucket}/a", "wb") as file:
        await file.write(b"da")
        await file.write(b"ta")
        await file.flush()
        assert not await fs._exists(f"{bucket}/a")
    async with await fs.open_async(f"aiomemory://{bucket}/a") as file:
        assert (file.size, await file.read(2), file.tell(), await file.read()) == (
            4,
            b"da",
            2,
            b"ta",
        )
        with pytest.raises(ValueError, match="must be open in mode"):
            await file.write(b"x")
    with pytest.raises(ValueError, match="closed"):
        await file.read()
    with suppress(BrokenError):
        async with await fs.open_async(f"{bucket}/b", "xb") as file:
            await file.write(b"x")
            fail()
    assert not await fs._exists(f"{bucket}/b")


@pytest.mark.parametrize("start", [0, 10 * MIB], ids=["beginning", "middle"])
def test_sequential_reads_are_streamed(
    shared: GCSServer, fs: GSFileSystem, bucket: str, start: int
) -> None:
    """From the third on, or from the first at the beginning: a stream has few requests."""
    size = 48 * MIB
    shared.put(bucket, "a", bytes(size))
    with fs.open(f"{bucket}/a", block_size=64 * 1024) as file:
        file.seek(start)
        before = shared.stats.operation("objects.get").requests
        num = 0
        while file.read(256 * 1024):
            num += 1
        assert num == (size - start) // (256 * 1024)
        assert shared.stats.operation("objects.get").requests - before < num / 4

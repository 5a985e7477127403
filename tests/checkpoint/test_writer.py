"""A writer publishes on a clean close and in no other case."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import zipfile
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

import aioflux
from aioflux import TransferOptions
from aioflux.checkpoint import open_writer
from tests.patience import PATIENT

if TYPE_CHECKING:
    from aioflux.testing import GCSServer

pytestmark = [pytest.mark.clouds("gs", "s3", "az"), pytest.mark.usefixtures("_patient")]

MIB = 1024 * 1024
URI = "gs://bucket/run/model.pt"
KEY = "run/model.pt"
SMALL_PARTS = TransferOptions(part_size_bytes=5 * MIB, max_buffered_bytes=15 * MIB)


def assert_nothing_stays(server: GCSServer) -> None:
    assert server.keys("bucket") == []
    assert server.stats.open_uploads == 0


@pytest.mark.clouds("gs")
def test_a_small_object_is_one_request(server: GCSServer) -> None:
    with open_writer(URI, timeouts=PATIENT) as file:
        file.write(b"ab")
        file.write(memoryview(b"cd"))
    assert server.get("bucket", KEY) == b"abcd"
    assert server.stats.total.requests == 1


def test_many_parts_make_one_object(server: GCSServer) -> None:
    piece = bytes(range(256)) * 4096
    with open_writer(URI, transfer=SMALL_PARTS) as file:
        for _ in range(23):
            assert file.write(piece) == MIB
    assert server.get("bucket", KEY) == 23 * piece


def test_no_byte_is_visible_before_the_close(server: GCSServer) -> None:
    file = open_writer(URI, transfer=SMALL_PARTS)
    file.write(bytes(20 * MIB))
    file.flush()
    assert server.keys("bucket") == []
    file.close()
    assert server.keys("bucket") == [KEY]


@pytest.mark.clouds("gs")
def test_flushing_after_each_write_sends_and_shows_nothing(server: GCSServer) -> None:
    """DCP flushes after each tensor, torch.save at its end."""
    with open_writer(URI, timeouts=PATIENT) as file:
        for number in range(100):
            file.write(bytes([number]))
            file.flush()
        assert server.stats.total.requests == 0
    assert server.get("bucket", KEY) == bytes(range(100))
    assert server.stats.total.requests == 1


def test_memory_may_be_used_again_after_a_write(server: GCSServer) -> None:
    memory = bytearray(b"first")
    with open_writer(URI) as file:
        file.write(memory)
        memory[:] = b"other"
        file.write(memory)
    assert server.get("bucket", KEY) == b"firstother"


def test_memory_of_any_shape_is_written(server: GCSServer) -> None:
    with open_writer(URI) as file:
        file.write(memoryview(bytes(12)).cast("i", (3, 1)))
        file.write(memoryview(b"").cast("B"))
        assert file.tell() == 12
    assert server.get("bucket", KEY) == bytes(12)


@pytest.mark.clouds("gs")
def test_closing_twice_does_nothing(server: GCSServer) -> None:
    with open_writer(URI, timeouts=PATIENT) as file:
        file.write(b"once")
        file.close()
    file.close()
    assert server.stats.total.requests == 1
    assert server.get("bucket", KEY) == b"once"


def test_the_metadata_is_there_after_the_close(server: GCSServer) -> None:
    with open_writer(URI, metadata={"step": "7"}, content_type="model/torch") as file:
        file.write(b"abc")
    with aioflux.sync.open_store(f"{server.root}/run") as store:
        meta = store.head("model.pt")
    assert file.meta.generation == meta.generation
    assert (meta.metadata, meta.content_type) == ({"step": "7"}, "model/torch")


def test_it_is_a_file_without_positions_to_go_to(server: GCSServer) -> None:
    with open_writer(URI) as file:
        assert (file.readable(), file.writable(), file.seekable()) == (False, True, False)
        with pytest.raises(io.UnsupportedOperation):
            file.seek(0)
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()


@pytest.mark.parametrize("num_bytes", [10, 20 * MIB], ids=["small", "parts"])
def test_an_exception_in_the_block_publishes_nothing(server: GCSServer, num_bytes: int) -> None:
    def fail() -> None:
        with open_writer(URI, transfer=SMALL_PARTS) as file:
            file.write(bytes(num_bytes))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert_nothing_stays(server)


def test_an_abort_publishes_nothing(server: GCSServer) -> None:
    file = open_writer(URI, transfer=SMALL_PARTS)
    file.write(bytes(20 * MIB))
    file.abort()
    file.close()
    assert_nothing_stays(server)


@pytest.mark.parametrize("num_bytes", [10, 20 * MIB], ids=["small", "parts"])
def test_a_file_that_is_dropped_publishes_nothing_and_says_so(
    server: GCSServer, num_bytes: int
) -> None:
    file = open_writer(URI, transfer=SMALL_PARTS)
    file.write(bytes(num_bytes))
    files = [file]
    del file
    with pytest.warns(RuntimeWarning, match=rf"{server.root}/run/model\.pt was never closed"):
        files.clear()
    assert_nothing_stays(server)


@pytest.mark.clouds("gs", "s3")
def test_a_file_left_open_at_the_end_of_the_process_publishes_nothing(server: GCSServer) -> None:
    script = f"""
from aioflux import TransferOptions
from aioflux.checkpoint import open_writer
from tests.bridge.patience import be_patient
be_patient()
options = TransferOptions(part_size_bytes=5 << 20, max_buffered_bytes=15 << 20)
file = open_writer({URI!r}, transfer=options)
file.write(bytes(20 << 20))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "was never closed" in done.stderr
    assert_nothing_stays(server)


@pytest.mark.clouds("gs")
def test_the_first_error_comes_again_and_closes_to_nothing(server: GCSServer) -> None:
    server.faults.add("*", status=403)
    file = open_writer(URI, transfer=SMALL_PARTS)
    with pytest.raises(aioflux.PermissionDeniedError) as first:
        file.write(bytes(40 * MIB))
    for act in (lambda: file.write(b"x"), file.close):
        with pytest.raises(aioflux.PermissionDeniedError) as again:
            act()
        assert again.value is first.value
    file.close()
    server.faults.clear()
    assert_nothing_stays(server)


@pytest.mark.clouds("gs")
def test_a_caught_error_of_a_write_still_fails_the_block(server: GCSServer) -> None:
    server.faults.add("*", status=403)

    def save() -> None:
        with open_writer(URI) as file, suppress(aioflux.PermissionDeniedError):
            file.write(bytes(40 * MIB))

    with pytest.raises(aioflux.PermissionDeniedError):
        save()
    server.faults.clear()
    assert_nothing_stays(server)


@pytest.mark.clouds("gs")
def test_an_error_at_the_close_publishes_nothing(server: GCSServer) -> None:
    server.faults.add("*", status=403)
    with (
        pytest.raises(aioflux.PermissionDeniedError, match=rf"{server.root}/run/model\.pt"),
        open_writer(URI) as file,
    ):
        file.write(b"small")
    server.faults.clear()
    assert_nothing_stays(server)


def test_a_closed_file_takes_no_more(server: GCSServer) -> None:
    file = open_writer(URI)
    file.close()
    for act in (lambda: file.write(b"x"), file.tell, file.flush):
        with pytest.raises(ValueError, match="is closed"):
            act()


def test_create_refuses_an_object_that_exists(server: GCSServer) -> None:
    server.put("bucket", KEY, b"old")
    with pytest.raises(aioflux.AlreadyExistsError), open_writer(URI, mode="create") as file:
        file.write(b"new")
    assert server.get("bucket", KEY) == b"old"


def test_an_empty_file_is_an_empty_object(server: GCSServer) -> None:
    open_writer(URI).close()
    assert server.get("bucket", KEY) == b""


def test_pickle_and_zipfile_write_to_it(server: GCSServer) -> None:
    with open_writer(URI) as file:
        pickle.dump({"step": 7, "data": bytes(3 * MIB)}, file)
    assert pickle.loads(server.get("bucket", KEY))["step"] == 7
    with open_writer(URI) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", b"inside")
    assert zipfile.ZipFile(io.BytesIO(server.get("bucket", KEY))).read("a") == b"inside"

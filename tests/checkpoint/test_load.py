"""load, and readers that map: 1.0 times the object, verified before torch sees a byte."""

from __future__ import annotations

import gc
import io
import mmap
import os
import pickle
import sys
import weakref
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import aioflux
from aioflux import NotFoundError, PreconditionFailedError, RetryPolicy, TransferOptions
from aioflux.checkpoint import Checkpointer, load, open_reader, open_writer, save
from aioflux.testing.gcs_server import Hook
from tests.checkpoint.test_torch import assert_equal, state
from tests.patience import PATIENT, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.testing import GCSServer
    from aioflux.testing.gcs_server import Request, Response

pytestmark = pytest.mark.usefixtures("quick_collection")

MIB = 1024 * 1024
URI = "gs://bucket/run/model.pt"
KEY = "run/model.pt"
SMALL = TransferOptions(part_size_bytes=5 * MIB, range_size_bytes=MIB, max_buffered_bytes=10 * MIB)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=["memfd", "unnamed", "named"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Systems without memfds, and those where open files have no paths."""
    if request.param != "memfd":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    if request.param == "named":
        real = os.path.exists
        monkeypatch.setattr(os.path, "exists", lambda path: "/fd/" not in str(path) and real(path))
    return str(request.param)


@pytest.mark.parametrize("num_elements", [1000, 300_000], ids=["one-range", "ranges"])
def test_a_state_comes_back_equal(server: GCSServer, kind: str, num_elements: int) -> None:
    saved = state(num_elements)
    save(saved, URI, transfer=SMALL)
    assert_equal(saved, load(URI, transfer=SMALL))
    assert_equal(saved, load(URI, transfer=SMALL, mmap=False))
    with open_reader(URI, mmap=True) as file:
        mapped = torch.load(file, mmap=True)
    assert_equal(saved, mapped)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_nothing_stays_but_the_tensors(
    server: GCSServer, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    save(state(1000), URI)
    load(URI)  # the loop's own descriptors
    gc.collect()  # those of earlier tests, as far as nothing refers to them
    wait_until(lambda: not server.stats.connections_open)
    begun = open_fds()
    with open_reader(URI, mmap=True) as file:
        loaded = torch.load(file, mmap=True)
    # The server's ends of connections close in a thread of their own.
    wait_until(lambda: open_fds() <= begun)
    assert not list(tmp_path.iterdir())
    assert "aioflux-checkpoint" in Path("/proc/self/maps").read_text()
    del loaded
    gc.collect()
    assert "aioflux-checkpoint" not in Path("/proc/self/maps").read_text()


def test_memory_is_freed_with_the_last_tensor(server: GCSServer) -> None:
    save({"a": torch.arange(1000), "b": torch.ones(1000)}, URI)
    size = len(server.get("bucket", KEY))
    loaded = load(URI)
    (mapping,) = [
        weakref.ref(each)
        for each in gc.get_objects()
        if type(each) is mmap.mmap and len(each) == size
    ]
    last = loaded["a"][10:20]
    del loaded
    gc.collect()
    assert mapping() is not None
    assert last.tolist() == list(range(10, 20))
    del last
    gc.collect()
    assert mapping() is None


def test_a_torch_that_loads_in_another_way_copies(
    server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = state(1000)
    save(saved, URI)
    known = torch.serialization._load
    monkeypatch.setattr(torch.serialization, "_load", lambda *args, **named: known(*args, **named))
    assert_equal(saved, load(URI))


@pytest.mark.parametrize("packed", ["data/0", ""])
def test_an_archive_that_was_packed_anew_is_read_as_torch_reads_it(
    server: GCSServer, packed: str
) -> None:
    saved = {"a": torch.full((1000,), 7.0), "b": torch.arange(1000)}
    file = io.BytesIO()
    torch.save(saved, file)
    other = io.BytesIO()
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(other, "w") as target:
        for each in source.infolist():
            kind = zipfile.ZIP_DEFLATED if packed in each.filename else zipfile.ZIP_STORED
            target.writestr(each.filename, source.read(each), compress_type=kind)
    server.put("bucket", KEY, other.getvalue())
    assert_equal(saved, load(URI))


def test_the_word_of_the_environment_counts(
    server: GCSServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"a": Namespace(b=1)}, URI)
    assert load(URI, weights_only=False)["a"].b == 1
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(pickle.UnpicklingError, match="Namespace"):
        load(URI, weights_only=False)


@pytest.mark.clouds("gs", "s3", "az")
def test_loaded_tensors_can_be_written_and_belong_to_this_process(server: GCSServer) -> None:
    save({"weight": torch.zeros(1000)}, URI)
    first, second = load(URI), load(URI)
    first["weight"] += 1
    assert first["weight"].sum() == 1000
    assert second["weight"].sum() == 0


@pytest.mark.parametrize("num_flipped", [1, None], ids=["once", "always"])
def test_torch_sees_no_byte_that_is_not_verified(
    server: GCSServer, num_flipped: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a read of the whole mends it, it is mended; unpickling wrong bytes would say other."""
    saved = state(300_000)
    save(saved, URI, transfer=SMALL)
    server.faults.add("objects.media", flip_at=1000, times=num_flipped)
    if num_flipped:
        assert_equal(saved, load(URI, transfer=SMALL))
        assert f"wrong bytes of {URI}" in caplog.text
        return
    for act in (lambda: load(URI, transfer=SMALL), lambda: open_reader(URI, mmap=True)):
        with pytest.raises(aioflux.ChecksumError, match=URI):
            act()


def test_each_byte_is_read_once(server: GCSServer) -> None:
    """The checksum of the whole verifies its ranges, also over plain http."""
    meta = save(state(300_000), URI, transfer=SMALL)
    server.stats.reset()
    load(URI, transfer=SMALL, timeouts=PATIENT)
    assert server.stats.operation("objects.get").requests == -(-meta.size // MIB) + 1


@pytest.mark.parametrize("status", [403, 404])
def test_an_error_is_raised_as_itself_and_leaves_nothing(server: GCSServer, status: int) -> None:
    save(state(300_000), URI, transfer=SMALL)
    with pytest.raises(aioflux.NotFoundError):
        load(f"{server.root}/other.pt")
    wait_until(lambda: not server.stats.connections_open)
    begun = open_fds()
    server.faults.add("objects.media", status=status, skip=2)
    error = aioflux.PermissionDeniedError if status == 403 else aioflux.NotFoundError
    with pytest.raises(error, match=URI):
        load(URI, transfer=SMALL)
    gc.collect()
    wait_until(lambda: open_fds() <= begun)  # the server's ends, too


@pytest.mark.clouds("gs", "s3", "az")
def test_code_is_refused_and_the_error_names_the_object(server: GCSServer) -> None:
    save({"arguments": Namespace(lr=1)}, URI)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed") as caught:
        load(URI)
    assert any(URI in note for note in caught.value.__notes__)
    assert load(URI, weights_only=False)["arguments"] == Namespace(lr=1)


@pytest.mark.clouds("gs", "s3", "az")
@pytest.mark.parametrize(
    ("data", "error"),
    [(b"", EOFError), (b"no checkpoint", pickle.UnpicklingError)],
    ids=["empty", "text"],
)
def test_what_is_no_checkpoint_is_refused(
    server: GCSServer, data: bytes, error: type[Exception]
) -> None:
    server.put("bucket", KEY, data)
    with pytest.raises(error) as caught:
        load(URI)
    assert any(URI in note for note in caught.value.__notes__)


@pytest.mark.clouds("gs", "s3", "az")
def test_the_legacy_format_is_copied(server: GCSServer) -> None:
    saved = {"weight": torch.randn(100, 100)}
    with open_writer(URI) as file:
        torch.save(saved, file, _use_new_zipfile_serialization=False)
    assert_equal(saved, load(URI))


@pytest.mark.clouds("gs", "s3", "az")
def test_map_location_is_torchs(server: GCSServer) -> None:
    save({"weight": torch.ones(10)}, URI)
    assert load(URI, map_location="meta")["weight"].is_meta


def test_a_mapped_file_is_a_file_with_a_path(server: GCSServer) -> None:
    save({"weight": torch.ones(1000)}, URI)
    data = server.get("bucket", KEY)
    with open_reader(URI, mmap=True) as file:
        assert (file.uri, file.meta.size, file.readable(), file.seekable()) == (
            (URI, len(data), True, True)
        )
        assert file.read(10) == data[:10]
        assert file.seek(-5, os.SEEK_END) == len(data) - 5
        assert file.read() == data[-5:]
        assert bytes(np.memmap(os.fspath(file), mode="r")) == data
        assert torch.equal(torch.load(file)["weight"], torch.ones(1000))
    file.close()
    for act in (file.read, lambda: os.fspath(file)):
        with pytest.raises(ValueError, match="closed file"):
            act()


class _Replacing(Hook):
    """Puts other bytes in the place of an object each time that a range of it was answered."""

    def __init__(self, server: GCSServer, contents: Sequence[bytes | None]) -> None:
        self._server = server
        self.contents = list(contents)
        server.app.hooks = (*server.app.hooks, self)

    def after(self, request: Request, response: Response) -> Response:
        """See base class."""
        is_range = request.method == "GET" and response.status == 206
        if is_range and request.params.get("object") == KEY and self.contents:
            data = self.contents.pop(0)
            if data is None:
                self._server.faults.add("*", key=KEY, status=404)
            else:
                self._server.put("bucket", KEY, data)
        return response


def _stored(num_elements: int, value: float) -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.full((num_elements,), value)}, buffer)
    return buffer.getvalue()


ONE_BY_ONE = TransferOptions(
    part_size_bytes=5 * MIB,
    range_size_bytes=MIB,
    max_buffered_bytes=10 * MIB,
    max_in_flight=1,
)


def _load_mapped() -> Any:
    with open_reader(URI, mmap=True, transfer=ONE_BY_ONE) as file:
        return torch.load(file, mmap=True)


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("mapped", [False, True], ids=["load", "reader"])
@pytest.mark.parametrize("sizes", [(700_000,), (900_000, 300_000), (100,)], ids=str)
def test_what_is_overwritten_while_it_is_read_is_read_anew(
    server: GCSServer, sizes: tuple[int, ...], mapped: bool
) -> None:
    """As large as before, larger or smaller: the newest object, and nothing of older ones."""
    server.put("bucket", KEY, _stored(700_000, 1.0))
    _Replacing(server, [_stored(size, 2.0 + number) for number, size in enumerate(sizes)])
    loaded = _load_mapped() if mapped else load(URI, transfer=ONE_BY_ONE)
    assert torch.equal(loaded["a"], torch.full((sizes[-1],), 1.0 + len(sizes)))


@pytest.mark.clouds("gs")
def test_what_is_overwritten_each_time_is_an_error(server: GCSServer) -> None:
    server.put("bucket", KEY, _stored(700_000, 1.0))
    replacing = _Replacing(server, [_stored(700_000, 2.0)] * 100)
    with pytest.raises(PreconditionFailedError, match=f"{URI}: it was replaced .* 4 times"):
        load(URI, transfer=ONE_BY_ONE, retry=RetryPolicy(max_attempts=4, initial_seconds=0.01))
    assert len(replacing.contents) >= 100 - 12  # few ranges of each of four reads


@pytest.mark.clouds("gs")
def test_what_is_removed_while_it_is_read_is_not_found(server: GCSServer) -> None:
    server.put("bucket", KEY, _stored(700_000, 1.0))
    _Replacing(server, [None])
    with pytest.raises(NotFoundError, match=KEY):
        load(URI, transfer=ONE_BY_ONE)


@pytest.mark.clouds("gs", "file", "memory")
def test_a_run_of_a_checkpointer_is_named_as_that(root: str) -> None:
    with Checkpointer(f"{root}/run") as checkpointer:
        checkpointer.save(1, {"a": 1})
        for uri, says in (
            (f"{root}/run", r"a run of a Checkpointer, not an object: use Checkpointer\('{}'\)"),
            (
                f"{root}/run/step-00000001",
                r"a distributed.* use aioflux.checkpoint.dcp.load_state\('{}'\), or .*step=",
            ),
            (f"{root}/none", "could not read|there is no object"),
        ):
            with pytest.raises(NotFoundError, match=says.format(uri)) as caught:
                load(uri)
            assert caught.value.uri == uri

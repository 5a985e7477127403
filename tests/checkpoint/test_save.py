"""save: what torch.save writes, out of the tensors' own memory, and nothing of it by halves."""

from __future__ import annotations

import contextvars
import gc
import io
import threading
import weakref
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.serialization import config

import aioflux
from aioflux import TransferOptions, _bridge
from aioflux.checkpoint import load, save
from aioflux.checkpoint._save.tensor_memory import TensorMemory
from aioflux.checkpoint._save.torch_file import _LazyWriter, _StateFile, plan_part_size, writing
from tests.checkpoint.test_torch import assert_equal, state
from tests.patience import PATIENCE_SECONDS, PATIENT

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer

pytestmark = pytest.mark.usefixtures("_patient")

MIB = 1024 * 1024
URI = "gs://bucket/run/model.pt"
KEY = "run/model.pt"
SMALL = TransferOptions(part_size_bytes=5 * MIB, range_size_bytes=MIB, max_buffered_bytes=10 * MIB)


class Fresh:
    """An object that pickles as a tensor which is made for it, and gone when torch.save is done."""

    def __init__(self, num_elements: int) -> None:
        self.num_elements = num_elements

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.clone, (torch.arange(self.num_elements),)


@pytest.mark.clouds("gs", "s3", "az")
@pytest.mark.parametrize("num_elements", [1000, 300_000], ids=["one-request", "parts"])
def test_a_state_comes_back_equal(server: GCSServer, num_elements: int) -> None:
    saved = state(num_elements)
    meta = save(saved, URI, transfer=SMALL)
    assert (meta.key, meta.size) == ("model.pt", len(server.get("bucket", KEY)))
    assert_equal(saved, torch.load(io.BytesIO(server.get("bucket", KEY)), weights_only=True))


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_other_services_work_alike(scheme: str, tmp_path: Path) -> None:
    uri = "memory://save/model.pt" if scheme == "memory" else f"file://{tmp_path}/model.pt"
    saved = state(300_000)
    save(saved, uri, transfer=SMALL)
    assert_equal(saved, load(uri, transfer=SMALL))


@pytest.mark.clouds("gs", "s3", "az")
def test_views_keep_sharing_their_storage(server: GCSServer) -> None:
    base = torch.arange(1_500_000)
    save({"base": base, "rows": base[7:1000], "again": base}, URI, transfer=SMALL)
    loaded = load(URI)
    loaded["base"][7] = -1
    assert loaded["rows"][0] == loaded["again"][7] == -1
    assert len(server.get("bucket", KEY)) < 1.01 * base.nbytes


def test_memory_that_ends_with_torch_save_is_sent_as_it_was(server: GCSServer) -> None:
    saved = {str(number): Fresh(300_000 + number) for number in range(8)}
    save(saved, URI, transfer=SMALL)
    loaded = load(URI, weights_only=False)
    for number in range(8):
        assert torch.equal(loaded[str(number)], torch.arange(300_000 + number))


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(bytes(range(256)) * 40_000, id="bytes"),
        pytest.param([number**2 for number in range(800_000)], id="a-long-pickle"),
    ],
)
def test_what_is_no_tensor_is_copied_and_comes_back(server: GCSServer, kept: object) -> None:
    saved = {"kept": kept, "weight": torch.randn(1_500_000)}
    save(saved, URI, transfer=SMALL)
    loaded = load(URI, weights_only=False)
    assert loaded["kept"] == kept
    assert torch.equal(loaded["weight"], saved["weight"])


def test_tensors_are_not_copied(server: GCSServer) -> None:
    """What the file is handed lies in storages of the state, and is found there."""
    memory, found = TensorMemory(), []

    class File(io.RawIOBase):
        def write(self, data: Any) -> int:
            view = memoryview(data)
            if view.nbytes > 10_000:
                found.append(memory.find(view))
            return view.nbytes

    tensors = [torch.randn(10_000), torch.arange(50_000), torch.randn(300, 300)[:, 7]]
    torch.save([*tensors, "text" * 10_000], File(), pickle_module=memory.pickle_module())
    wanted = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors
    }
    assert memory.num_bytes == sum(wanted.values())
    assert found[0] is None  # the pickle
    assert [view.nbytes for view in found[1:]] == list(wanted.values())


def test_borrowed_memory_outlives_its_tensor() -> None:
    memory, file = TensorMemory(), io.BytesIO()
    tensor = torch.arange(1_000_000)
    torch.save(tensor, file, pickle_module=memory.pickle_module())
    given = memoryview(tensor.numpy()).cast("B")
    borrowed = memory.find(given[8:80])
    dropped = weakref.ref(tensor)
    del memory, tensor, given
    gc.collect()
    assert dropped() is None
    others = [torch.full((1_000_000,), -1) for _ in range(4)]  # would take it, were it free
    assert borrowed is not None
    assert list(borrowed.cast("q")) == list(range(1, 10))
    assert len(others) == 4


def test_memory_of_others_is_not_known() -> None:
    """Neither memory elsewhere nor what reaches beyond a storage that was found."""
    memory = TensorMemory()
    whole = torch.arange(100)
    part = torch.frombuffer(whole.numpy(), dtype=torch.int64, count=50)
    torch.save(part, io.BytesIO(), pickle_module=memory.pickle_module())
    view = memoryview(whole.numpy()).cast("B")
    assert memory.find(view[:400]) is not None
    assert memory.find(view[:401]) is None
    assert memory.find(view[400:]) is None
    assert memory.find(memoryview(torch.arange(100).numpy()).cast("B")) is None


def test_memory_that_is_not_known_is_copied_at_once(server: GCSServer) -> None:
    """torch copies memory of a GPU, hands the copy over, and lets go of it."""
    memory, expected = bytearray(2 * MIB), []
    settings = {"zero_copy": True}
    opening = writing(f"{server.root}/run", "model.pt", settings, {})
    held = _LazyWriter(lambda: _bridge.OpenContext(opening))
    with _StateFile(held, URI, TensorMemory()) as file:
        for number in range(20):
            for size in (7, 100_000, 2 * MIB):
                memory[:] = bytes([number]) * len(memory)
                expected.append(bytes(memory[:size]))
                assert file.write(memoryview(memory)[:size]) == size
    assert server.get("bucket", KEY) == b"".join(expected)


def test_copies_between_borrowed_tensors_stay_few() -> None:
    """Small tensors are copied, and a batch of copies is sent even if no run of them is long."""

    class Sink:
        """An object writer that counts bytes, and knows all large memory as that of tensors."""

        num_bytes = 0

        @property
        def value(self) -> Any:
            return self

        async def write(self, view: memoryview) -> None:
            self.num_bytes += view.nbytes

        write_copy = write

        def find(self, view: memoryview) -> memoryview:
            return view

        def exit(self, _: BaseException | None = None, /) -> bool:
            return False

    sink: Any = Sink()
    with _StateFile(sink, URI, sink) as file:
        for _ in range(50):
            for size in [16_000] * 60 + [16_384]:
                file.write(bytes(size))
                assert file.tell() - sink.num_bytes <= 10 * MIB
    assert sink.num_bytes == file._num_written


def test_crc32_is_left_out_in_one_context_alone(server: GCSServer) -> None:
    """Another thread that saves at the same time has its own."""
    started, ended = threading.Event(), threading.Event()
    seen: list[bool] = []

    class Slow:
        def __reduce__(self) -> tuple[Any, ...]:
            started.set()
            assert ended.wait(PATIENCE_SECONDS)
            return int, ()

    def look() -> None:
        assert started.wait(PATIENCE_SECONDS)
        seen.append(config.save.compute_crc32)
        ended.set()

    thread = threading.Thread(target=look)
    thread.start()
    save({"slow": Slow(), "weight": torch.ones(1000)}, URI)
    thread.join()
    assert seen == [True]
    assert config.save.compute_crc32 is True
    assert contextvars.copy_context().run(lambda: config.save.compute_crc32) is True
    with zipfile.ZipFile(io.BytesIO(server.get("bucket", KEY))) as archive:
        (entry,) = (each for each in archive.infolist() if each.filename.endswith("data/0"))
        assert entry.CRC == 0


@pytest.mark.clouds("gs", "s3", "az")
@pytest.mark.parametrize("num_elements", [10, 4_000_000], ids=["small", "parts"])
def test_a_failed_save_leaves_the_object_before_it(server: GCSServer, num_elements: int) -> None:
    server.put("bucket", KEY, b"good")
    with pytest.raises(Exception, match="lambda"):
        save({"a": torch.ones(num_elements), "b": lambda: None}, URI, transfer=SMALL)
    assert server.get("bucket", KEY) == b"good"
    assert server.keys("bucket") == [KEY]
    assert server.stats.open_uploads == 0


@pytest.mark.parametrize("num_before", [0, 1, 3], ids=["at-once", "first-part", "third-part"])
def test_an_error_of_the_service_is_raised_as_itself(server: GCSServer, num_before: int) -> None:
    server.put("bucket", KEY, b"good")
    name = "multipart.part" if num_before else "multipart.create"
    server.faults.add(name, status=403, skip=max(0, num_before - 1))
    with pytest.raises(aioflux.PermissionDeniedError, match=URI):
        save(state(300_000), URI, transfer=SMALL)
    server.faults.clear()
    assert server.get("bucket", KEY) == b"good"
    assert server.stats.open_uploads == 0


@pytest.mark.clouds("gs", "s3", "az")
def test_conditions_hold(server: GCSServer) -> None:
    first = save(state(10), URI, mode="create", metadata={"step": "7"})
    assert first.metadata == {"step": "7"}
    with pytest.raises(aioflux.AlreadyExistsError):
        save(state(400_000), URI, mode="create", transfer=SMALL)
    second = save(state(400_000), URI, if_generation_match=first.generation, transfer=SMALL)
    with pytest.raises(aioflux.PreconditionFailedError):
        save(state(10), URI, if_generation_match=first.generation)
    with aioflux.sync.open_store(f"{server.root}/run") as store:
        assert store.head("model.pt").generation == second.generation


def test_a_uri_without_a_key_is_refused_before_anything_is_pickled() -> None:
    with pytest.raises(ValueError, match="names no object"):
        save(Fresh(10), "gs://bucket/")


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, 5), (76_000_000, 5), (298_000_000, 9), (512 * MIB, 16), (2_500_000_000, 16)],
)
def test_parts_are_a_32nd_of_the_state(num_bytes: int, expected: int) -> None:
    assert plan_part_size(num_bytes) == expected * MIB


@pytest.mark.parametrize(("num_bytes", "num_parts"), [(32_000_000, 7), (168_000_000, 27)])
def test_the_size_of_parts_follows_that_of_the_state(
    server: GCSServer, num_bytes: int, num_parts: int
) -> None:
    """Parts of 5 and 6 MiB, one request to begin and one to end."""
    save({"weight": torch.ones(num_bytes, dtype=torch.uint8)}, URI, timeouts=PATIENT)
    assert server.stats.total.requests == num_parts + 2

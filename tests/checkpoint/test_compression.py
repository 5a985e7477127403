"""ZStandard as stock DCP registers and uses it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._extension import ZStandard as StockZStandard
from torch.distributed.checkpoint.api import CheckpointException

from aioflux.checkpoint.compression import ZStandard
from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from pathlib import Path

# Outside of a process group, which is where these tests run, DCP says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled, unavailable"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]


def registry() -> ExtensionRegistry:
    made = ExtensionRegistry()
    made.register(ZStandard)
    return made


def save(
    state: dict[str, Any], path: Path, *extensions: StreamTransformExtension, **kw: Any
) -> None:
    writer = FileSystemWriter(path, sync_files=False, _extensions=extensions, **kw)
    dcp.save(state, storage_writer=writer, no_dist=True)


def load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    into = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()
        for name, value in state.items()
    }
    reader = FileSystemReader(path, _extension_registry=registry())
    dcp.load(into, storage_reader=reader, no_dist=True)
    return into


def assert_same(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert loaded[name].dtype == value.dtype
            assert loaded[name].shape == value.shape
            ours, theirs = (
                each.contiguous().flatten().view(torch.uint8) for each in (value, loaded[name])
            )
            assert torch.equal(ours, theirs), name
        else:
            assert loaded[name] == value


def state_of_all_kinds() -> dict[str, Any]:
    torch.manual_seed(0)
    state: dict[str, Any] = {str(dtype): torch.rand(33, 7).mul(100).to(dtype) for dtype in DTYPES}
    return state | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "view": torch.randn(50, 50)[10:20, 5:9],
        "transposed": torch.randn(30, 40).t(),
        "large": torch.randn(700_000).mul_(0.02).bfloat16(),
        "step": 17,
        "text": "layer " * 1000,
    }


@pytest.mark.parametrize("num_threads", [1, 3])
def test_stock_dcp_loads_what_it_saved(tmp_path: Path, num_threads: int) -> None:
    state = state_of_all_kinds()
    save(state, tmp_path, ZStandard(), thread_count=num_threads)
    assert_same(state, load(state, tmp_path))


@pytest.mark.parametrize(
    "settings", [{"level": 9}, {"threads": 1}, {"byte_planes": False}], ids=str
)
def test_what_was_written_with_any_setting_is_read_with_the_default(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    state = state_of_all_kinds()
    save(state, tmp_path, ZStandard(**settings))
    assert_same(state, load(state, tmp_path))


def test_weights_become_smaller_than_with_the_extension_of_torch(tmp_path: Path) -> None:
    state = {"weights": torch.randn(1_000_000).mul_(0.02).bfloat16()}
    sizes = {}
    for extension in (ZStandard(), StockZStandard()):
        path = tmp_path / extension.get_descriptor().replace("/", "-")
        save(state, path, extension)
        sizes[type(extension)] = sum(os.path.getsize(each) for each in path.iterdir())
    assert sizes[ZStandard] < 0.69 * 2_000_000 < 0.76 * 2_000_000 < sizes[StockZStandard]


def test_a_damaged_item_fails_the_load(tmp_path: Path) -> None:
    state = {"weights": torch.randn(100_000)}
    save(state, tmp_path, ZStandard())
    (data,) = tmp_path.glob("*.distcp")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(CheckpointException) as caught:
        load(state, tmp_path)
    assert [type(error) for error, _ in caught.value.failures.values()] == [CheckpointCorruptError]


def test_a_disk_that_is_full_fails_the_save(tmp_path: Path) -> None:
    class Full:
        """Replaces the stream of a file on such a disk."""

        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            pass

        def close(self) -> None:
            pass

    stream: Any = ZStandard().transform_to(Full())  # type: ignore[arg-type]
    with pytest.raises((OSError, RuntimeError)):
        torch.save(torch.randn(500_000), stream)
    with pytest.raises(OSError, match="No space"):
        stream.close()


def test_a_registry_finds_it_by_its_descriptor() -> None:
    extension = ZStandard(level=5, threads=3, byte_planes=False)
    assert extension.get_descriptor() == "aioflux.zstd/1"
    (found,) = registry().from_descriptor_list([extension.get_descriptor()])
    assert found == ZStandard()
    with pytest.raises(ValueError, match="install a newer one"):
        registry().from_descriptor_list(["aioflux.zstd/2"])


def test_it_crosses_to_other_processes() -> None:
    extension = ZStandard(level=5, threads=3, byte_planes=False)
    assert pickle.loads(pickle.dumps(extension)) == extension


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"level": 23}, "level must be"), ({"level": -101}, "not -101"), ({"threads": 0}, "threads")],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ZStandard(**settings)


def test_a_missing_zstandard_is_reported_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'aioflux-storage\[compression\]'"):
        ZStandard()


def test_nothing_is_imported_before_it_is_used() -> None:
    code = "import aioflux.checkpoint, sys; print({'numpy', 'torch', 'zstandard'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"

"""States to save, helpers to compare states, and loads with PyTorch's own reader."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import SavePlanner

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator
    from pathlib import Path

    from aioflux.testing import GCSServer

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex128,
    torch.complex64,
]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def small_state(seed: int = 0) -> dict[str, Any]:
    """Some tensors and values, which differ for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(64, 48, generator=generator),
            "bias": torch.randn(48, generator=generator),
            "scale": torch.tensor(float(seed)),
        },
        "step": seed,
        "names": ["a", str(seed)],
    }


def state_of_all_kinds(seed: int = 0) -> dict[str, Any]:
    """Every dtype and shape, and tensors that are not contiguous in memory."""
    generator = torch.Generator().manual_seed(seed)

    def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        values = torch.randint(0, 2, (num_bytes,), generator=generator, dtype=torch.uint8)
        return values.view(dtype).reshape(shape)

    base = torch.randn(20, 30, generator=generator)
    waves = torch.view_as_complex(torch.randn(5, 2, generator=generator))
    return {
        "dtypes": {str(dtype): make(dtype, 3, 5) for dtype in DTYPES},
        "shapes": {"zero": make(torch.float32), "none": make(torch.int64, 0, 4)},
        "views": {
            "base": base,
            "rows": base[3:7],
            "columns": base[:, 4:6],
            "strided": base[::2, ::3],
            "turned": base.t(),
            "spread": base[:1].expand(4, 30),
            "nhwc": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "conjugated": waves.conj(),
            "negated": waves.conj().imag,
            "parameter": torch.nn.Parameter(base[0].clone()),
        },
        "step": seed,
        "values": [None, 1.5, ("a", b"b")],
    }


def blank(state: Any) -> Any:
    """A state to load into: zeros instead of tensors, None instead of other values."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    return None


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_equal(value, right[key])
    elif isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert torch.equal(raw(left), raw(right))
    else:
        assert left == right


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Ignore the warnings of DCP about a missing process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(state: dict[str, Any], writer: dcp.StorageWriter, **options: Any) -> Any:
    with no_warnings():
        return dcp.save(state, storage_writer=writer, **options)


def forget_cached_plans() -> None:
    """Clear the plans that planners cache for the whole process."""
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{name}").clear()


def copy_down(server: GCSServer, prefix: str, folder: Path) -> Path:
    """Copy the objects of a checkpoint to a folder, without HTTP."""
    for key in server.keys("bucket", prefix):
        path = folder / key.removeprefix(prefix).lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.get("bucket", key))
    return folder


def stock_load(folder: Path, like: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Load with PyTorch's FileSystemReader."""
    loaded = blank(like)
    with no_warnings():
        dcp.load(loaded, storage_reader=FileSystemReader(folder, **options))
    return loaded


class UnpicklableError(Exception):
    """An error that cannot be pickled, as some libraries raise."""

    def __init__(self, code: int, where: io.StringIO) -> None:
        super().__init__(f"code {code}")
        self.where = where

    def __reduce__(self) -> Any:
        raise TypeError("this error cannot be pickled")

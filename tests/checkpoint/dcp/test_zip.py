"""The memory of a tensor is found in what torch.save wrote, from its first bytes."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.checkpoint._items import encode_tensor
from aioflux.checkpoint.dcp._zip import HEAD_SIZE_BYTES, RawTensor, find_tensor

DTYPES = sorted(
    {
        each
        for each in vars(torch).values()
        if type(each) is torch.dtype and "q" not in str(each) and "bits" not in str(each)
    }
    - {
        torch.float4_e2m1fn_x2,
        *(getattr(torch, f"{s}int{n}") for s in ("", "u") for n in range(1, 8)),
    },
    key=str,
)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 2, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def memory(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3, 4), (1,) * 12])
def test_the_memory_of_a_tensor_is_found(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = made(dtype, shape)
    item = saved(tensor)
    found = find_tensor(item[:HEAD_SIZE_BYTES])
    assert found is not None
    assert (found.dtype, found.shape) == (str(dtype).removeprefix("torch."), shape)
    size = tensor.numel() * dtype.itemsize
    assert item[found.start : found.start + size] == memory(tensor)


def test_items_of_ours_are_found_where_they_say() -> None:
    item = encode_tensor(torch.arange(6.0).reshape(2, 3))
    data = b"".join(item.segments)
    assert find_tensor(data[:HEAD_SIZE_BYTES]) == RawTensor("float32", (2, 3), item.data_start)


def test_a_zip_whose_headers_tell_sizes_is_followed() -> None:
    source = zipfile.ZipFile(io.BytesIO(saved(torch.arange(5))))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    found = find_tensor(file.getvalue()[:HEAD_SIZE_BYTES])
    assert found is not None
    data = file.getvalue()[found.start : found.start + 40]
    assert data == memory(torch.arange(5))


UNUSUAL: dict[str, Any] = {
    "view": torch.arange(10)[2:5],
    "transposed": torch.ones(3, 4).t(),
    "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "sparse": torch.ones(3, 3).to_sparse(),
    "number": 3,
    "dictionary": {"a": torch.ones(3)},
    "meta": torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("value", UNUSUAL.values(), ids=UNUSUAL)
def test_what_is_not_one_plain_tensor_is_left_to_torch_load(value: Any) -> None:
    assert find_tensor(saved(value)) is None


def test_a_compressed_zip_is_left_to_torch_load() -> None:
    source = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(500))))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert find_tensor(file.getvalue()) is None


def test_the_other_byte_order_is_left_to_torch_load() -> None:
    item = saved(torch.ones(3))
    assert find_tensor(item.replace(b"little", b"biggie")) is None


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


def test_a_hostile_pickle_is_not_run() -> None:
    hostile = pickle.dumps(Runs(), protocol=2)
    name = b"archive/data.pkl"
    head = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, 0, 0, 0, 0, 0, 0, 0, len(name), 0)
    assert find_tensor(head + name + hostile + bytes(500)) is None
    assert not os.path.exists("/tmp/never")


ITEM = saved(torch.arange(40.0).reshape(5, 8))
FOUND = find_tensor(ITEM[:HEAD_SIZE_BYTES])


@settings(max_examples=300)
@given(st.integers(0, 710), st.binary(min_size=1, max_size=8), st.integers(0, 1024))
def test_damage_is_found_or_left_to_torch_load(at: int, new: bytes, cut: int) -> None:
    damaged = (ITEM[:at] + new + ITEM[at + len(new) :])[:cut]
    found = find_tensor(damaged)
    assert found is None or isinstance(found, RawTensor)


def test_a_short_head_tells_nothing() -> None:
    assert FOUND is not None
    assert all(find_tensor(ITEM[:cut]) is None for cut in range(FOUND.start - 1))

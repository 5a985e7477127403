"""The memory of a tensor is found in what torch.save wrote, from its first bytes."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.checkpoint._format.tensor_zip import (
    HEAD_SIZE_BYTES,
    ZippedTensor,
    compare_records,
    find_tensor,
)
from aioflux.checkpoint._save.items import encode_tensor

if TYPE_CHECKING:
    from pathlib import Path

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


def test_tensors_of_encoded_items_are_found() -> None:
    item = encode_tensor(torch.arange(6.0).reshape(2, 3))
    data = b"".join(item.segments)
    assert find_tensor(data[:HEAD_SIZE_BYTES]) == ZippedTensor("float32", (2, 3), item.data_start)


def test_headers_with_sizes_are_followed() -> None:
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
def test_other_values_are_left_to_torch_load(value: Any) -> None:
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
    """Pickles as a call that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def find(pickled: bytes) -> ZippedTensor | None:
    """Look for the tensor of a pickle in a zip that holds just that and some bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        target.writestr("archive/data.pkl", pickled)
        target.writestr("archive/data/0", bytes(64))
    return find_tensor(file.getvalue())


def test_a_hostile_pickle_is_not_run(tmp_path: Path) -> None:
    assert find(pickle.dumps(Runs(tmp_path / "ran"), protocol=2)) is None
    assert not (tmp_path / "ran").exists()


PLAIN = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(2, 3)))).read("archive/data.pkl")
ODD = {
    "of another kind": (b"storageq", b"sturageq"),
    "storage": (b"FloatStorage", b"CrazyStorage"),
    "module": (b"ctorch\nFloat", b"ctorcy\nFloat"),
    "untyped": (b"ctorch\nFloatStorage\n", b"ctorch.storage\nUntypedStorage\n"),
    "on no device": (b"X\x03\x00\x00\x00cpu", b"X\x04\x00\x00\x00meta"),
    "negative": (b"K\x02K\x03\x86", b"J\xff\xff\xff\xffK\x03\x86"),
    "of fewer strides": (b"K\x02K\x03\x86", b"K\x06\x85"),
    "with hooks": (b"ccollections\nOrderedDict\n", b"cother\nOrderedDict\n"),
    "no storage": (b"X\x01\x00\x00\x000", b"K\x00"),
    "short reference": (b"K\x06t", b"t"),
    "an instance": (b")R", b")\x81"),
    "filled": (b")R", b")}b"),
    "with keys": (b")R", b"}(]K\x01u"),
    "key without value": (b")R", b"}(K\x01u"),
    "storage named by a list": (b"ctorch\nFloatStorage\n", b"X\x05\x00\x00\x00torch]\x86"),
}


def test_a_plain_pickle_is_understood() -> None:
    found = find(PLAIN)
    assert found is not None
    assert found[:2] == ("float32", (2, 3))


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_a_tensor_that_is_odd_is_left_to_torch_load(change: tuple[bytes, bytes]) -> None:
    assert change[0] in PLAIN
    assert find(PLAIN.replace(*change)) is None


def test_machines_of_the_other_byte_order_leave_it_to_torch_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    assert find(PLAIN) is None


ITEM = saved(torch.arange(40.0).reshape(5, 8))
FOUND = find_tensor(ITEM[:HEAD_SIZE_BYTES])


@settings(max_examples=150)
@given(st.integers(0, 710), st.binary(min_size=1, max_size=8), st.integers(0, 1024))
def test_damage_is_found_or_left_to_torch_load(at: int, new: bytes, cut: int) -> None:
    damaged = (ITEM[:at] + new + ITEM[at + len(new) :])[:cut]
    found = find_tensor(damaged)
    assert found is None or isinstance(found, ZippedTensor)


def test_nothing_is_found_in_a_short_head() -> None:
    assert FOUND is not None
    assert all(find_tensor(ITEM[:cut]) is None for cut in range(FOUND.start - 1))


@pytest.mark.parametrize("is_zip", [False, True], ids=["before torch 1.6", "zip"])
def test_records_without_a_crc32_are_not_compared(is_zip: bool) -> None:
    data = saved_without_crc32([1, 2]) if is_zip else pickle.dumps([1, 2])
    with mmap.mmap(-1, len(data)) as file:
        file[:] = data
        compare_records(file, "gs://bucket/model.pt")
        assert file.tell() == 0


def saved_without_crc32(value: Any) -> bytes:
    file = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, file)
    finally:
        torch.serialization.set_crc32_options(before)
    return file.getvalue()

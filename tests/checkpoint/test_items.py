"""Items as torch.save writes them: what torch.load makes of them, and what is copied."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioflux.checkpoint._save.items import (
    encode_object,
    encode_tensor,
)

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex128,
    torch.complex64,
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (7,), (3, 5), (2, 1, 3)]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    numel = int(torch.Size(shape).numel())
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def joined(item: Any) -> bytes:
    data = b"".join(item.segments)
    assert len(data) == item.length
    return data


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
    assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_load_reads_an_item(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(dtype, shape)
    data = joined(encode_tensor(tensor))
    for weights_only in (True, False):
        assert_same(torch.load(io.BytesIO(data), weights_only=weights_only), tensor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_entries_are_those_of_torch_save(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Names, order and contents, but for the id, which torch.save takes from checksums."""
    tensor = tensor_of(dtype, shape)
    theirs, ours = zipfile.ZipFile(io.BytesIO(encode_object(tensor))), encode_tensor(tensor)
    archive = zipfile.ZipFile(io.BytesIO(joined(ours)))
    assert archive.namelist() == theirs.namelist()
    for name in archive.namelist():
        if name == "archive/data/0":
            start = ours.data_start
            assert joined(ours)[start : start + ours.data_size] == theirs.read(name)
        elif name.endswith("serialization_id"):
            assert len(archive.read(name)) == len(theirs.read(name))
        else:
            assert archive.read(name) == theirs.read(name)


@given(
    shape=st.lists(st.integers(0, 300), max_size=4).map(tuple),
    dtype=st.sampled_from([torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex128]),
)
def test_entries_are_aligned_and_the_archive_is_whole(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    num_bytes = int(torch.Size(shape).numel()) * dtype.itemsize
    if num_bytes > 1_000_000:
        return
    item = encode_tensor(torch.zeros(shape, dtype=dtype))
    assert item.data_start % 64 == 0
    data = joined(item)
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.getinfo("archive/data/0").file_size == num_bytes
    for entry in archive.infolist():
        name_and_extra = data[entry.header_offset + 26 : entry.header_offset + 30]
        lengths = int.from_bytes(name_and_extra[:2], "little"), name_and_extra[2:]
        start = entry.header_offset + 30 + lengths[0] + int.from_bytes(lengths[1], "little")
        assert start % 64 == 0
        assert entry.compress_type == zipfile.ZIP_STORED


def test_the_memory_of_the_tensor_is_not_copied() -> None:
    tensor = torch.zeros(1000)
    before, view, after = encode_tensor(tensor).segments
    tensor[0] = 1
    assert isinstance(view, memoryview)
    assert view[:4] == b"\x00\x00\x80\x3f"
    assert isinstance(before, bytes)
    assert isinstance(after, bytes)


def test_an_item_keeps_its_tensor_alive() -> None:
    item = encode_tensor(torch.arange(100_000))
    assert torch.load(io.BytesIO(joined(item)))[99_999] == 99_999


def test_a_view_of_a_larger_storage_is_written_alone() -> None:
    base = torch.randn(100, 30)
    item = encode_tensor(base[10:12])
    assert item.data_size == 2 * 30 * 4
    assert_same(torch.load(io.BytesIO(joined(item))), base[10:12])


def test_parameters_are_written_as_plain_tensors() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    loaded = torch.load(io.BytesIO(joined(encode_tensor(parameter))))
    assert type(loaded) is torch.Tensor
    assert_same(loaded, parameter.detach())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6).t(),
        torch.randn(4)[::2],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.empty(3, device="meta"),
    ],
    ids=["transposed", "strided", "conjugated", "negated", "meta"],
)
def test_what_is_not_as_it_stands_in_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="unless it is contiguous and on the CPU"):
        encode_tensor(tensor)


def test_sparse_tensors_are_left_to_torch_save() -> None:
    sparse = torch.eye(5).to_sparse()
    item = encode_tensor(sparse)
    assert (item.data_start, item.data_size) == (0, 0)
    assert torch.equal(torch.load(io.BytesIO(joined(item))).to_dense(), torch.eye(5))


def test_items_of_a_file_are_mapped(tmp_path: Path) -> None:
    tensor = torch.randn(100, 100)
    place = tmp_path / "item.pt"
    place.write_bytes(joined(encode_tensor(tensor)))
    assert_same(torch.load(place, mmap=True), tensor)


@pytest.mark.parametrize("num_bytes", [2**32 - 2, 2**32 - 1, 5 * 2**30], ids=str)
def test_more_than_four_gigabytes_are_read_back(tmp_path: Path, num_bytes: int) -> None:
    """If 32 bits do not hold the sizes and offsets. The file is sparse: it takes no space."""
    item = encode_tensor(torch.empty(num_bytes, dtype=torch.uint8))
    before, _, after = item.segments
    place = tmp_path / "item.pt"
    start = len(before)
    with place.open("wb") as file:
        file.write(before)
        file.seek(start + num_bytes - 1)
        file.write(b"\x07" + after)
    loaded = torch.load(place, mmap=True)
    assert (loaded.numel(), loaded[0], loaded[-1]) == (num_bytes, 0, 7)
    entry = zipfile.ZipFile(place).getinfo("archive/data/0")
    assert entry.file_size == entry.compress_size == num_bytes
    assert zipfile.ZipFile(place).read("archive/version") == b"3\n"


def test_objects_are_what_torch_save_writes() -> None:
    state = {"step": 7, "rng": torch.arange(3), "names": ["a"]}
    loaded = torch.load(io.BytesIO(encode_object(state)))
    assert loaded["step"] == 7
    assert torch.equal(loaded["rng"], torch.arange(3))


def test_no_type_hint_of_ours_is_pickled() -> None:
    archive = zipfile.ZipFile(io.BytesIO(joined(encode_tensor(torch.ones(2)))))
    opcodes = archive.read("archive/data.pkl")
    assert b"typing" not in opcodes
    assert b"aioflux" not in opcodes
    with pytest.raises(pickle.UnpicklingError, match="persistent"):
        pickle.loads(opcodes)

"""Tensors and objects in the format of torch.save, encoded without a copy of the tensor's data.

An encoded tensor is a zip archive of uncompressed entries. The bytes before and after the tensor's
data are the same for all tensors of one dtype and shape, and are computed once.

    [local headers, data.pkl, ..., padding to 64 | data of the tensor | version, id, directory]
     ^ start of the item                         ^ data_start

`torch.load` reads the archive, also with `weights_only` and `mmap`. The crc32 of the tensor's data
is 0: torch.load does not compare it, and torch.save with
`torch.serialization.set_crc32_options(False)` does not write it either. The crc32c of the data
object replaces it.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from aioflux.checkpoint._format.codec import ALIGNMENT_BYTES, EncodedItem
from aioflux.checkpoint._format.nesting import naming_unpicklable

_ROOT: Final = "archive/"
"""Prefix of all entry names, the same that torch.save writes to a file object."""

TENSOR_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Tensor classes that have no state besides their elements."""

_TYPED: Final = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}
"""Storage class of each dtype that has one. Tensors of other dtypes are pickled in torch's newer
form, which contains the dtype and no storage class."""

_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<IHHHHIIH")
_END64: Final = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64: Final = struct.Struct("<IIQI")
_EXTRA: Final = struct.Struct("<HH")

_UTF8_NAMES: Final = 0x0800
_VERSION64: Final = 45
"""Version of the zip format that supports 64-bit sizes."""

_SIZES64: Final = 0x0001
_PADDING: Final = 0x4246
"""Id of the extra field that pads a header to align the data after it, as in torch.save."""

_MAX32: Final = 0xFFFFFFFF
"""Value of a 32-bit field whose number is in a 64-bit field instead."""

_YEAR_1980: Final = 0x0021
"""1 January 1980, the earliest date of the zip format."""


@dataclass(frozen=True, slots=True)
class _Envelope:
    """The bytes before and after the data of every tensor of one dtype and shape."""

    before: bytes
    after: bytes


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry in the central directory of an archive."""

    name: bytes
    offset: int
    size: int
    crc32: int


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided, not quantized, and exactly of one of `TENSOR_TYPES`."""
    return (
        tensor.layout is torch.strided and not tensor.is_quantized and type(tensor) in TENSOR_TYPES
    )


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise an error for a tensor that could be saved but never loaded.

    Raises:
        TypeError: The tensor is sparse, nested or quantized, or its dtype has no size in torch.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
        raise TypeError(
            f"{name!r} is a {kind}, which no load could read; save its indices and values as "
            "tensors of their own, or make it dense with .to_dense() or .to_padded_tensor()"
        )
    if tensor.is_quantized:
        raise TypeError(
            f"{name!r} is quantized ({tensor.dtype}), which no load could read; save .int_repr(), "
            "the scales and zero points as tensors of their own, or .dequantize()"
        )
    dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        try:
            torch.iinfo(dtype)
        except TypeError as exc:  # torch.uint4, torch.bits8 and others
            raise TypeError(
                f"{name!r} is of {dtype}, which torch.distributed.checkpoint cannot save; save "
                f".view(torch.uint8), and load with .view({dtype})"
            ) from exc


def encode_subclass(name: str, tensor: torch.Tensor) -> bytes:
    """Return the torch.save bytes of a tensor subclass, after a check that loads accept it.

    Raises:
        TypeError: A load with `weights_only=True` would reject a class in the pickle.
    """
    data = encode_object(tensor, name)
    if rejected := torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)):
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__}, whose pickle has classes that loads reject: "
            f"{', '.join(sorted(rejected))}; allow the classes at saves and loads by "
            "torch.serialization.add_safe_globals, or save a plain tensor"
        )
    return data


def find_ties(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Map the index of each tied tensor to the index of the earlier tensor that shares its memory.

    Tied tensors have the same elements in the same order. Views that only overlap are not tied.
    """
    ties: dict[int, int] = {}
    first_at: dict[int, int] = {}
    by_address: dict[int, dict[Any, int]] = {}
    for index, tensor in enumerate(tensors):
        if not has_plain_memory(tensor) or not tensor.numel():
            continue
        if not (address := tensor.data_ptr()):
            continue
        if (other := first_at.setdefault(address, index)) != index:
            by_geometry = by_address.setdefault(address, {_geometry(tensors[other]): other})
            if (first := by_geometry.setdefault(_geometry(tensor), index)) != index:
                ties[index] = first
    return ties


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = (tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), flags


def encode_tensor(tensor: torch.Tensor) -> EncodedItem:
    """Return the torch.save bytes of a tensor.

    The memory of a tensor with `has_plain_memory` is referenced, not copied. Other tensors are
    pickled by torch.save, whatever their device or strides.

    Args:
        tensor: A contiguous tensor on the CPU, without a pending conjugation or negation. If it is
            a view of a larger storage, the item contains only the elements of the view.

    Raises:
        ValueError: The tensor is not contiguous, not on the CPU, or has a pending operation.
    """
    if not has_plain_memory(tensor):
        data = encode_object(tensor)
        return EncodedItem((data,), len(data))
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"a tensor on {tensor.device} cannot be encoded without a copy unless it is contiguous "
            "and on the CPU; call .cpu(), .resolve_conj(), .resolve_neg() and .contiguous() first"
        )
    envelope = _envelope(tensor.dtype, tensor.shape)
    before, after, size = envelope.before, envelope.after, tensor.nbytes
    segments = (before, tensor_memory(tensor), after) if size else (before, after)
    length = len(before) + size + len(after)
    return EncodedItem(segments, length, len(before), size, tensor.itemsize)


def encode_object(obj: Any, name: str = "") -> bytes:
    """Return the torch.save bytes of any object.

    Raises:
        TypeError: The object or a part of it cannot be pickled. `name` is a part of the message.
    """
    buffer = io.BytesIO()
    with naming_unpicklable(obj, name):
        torch.save(obj, buffer)
    return buffer.getvalue()


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous tensor; the view keeps the storage alive."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@lru_cache(maxsize=8192)
def _envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> _Envelope:
    numel = 1
    for length in shape:
        numel *= length
    pickled = _pickle(dtype, shape, numel)
    before, entries = bytearray(), list[_Entry]()
    for name, data in (
        ("data.pkl", pickled),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % ALIGNMENT_BYTES),
        ("byteorder", sys.byteorder.encode()),
    ):
        _append(before, entries, name, data)
    num_bytes = numel * dtype.itemsize
    entries.append(_entry("data/0", len(before), num_bytes, 0))
    before += _local_header(entries[-1])

    start = len(before) + num_bytes
    after = bytearray()
    # torch.save writes a hash of all names and checksums, which torch.load only logs. Here the id
    # depends only on dtype and shape.
    identity = b"%040d" % zlib.crc32(pickled)
    for name, data in (("version", b"3\n"), (".data/serialization_id", identity)):
        _append(after, entries, name, data, start=start)
    after += _directory(entries, start + len(after))
    return _Envelope(bytes(before), bytes(after))


class _StoragePlaceholder:
    """Object that `_TensorPickler` pickles as a reference to the storage."""


class _TensorPickler(pickle.Pickler):
    """Pickler for a tensor whose storage is the entry `data/0`."""

    def __init__(self, file: io.BytesIO, kind: type, num_elements: int) -> None:
        super().__init__(file, protocol=2)
        self._storage = ("storage", kind, "0", "cpu", num_elements)

    def persistent_id(self, obj: object) -> object:
        return self._storage if isinstance(obj, _StoragePlaceholder) else None


class _Rebuilt:
    """Object whose pickle is a call of the function that builds the tensor in torch.load."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def _pickle(dtype: torch.dtype, shape: tuple[int, ...], numel: int) -> bytes:
    # Not OrderedDict[str, Any](): the type arguments would become part of the pickle.
    hooks: OrderedDict[str, Any] = OrderedDict()
    geometry = (_StoragePlaceholder(), 0, tuple(shape), _strides(shape), False, hooks)
    kind: Any = _TYPED.get(dtype)
    if kind is not None:
        rebuilt = _Rebuilt(_rebuild_tensor_v2, geometry)
    else:
        kind, numel = torch.UntypedStorage, numel * dtype.itemsize
        rebuilt = _Rebuilt(_rebuild_tensor_v3, (*geometry, dtype))
    buffer = io.BytesIO()
    _TensorPickler(buffer, kind, numel).dump(rebuilt)
    return buffer.getvalue()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; as in torch, a length of 0 counts as 1."""
    strides, step = list[int](), 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _entry(name: str, offset: int, size: int, crc32: int) -> _Entry:
    return _Entry((_ROOT + name).encode(), offset, size, crc32)


def _append(
    out: bytearray, entries: list[_Entry], name: str, data: bytes, *, start: int = 0
) -> None:
    """Append a small entry to `out`, which begins at offset `start` of the archive."""
    entries.append(_entry(name, start + len(out), len(data), zlib.crc32(data)))
    out += _local_header(entries[-1]) + data


def _local_header(entry: _Entry) -> bytes:
    """Return the header of an entry, padded so that the data after it is aligned."""
    is_long = entry.size >= _MAX32
    extra = struct.pack("<HHQQ", _SIZES64, 16, entry.size, entry.size) if is_long else b""
    end = entry.offset + _LOCAL.size + len(entry.name) + len(extra) + _EXTRA.size
    num_padding = -end % ALIGNMENT_BYTES
    extra += _EXTRA.pack(_PADDING, num_padding) + b"Z" * num_padding
    size = _MAX32 if is_long else entry.size
    version = _VERSION64 if is_long else 0
    fields = (version, _UTF8_NAMES, 0, 0, _YEAR_1980, entry.crc32, size, size)
    return _LOCAL.pack(0x04034B50, *fields, len(entry.name), len(extra)) + entry.name + extra


def _directory(entries: Sequence[_Entry], start: int) -> bytes:
    """Return the central directory, which begins at offset `start`, and the end records."""
    records = b"".join(map(_central_header, entries))
    num, end = len(entries), start + len(records)
    return b"".join(
        (
            records,
            _END64.pack(
                0x06064B50, 44, _VERSION64, _VERSION64, 0, 0, num, num, len(records), start
            ),
            _LOCATOR64.pack(0x07064B50, 0, end, 1),
            _END.pack(0x06054B50, 0, 0, num, num, len(records), min(start, _MAX32), 0),
        )
    )


def _central_header(entry: _Entry) -> bytes:
    longs = list[int]()
    size = offset = _MAX32
    if entry.size < _MAX32:
        size = entry.size
    else:
        longs += [entry.size, entry.size]
    if entry.offset < _MAX32:
        offset = entry.offset
    else:
        longs.append(entry.offset)
    extra = struct.pack(f"<HH{len(longs)}Q", _SIZES64, 8 * len(longs), *longs) if longs else b""
    version = _VERSION64 if longs else 0
    fields = (version, _UTF8_NAMES, 0, 0, _YEAR_1980, entry.crc32, size, size, len(entry.name))
    end = (len(extra), 0, 0, 0, 0, offset)
    return _CENTRAL.pack(0x02014B50, version, *fields, *end) + entry.name + extra

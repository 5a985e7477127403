"""Tensors and objects as torch.save writes them, without a copy of the tensor.

A tensor becomes a zip archive of STORED entries: the bytes before and after its own are computed
once for all tensors of one dtype and shape, and its own are not copied.

    [local headers, data.pkl, ..., padding to 64 | bytes of the tensor | version, id, directory]
     ^ start of the item                         ^ data_start

`torch.load` reads it, with `weights_only` and `mmap` too. It never looks at the crc32 of the
tensor's bytes, which is left at 0, as `torch.serialization.set_crc32_options(False)` lets
torch.save do; the crc32c of the data object replaces it.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from aioflux.checkpoint._save.packing import ALIGNMENT_BYTES, EncodedItem

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "TENSOR_TYPES",
    "check_storable",
    "encode_object",
    "encode_subclass",
    "encode_tensor",
    "find_ties",
    "has_plain_memory",
    "tensor_memory",
]

_ROOT: Final = "archive/"
"""Prefix of all names in an archive that torch.save writes to a file object."""

TENSOR_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Tensor classes without state besides their elements."""

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
"""Dtypes whose storages have a class of their own; all others are pickled in the newer form, which
names the dtype instead."""

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
"""Id of the extra field that fills the space before an aligned entry; the one of torch.save."""

_MAX32: Final = 0xFFFFFFFF
"""Written where the 64-bit field holds the number."""

_YEAR_1980: Final = 0x0021
"""1 January 1980, the first day of the format."""


@dataclass(frozen=True, slots=True)
class _Envelope:
    """The bytes before and after those of every tensor of one dtype and shape."""

    before: bytes
    after: bytes


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of an archive, as its directory lists it."""

    name: bytes
    offset: int
    size: int
    crc32: int


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has nothing but elements in memory: dense, and not of a subclass."""
    return (
        tensor.layout is torch.strided and not tensor.is_quantized and type(tensor) in TENSOR_TYPES
    )


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise an error for a tensor that could be saved but never loaded.

    Raises:
        TypeError: It is sparse, nested or quantized; the message names it.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise TypeError(
            f"{name!r} is a tensor {kind}, which no load could read; save its indices and values "
            "as tensors of their own, or make it dense with .to_dense() or .to_padded_tensor()"
        )
    if tensor.is_quantized:
        raise TypeError(
            f"{name!r} is quantized ({tensor.dtype}), which no load could read; save .int_repr(), "
            "the scales and zero points as tensors of their own, or .dequantize()"
        )


def encode_subclass(name: str, tensor: torch.Tensor) -> bytes:
    """Return the torch.save bytes of a tensor subclass, after a check that loads accept it.

    Raises:
        TypeError: A load would reject its classes; the message names it.
    """
    data = encode_object(tensor)
    if refused := torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)):
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__}, and loads reject {', '.join(sorted(refused))} "
            "in it: allow them by torch.serialization.add_safe_globals, at the save and at loads, "
            "or save a plain tensor"
        )
    return data


def find_ties(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Map the index of each tensor that shares the memory of an earlier one to the earlier index.

    The same memory means the same elements in the same order. Views that overlap are not tied.
    """
    ties: dict[int, int] = {}
    at: dict[int, int] = {}
    alike: dict[int, dict[Any, int]] = {}
    for number, tensor in enumerate(tensors):
        if not has_plain_memory(tensor) or not tensor.numel():
            continue
        if not (pointer := tensor.data_ptr()):
            continue
        if (other := at.setdefault(pointer, number)) != number:
            known = alike.setdefault(pointer, {_geometry(tensors[other]): other})
            if (first := known.setdefault(_geometry(tensor), number)) != number:
                ties[number] = first
    return ties


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = (tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), flags


def encode_tensor(tensor: torch.Tensor) -> EncodedItem:
    """Return the torch.save bytes of a tensor; its memory is referenced, not copied.

    Args:
        tensor: On the CPU, contiguous, and without a pending conjugation or negation. It may be a
            view of a larger storage: only its own elements are part of the item.

    Raises:
        ValueError: The tensor is not of this kind.
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


def encode_object(obj: Any) -> bytes:
    """Return the torch.save bytes of any object."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor; they keep its storage alive."""
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
    # torch.save hashes names and checksums of all entries for the log of torch.load. This id
    # depends on dtype and shape alone.
    identity = b"%040d" % zlib.crc32(pickled)
    for name, data in (("version", b"3\n"), (".data/serialization_id", identity)):
        _append(after, entries, name, data, start=start)
    after += _directory(entries, start + len(after))
    return _Envelope(bytes(before), bytes(after))


class _StoragePlaceholder:
    """Replaces the storage of the tensor while it is pickled."""


class _TensorPickler(pickle.Pickler):
    """Pickles a tensor whose storage has the number 0 and is in another entry."""

    def __init__(self, file: io.BytesIO, kind: type, num_elements: int) -> None:
        super().__init__(file, protocol=2)
        self._storage = ("storage", kind, "0", "cpu", num_elements)

    def persistent_id(self, obj: object) -> object:
        return self._storage if isinstance(obj, _StoragePlaceholder) else None


class _Rebuilt:
    """Pickles as a call of the function with which torch.load builds the tensor."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def _pickle(dtype: torch.dtype, shape: tuple[int, ...], numel: int) -> bytes:
    """Return the bytes of data.pkl."""
    # Not OrderedDict[str, Any](), whose type arguments would be pickled, too.
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
    """Append a small entry to `out`, whose first byte has the offset `start` in the archive."""
    entries.append(_entry(name, start + len(out), len(data), zlib.crc32(data)))
    out += _local_header(entries[-1]) + data


def _local_header(entry: _Entry) -> bytes:
    """Return the header before the data of an entry, padded so that they are aligned."""
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
    """Return the central directory, which begins at `start`, and the end of the archive."""
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

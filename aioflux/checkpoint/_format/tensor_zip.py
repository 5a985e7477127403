"""The memory of a tensor in the zip that torch.save wrote, found by its first bytes. Pure.

    local header | data.pkl | ... | local header of data/0 | the tensor's bytes | ...
                   ^ dtype, shape and strides                ^ `ZippedTensor.start`

torch.save writes headers before it knows the sizes, so that a local header has none, and a
descriptor follows the bytes (PKWARE's APPNOTE 4.4.4, bit 3). data.pkl ends with its pickle, and the
other entries before the tensor are short. The pickle is read without running code.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aioflux.checkpoint._format.safe_pickle import AllowedGlobals, PickleError, run_pickle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["HEAD_SIZE_BYTES", "ZippedTensor", "find_tensor", "is_dense"]

HEAD_SIZE_BYTES: Final = 1024
"""Bytes needed to find the tensor, which torch 2.0 to 2.13 write at byte 640 or 704."""

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_IS_STREAMED: Final = 0x0008
_KNOWN_FLAGS: Final = _IS_STREAMED | 0x0800

_DTYPES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_UNTYPED: Final = ("torch.storage", "UntypedStorage")


class ZippedTensor(NamedTuple):
    """Dtype, shape and offset of a contiguous tensor in its item."""

    dtype: str
    """Name of its dtype, such as "float32"."""
    shape: tuple[int, ...]
    """Its sizes."""
    start: int
    """First byte of its memory in the item."""


class _StorageRef(NamedTuple):
    dtype: str
    key: str


class _PickledTensor(NamedTuple):
    storage: _StorageRef
    dtype: str
    shape: tuple[int, ...]


class _TensorGlobals(AllowedGlobals):
    """The globals in the pickle of a plain tensor."""

    def find(self, module: str, name: str) -> Any:
        return module, name

    def call(self, found: Any, arguments: tuple[Any, ...]) -> Any:
        if found == ("collections", "OrderedDict") and not arguments:
            return ()  # of hooks: a plain tensor has none
        if found == ("torch._utils", "_rebuild_tensor_v2") and len(arguments) == 6:
            return _pickled_tensor(*arguments[:4], arguments[5])
        if found == ("torch._utils", "_rebuild_tensor_v3") and len(arguments) == 7:
            return _pickled_tensor(*arguments[:4], arguments[5], arguments[6])
        return super().call(found, arguments)

    def persistent_load(self, persistent_id: Any) -> Any:
        if type(persistent_id) is not tuple or len(persistent_id) != 5:
            raise PickleError("it refers to no storage")
        kind, storage, key, location, _ = persistent_id
        if kind != "storage" or type(key) is not str or location == "meta":
            raise PickleError("it refers to no storage")
        if storage == _UNTYPED:
            return _StorageRef("", key)
        if type(storage) is tuple and storage[0] == "torch" and storage[1] in _DTYPES:
            return _StorageRef(_DTYPES[storage[1]], key)
        raise PickleError("its storage is unusual")


def _pickled_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, hooks: Any, dtype: Any = None
) -> Any:
    if type(storage) is not _StorageRef or offset != 0 or hooks != ():
        raise PickleError("it is a view")
    if not _is_shape(shape) or not _is_shape(stride) or len(shape) != len(stride):
        raise PickleError("its shape is none")
    if 0 not in shape and not is_dense(shape, stride):
        raise PickleError("it is not contiguous")
    if dtype is None and storage.dtype:
        return _PickledTensor(storage, storage.dtype, shape)
    if type(dtype) is tuple and dtype[0] == "torch" and not storage.dtype:
        return _PickledTensor(storage, dtype[1], shape)
    raise PickleError("its dtype is unusual")


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and all(type(each) is int and each >= 0 for each in value)


def is_dense(lengths: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements of these strides are contiguous."""
    expected = 1
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def find_tensor(head: bytes) -> ZippedTensor | None:
    """Return the tensor in an item that begins with `head`.

    Returns:
        None if `head` is too short, or if the item holds something else than one plain contiguous
        tensor that is not compressed: then `torch.load` must read the whole item.
    """
    tensor: Any = None
    if sys.byteorder != "little":
        return None
    for name, start in _entries(head):
        root, _, entry = name.partition("/")
        if entry == "data.pkl":
            try:
                tensor, _ = run_pickle(head[start:], _TensorGlobals())
            except PickleError:
                return None
        elif entry == "byteorder" and head[start : start + 6] != b"little":
            return None
        elif type(tensor) is _PickledTensor and name == f"{root}/data/{tensor.storage.key}":
            return ZippedTensor(tensor.dtype, tensor.shape, start)
    return None


def _entries(head: bytes) -> Iterator[tuple[str, int]]:
    """Yield name and first byte of the entries, as far as `head` and their headers allow."""
    at = 0
    while at + _LOCAL.size <= len(head):
        fields = _LOCAL.unpack_from(head, at)
        mark, _, flags, method, _, _, _, size, _, name_size, extra_size = fields
        begin = at + _LOCAL.size
        start = begin + name_size + extra_size
        if mark != b"PK\x03\x04" or method or flags & ~_KNOWN_FLAGS or start > len(head):
            return
        yield head[begin : begin + name_size].decode("utf-8", "replace"), start
        after = _descriptor_end(head, start) if flags & _IS_STREAMED else start + size
        if after is None:
            return
        at = after


def _descriptor_end(head: bytes, start: int) -> int | None:
    """Return the end of the descriptor of the entry whose bytes begin at `start`."""
    at = head.find(b"PK\x07\x08", start)
    while at >= 0 and at + _DESCRIPTOR.size <= len(head):
        if _DESCRIPTOR.unpack_from(head, at)[2] == at - start:
            end = at + _DESCRIPTOR.size
            # The sizes of an entry in the form for large files have 8 bytes each.
            return end if head[end : end + 2] == b"PK" else end + 8
        at = head.find(b"PK\x07\x08", at + 1)
    return None

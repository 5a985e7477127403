"""Zips that torch.save wrote: the location of a tensor's memory, and checks of entries. Pure.

    local header | data.pkl | ... | local header of data/0 | the tensor's bytes | ...
                   ^ dtype, shape and strides                ^ `ZippedTensor.start`

torch.save writes a local header before it knows the size of the entry. So the header has no size,
and a descriptor with the size follows the bytes of the entry (PKWARE's APPNOTE 4.4.4, bit 3). The
entries before the tensor are short, so the first bytes of the zip contain all of them. The pickle
is read without running code.

torch.save writes a CRC-32 for each entry. Neither torch.load nor torch's C++ reader compares it;
`compare_records` does.
"""

from __future__ import annotations

import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

from aioflux.checkpoint._format.safe_pickle import AllowedGlobals, PickleError, run_pickle
from aioflux.errors import ChecksumError

if TYPE_CHECKING:
    import mmap

HEAD_SIZE_BYTES: Final = 1024
"""Number of bytes to read to find the tensor. torch 2.0 to 2.13 write its memory at byte 640 or
704."""

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

ZIP_MAGIC: Final = b"PK\x03\x04"

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
"""Signature, and lengths of the name and of the extra field before the bytes (PKWARE's APPNOTE
4.3.7)."""

_IS_DIRECTORY: Final = 0x10
"""Attribute of MS-DOS; torch's reader reads no bytes of an entry that has it."""

_UNREADABLE: Final = (
    zipfile.BadZipFile,
    NotImplementedError,
    OverflowError,
    ValueError,
    struct.error,
    zlib.error,
)
"""Errors raised for a damaged directory, or for an archive that torch cannot read either."""


class ZippedTensor(NamedTuple):
    """Dtype, shape and offset of a contiguous tensor in its item."""

    dtype: str
    """For example "float32"."""
    shape: tuple[int, ...]
    start: int
    """First byte of the tensor's memory in the item."""


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

    def call(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        if target == ("collections", "OrderedDict") and not arguments:
            return ()  # the backward hooks, which a plain tensor does not have
        if target == ("torch._utils", "_rebuild_tensor_v2") and len(arguments) == 6:
            return _pickled_tensor(*arguments[:4], arguments[5])
        if target == ("torch._utils", "_rebuild_tensor_v3") and len(arguments) == 7:
            return _pickled_tensor(*arguments[:4], arguments[5], arguments[6])
        return super().call(target, arguments)

    def persistent_load(self, persistent_id: Any) -> Any:
        if type(persistent_id) is not tuple or len(persistent_id) != 5:
            raise PickleError("it refers to no storage")
        kind, storage, key, location, _ = persistent_id
        if kind != "storage" or type(key) is not str or location == "meta":
            raise PickleError("it refers to no storage")
        if storage == _UNTYPED:
            return _StorageRef("", key)
        if type(storage) is tuple and storage[0] == "torch" and type(storage[1]) is str:
            dtype = _DTYPES.get(storage[1])
            if dtype is not None:
                return _StorageRef(dtype, key)
        raise PickleError("its storage is unusual")


def _pickled_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, hooks: Any, dtype: Any = None
) -> Any:
    if type(storage) is not _StorageRef or offset != 0 or hooks != ():
        raise PickleError("it is a view")
    if not _is_shape(shape) or not _is_shape(stride) or len(shape) != len(stride):
        raise PickleError("its shape is invalid")
    if 0 not in shape and not is_dense(shape, stride):
        raise PickleError("it is not contiguous")
    if dtype is None and storage.dtype:
        return _PickledTensor(storage, storage.dtype, shape)
    if type(dtype) is tuple and dtype[0] == "torch" and not storage.dtype:
        return _PickledTensor(storage, dtype[1], shape)
    raise PickleError("its dtype is unusual")


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and all(type(size) is int and size >= 0 for size in value)


def is_dense(lengths: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor of these lengths and strides is contiguous."""
    expected = 1
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def find_tensor(head: bytes) -> ZippedTensor | None:
    """Return the tensor in an item that begins with `head`.

    Returns:
        The tensor; None if `head` is too short, if the item is anything but one plain contiguous
        uncompressed tensor, or on a big-endian machine. For None, `torch.load` must read the whole
        item.
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
    """Yield the name of each entry, and the offset of its bytes, as far as `head` reaches."""
    header_start: int | None = 0
    while header_start is not None and header_start + _LOCAL.size <= len(head):
        fields = _LOCAL.unpack_from(head, header_start)
        signature, _, flags, method, _, _, _, size, _, name_size, extra_size = fields
        name_start = header_start + _LOCAL.size
        start = name_start + name_size + extra_size
        if signature != b"PK\x03\x04" or method or flags & ~_KNOWN_FLAGS or start > len(head):
            return
        yield head[name_start : name_start + name_size].decode("utf-8", "replace"), start
        header_start = _descriptor_end(head, start) if flags & _IS_STREAMED else start + size


def _descriptor_end(head: bytes, start: int) -> int | None:
    """Return the end of the descriptor of the entry at `start`; None if `head` lacks it."""
    position = head.find(b"PK\x07\x08", start)
    while position >= 0 and position + _DESCRIPTOR.size <= len(head):
        if _DESCRIPTOR.unpack_from(head, position)[2] == position - start:
            end = position + _DESCRIPTOR.size
            # In Zip64 form the two sizes have 8 bytes each instead of 4.
            return end if head[end : end + 2] == b"PK" else end + 8
        position = head.find(b"PK\x07\x08", position + 1)
    return None


def is_stored(file: IO[bytes], size: int) -> bool:
    """Return whether a zip archive of `size` bytes has only uncompressed entries that fit into it.

    Raises:
        ValueError: The directory of the archive is damaged.
        zipfile.BadZipFile: The file is not a complete zip archive.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    return is_plain and sum(entry.file_size for entry in entries) <= size


def compare_records(file: mmap.mmap, uri: str) -> None:
    """Compare the bytes of each entry with its CRC-32, in 1.3 s for each GB.

    Nothing is compared if the CRC-32 of all entries is 0, or if the file is not a zip archive.

    Raises:
        ChecksumError: The bytes of an entry do not match, or the archive cannot be read.
    """
    if file[: len(ZIP_MAGIC)] != ZIP_MAGIC:
        return
    try:
        problem = _find_problem(file)
    except _UNREADABLE as exc:
        problem = f"its entries cannot be read ({exc})"
    finally:
        file.seek(0)
    if problem:
        raise ChecksumError(
            f"{uri} is damaged: {problem}; load a copy of it or another checkpoint", uri=uri
        )


def _find_problem(file: mmap.mmap) -> str:
    with zipfile.ZipFile(cast("IO[bytes]", file)) as archive:
        entries = archive.infolist()
    if not any(entry.CRC for entry in entries):
        return ""
    with memoryview(file) as view:
        for entry in entries:
            magic, name_size, extra_size = _LOCAL_HEADER.unpack_from(view, entry.header_offset)
            start = entry.header_offset + _LOCAL_HEADER.size + name_size + extra_size
            with view[start : start + entry.compress_size] as data:
                is_whole = magic == ZIP_MAGIC and data.nbytes == entry.compress_size
                if not is_whole or _crc32(data, entry) != entry.CRC:
                    return f"the bytes of {entry.filename} do not match their CRC-32"
    return ""


def _crc32(data: memoryview, entry: zipfile.ZipInfo) -> int | None:
    """Return the CRC-32 of the content of an entry, or None if its size is wrong."""
    if entry.external_attr & _IS_DIRECTORY and entry.file_size:
        raise ValueError(f"{entry.filename} is marked as a directory")
    if entry.compress_type == zipfile.ZIP_STORED:
        return zlib.crc32(data) if data.nbytes == entry.file_size else None
    if entry.compress_type != zipfile.ZIP_DEFLATED:
        raise NotImplementedError(f"{entry.filename} is compressed by method {entry.compress_type}")
    inflated = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, entry.file_size + 1)
    return zlib.crc32(inflated) if len(inflated) == entry.file_size else None

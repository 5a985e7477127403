"""Checks of the zip archives that torch.save writes: no compressed entries, right CRC-32.

torch.save writes a CRC-32 for each entry. Neither torch.load nor torch's C++ reader compares it.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, Final, cast

from aioflux.errors import ChecksumError

if TYPE_CHECKING:
    import mmap

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

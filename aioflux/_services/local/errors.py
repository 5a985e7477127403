"""What the system says of files, as errors of ours."""

from __future__ import annotations

import errno
import os

from aioflux._services.local.walk import is_temporary
from aioflux.errors import NotFoundError, PermissionDeniedError, StorageError, TransientError

__all__ = ["error_from_os"]

_PASSING = frozenset({errno.ESTALE, errno.ETIMEDOUT})
"""What NFS says of a file that is gone under an open handle, and of a server that is away, where it
is mounted `soft`. Another attempt finds what is there now."""


def error_from_os(error: OSError, what: str, uri: str, *, reading: bool) -> StorageError:
    """Return our error for one of the system.

    Args:
        error: What the system says.
        what: What could not be done.
        uri: To what.
        reading: Nothing was to be changed.
    """
    said = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) or (
        reading and error.errno in {errno.ENOTDIR, errno.EISDIR}
    ):
        return NotFoundError(f"{what}: there is no such object ({said})", uri=uri)
    if isinstance(error, NotADirectoryError | IsADirectoryError):
        return StorageError(
            f"{what}: it is below an object, or objects are below it ({said})", uri=uri
        )
    if isinstance(error, PermissionError):
        directory, name = os.path.split(error.filename or "")
        where = directory if is_temporary(name) else error.filename or ""
        return PermissionDeniedError(
            f"{what}: {said}; check who may use the directory {where}".rstrip(),
            uri=uri,
        )
    if error.errno in _PASSING:
        return TransientError(
            f"{what}: {said}; another machine replaced or removed it, or the file server did not "
            "answer",
            uri=uri,
            maybe_done=not reading,
        )
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"{what}: {said}; nothing of it was kept, make room first", uri=uri)
    return StorageError(f"{what}: {said}", uri=uri)

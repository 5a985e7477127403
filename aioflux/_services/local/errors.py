"""Errors of the file system, mapped to those of `errors.py`."""

from __future__ import annotations

import errno
import os

from aioflux._services.local.walk import is_temporary
from aioflux.errors import NotFoundError, PermissionDeniedError, StorageError, TransientError

__all__ = ["error_from_os"]

_TRANSIENT_ERRNOS = frozenset({errno.ESTALE, errno.ETIMEDOUT})
"""Errors of NFS for a file that was removed while open, and for a server that does not respond, if
it is mounted `soft`. They are retried."""


def error_from_os(error: OSError, what: str, uri: str, *, reading: bool) -> StorageError:
    """Map an error of the file system to an error of this package."""
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
    if error.errno in _TRANSIENT_ERRNOS:
        return TransientError(
            f"{what}: {said}; another machine replaced or removed it, or the file server did not "
            "answer",
            uri=uri,
            maybe_done=not reading,
        )
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"{what}: {said}; nothing was stored, free some space first", uri=uri)
    return StorageError(f"{what}: {said}", uri=uri)

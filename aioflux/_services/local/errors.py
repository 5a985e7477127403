"""Map of file system errors to the errors of `aioflux.errors`."""

from __future__ import annotations

import errno
import os

from aioflux._services.local.walk import is_temporary
from aioflux.errors import NotFoundError, PermissionDeniedError, StorageError, TransientError

_TRANSIENT_ERRNOS = frozenset({errno.ESTALE, errno.ETIMEDOUT})
"""Errors of NFS that are retried: ESTALE for a file that was removed while it was open, ETIMEDOUT
for a server that does not respond, with the mount option `soft`."""


def error_from_os(error: OSError, failure: str, uri: str, *, reading: bool) -> StorageError:
    """Map an error of the file system to an error of this package.

    `failure` begins the message: "could not read <uri>". `reading` is true for an operation that
    needs an existing object: a file in the place of a directory then means a missing object.
    """
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) or (
        reading and error.errno in {errno.ENOTDIR, errno.EISDIR}
    ):
        return NotFoundError(f"{failure}: there is no such object ({reason})", uri=uri)
    if isinstance(error, NotADirectoryError | IsADirectoryError):
        return StorageError(
            f"{failure}: a part of its path is an object, or it is a directory ({reason})", uri=uri
        )
    if isinstance(error, PermissionError):
        directory, name = os.path.split(error.filename or "")
        denied_path = directory if is_temporary(name) else error.filename or ""
        return PermissionDeniedError(
            f"{failure}: {reason}; check the permissions of {denied_path}".rstrip(),
            uri=uri,
        )
    if error.errno in _TRANSIENT_ERRNOS:
        return TransientError(
            f"{failure}: {reason}; another machine replaced or removed the file, or the file "
            "server did not respond",
            uri=uri,
            maybe_done=not reading,
        )
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"{failure}: {reason}; nothing was stored, free some space", uri=uri)
    return StorageError(f"{failure}: {reason}", uri=uri)

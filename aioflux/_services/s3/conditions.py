"""Conditions of writes on S3 servers that differ from AWS: known servers, errors and warnings.

Ceph radosgw 18.2 and DigitalOcean Spaces compare the ETag of `If-Match` without its quotes; some
gateways to other storage ignore conditions of writes altogether.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from aioflux.errors import UnsupportedError

if TYPE_CHECKING:
    from aioflux._services.base import Precondition

__all__ = ["refuse_ignored", "unquoted_endpoints"]

unquoted_endpoints: set[str] = set()
"""Endpoints that accept the ETag of `If-Match` only without quotes."""

_warned: set[str] = set()
"""Servers, by endpoint and bucket, that a warning was issued for."""


def refuse_ignored(
    precondition: Precondition, *, uri: str, server: str, is_required: bool, warns: bool
) -> None:
    """Raise for a write whose condition the server ignores, or warn once if that is allowed.

    Raises:
        UnsupportedError: It is required.
    """
    if precondition.if_absent:
        header, lost = "If-None-Match", 'mode="create" would replace an object that exists'
    else:
        header, lost = "If-Match", "if_generation_match would replace an object that changed"
    if is_required:
        raise UnsupportedError(
            f"could not write {uri}: {server} does not compare {header} when it writes, so that "
            f"{lost}; write to a server that does, or, if no two writers write an object at the "
            "same time, allow it with S3Access(require_conditions=False)",
            uri=uri,
        )
    if warns and server not in _warned:
        _warned.add(server)
        warnings.warn(
            f"{server} does not compare {header} when it writes: aioflux reads the metadata "
            "before each conditional write, and two writers of one object at the same time both "
            "succeed (S3Access.require_conditions is False)",
            RuntimeWarning,
            stacklevel=2,
        )

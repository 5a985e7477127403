"""Preconditions of writes on S3 servers that handle them differently from AWS.

Ceph radosgw 18.2 and DigitalOcean Spaces accept `If-Match` only without quotes around the ETag.
Some gateways to other storage ignore preconditions of writes.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from aioflux.errors import UnsupportedError

if TYPE_CHECKING:
    from aioflux._services.base import Precondition

unquoted_endpoints: set[str] = set()
"""Endpoints that accept `If-Match` only without quotes around the ETag."""

_warned: set[str] = set()
"""Servers, by endpoint and bucket, for which `reject_ignored_condition` issued a warning."""


def reject_ignored_condition(
    precondition: Precondition, *, uri: str, server: str, is_required: bool, warns: bool
) -> None:
    """Raise for a write whose precondition the server ignores, if `is_required`.

    Otherwise issue a warning, once for each server (endpoint and bucket), if `warns`.
    """
    if precondition.if_absent:
        header, effect = "If-None-Match", 'mode="create" would replace an object that exists'
    else:
        header, effect = "If-Match", "if_generation_match would replace an object that changed"
    if is_required:
        raise UnsupportedError(
            f"could not write {uri}: {server} does not compare {header} when it writes, so that "
            f"{effect}; use a server that compares it, or, if an object never has two writers at "
            "the same time, allow the write with S3Access(require_conditions=False)",
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

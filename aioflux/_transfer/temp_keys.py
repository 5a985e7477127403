"""Keys of temporary objects: unpublished uploads, composites, and objects for manifests."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from aioflux._values.meta import ObjectMeta, OpenUpload

__all__ = [
    "COMPOSITE_PREFIX",
    "TEMPORARY_PREFIX",
    "TEMPORARY_PREFIXES",
    "WRITTEN_PREFIX",
    "is_temporary",
    "manifest_of",
    "new_temporary_key",
    "stale_objects",
    "stale_uploads",
]

TEMPORARY_PREFIX = ".aioflux-uploads/"
"""Prefix of the temporary keys of conditional multipart uploads, relative to the store's prefix.
Listings leave out these keys, other writes below the prefix are rejected, and `Store.clean` removes
the objects of dead processes."""

COMPOSITE_PREFIX = "aioflux-composed-objects/"
"""Prefix of the composites of composed reads, treated like `TEMPORARY_PREFIX`."""

WRITTEN_PREFIX = "aioflux-written-objects/"
"""Prefix of objects that are read by a manifest, treated like `TEMPORARY_PREFIX`. Below
`a/aioflux-written-objects/m/<id of a write>/`, clean-up keeps objects that manifest `a/m` lists."""

_WRITTEN_KEY = re.compile(rf"((.*?/)?{WRITTEN_PREFIX}([^/]+)/[^/]+/).", re.DOTALL)
TEMPORARY_PREFIXES = (TEMPORARY_PREFIX, COMPOSITE_PREFIX, WRITTEN_PREFIX)


def is_temporary(key: str) -> bool:
    """Return whether a key or prefix is temporary, in this store or one with a longer prefix."""
    return any(f"/{prefix}" in f"/{key}" for prefix in TEMPORARY_PREFIXES)


def manifest_of(key: str) -> tuple[str, str] | None:
    """Return the key of the manifest that may list an object, and the prefix of its write.

    Returns None for an object that is not below `WRITTEN_PREFIX`.
    """
    match = _WRITTEN_KEY.match(key)
    return None if match is None else (f"{match[2] or ''}{match[3]}", match[1])


def new_temporary_key() -> str:
    """Return a new random key for a temporary object."""
    return f"{TEMPORARY_PREFIX}{os.urandom(16).hex()}"


def stale_uploads(
    uploads: Iterable[OpenUpload], *, now: datetime, older_than_seconds: float
) -> list[OpenUpload]:
    """Return the uploads that were initiated at least `older_than_seconds` before `now`."""
    return [upload for upload in uploads if _age(upload.initiated, now) >= older_than_seconds]


def stale_objects(
    metas: Iterable[ObjectMeta], *, now: datetime, older_than_seconds: float
) -> dict[str | None, list[ObjectMeta]]:
    """Return the temporary objects that were written at least `older_than_seconds` before `now`.

    Objects without a time are not returned. The objects of a write with a manifest are returned
    only if all of them are so old, because the write may be in progress otherwise.

    Returns:
        The objects that the manifest of each key may list; with the key None, all others.
    """
    groups: dict[tuple[str | None, str], list[ObjectMeta]] = {}
    for meta in metas:
        if is_temporary(meta.key):
            groups.setdefault(manifest_of(meta.key) or (None, meta.key), []).append(meta)
    stale: dict[str | None, list[ObjectMeta]] = {}
    for (manifest, _), group in groups.items():
        times = [meta.updated for meta in group]
        if all(time is not None and _age(time, now) >= older_than_seconds for time in times):
            stale.setdefault(manifest, []).extend(group)
    return stale


def _age(since: datetime, now: datetime) -> float:
    return (now - since).total_seconds()

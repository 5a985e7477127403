"""Keys of temporary objects: unpublished uploads and composites; and what is stale of a listing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from aioflux._values.dataset_keys import WrittenKey

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta, OpenUpload

TEMPORARY_PREFIX = ".aioflux-uploads/"
"""Prefix of the temporary keys of conditional multipart uploads, relative to the store's prefix.
Listings leave out these keys, other writes below the prefix are rejected, and `Store.clean` removes
the objects of dead processes."""

COMPOSITE_PREFIX = "aioflux-composed-objects/"
"""Prefix of the composites of composed reads, treated like `TEMPORARY_PREFIX`."""

TEMPORARY_PREFIXES = (TEMPORARY_PREFIX, COMPOSITE_PREFIX)


def is_temporary(key: str) -> bool:
    """Return whether a key or prefix is temporary, in this store or one with a longer prefix."""
    path = f"/{key}"
    return f"/{TEMPORARY_PREFIX}" in path or f"/{COMPOSITE_PREFIX}" in path


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
    """Return temporary objects and data objects written at least `older_than_seconds` before `now`.

    Objects without a time are not returned. The data objects of a write are returned only if all of
    them are so old, because the write may be in progress otherwise.

    Returns:
        The data objects of each dataset, by its prefix; with the key None, the temporary objects.
    """
    groups: dict[tuple[str | None, str], list[ObjectMeta]] = {}
    for meta in metas:
        if is_temporary(meta.key):
            groups[None, meta.key] = [meta]
        elif (written := WrittenKey.parse(meta.key)).attempt:
            groups.setdefault((written.dataset, written.write_id), []).append(meta)
    stale: dict[str | None, list[ObjectMeta]] = {}
    for (dataset, _), group in groups.items():
        times = [meta.updated for meta in group]
        if all(time is not None and _age(time, now) >= older_than_seconds for time in times):
            stale.setdefault(dataset, []).extend(group)
    return stale


def _age(since: datetime, now: datetime) -> float:
    return (now - since).total_seconds()

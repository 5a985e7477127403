"""Keys of temporary objects: uploads before they are published, and composites; stale ones."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from aioflux._values.meta import ObjectMeta, OpenUpload

__all__ = [
    "COMPOSITE_PREFIX",
    "TEMPORARY_PREFIX",
    "is_temporary",
    "new_temporary_key",
    "stale_objects",
    "stale_uploads",
]

TEMPORARY_PREFIX = ".aioflux-uploads/"
"""Prefix, below the store's own, of conditional multipart uploads until they are published.
Listings leave it out, writes below it are rejected, and `Store.clean` removes what a dead process
left."""

COMPOSITE_PREFIX = "aioflux-composed-objects/"
"""Prefix of composites that serve one download; the same holds for it."""


def is_temporary(key: str) -> bool:
    """Return whether a key or prefix is of temporary objects, of this store or of one below it."""
    return any(f"/{prefix}" in f"/{key}" for prefix in (TEMPORARY_PREFIX, COMPOSITE_PREFIX))


def new_temporary_key() -> str:
    """Return a key that no other upload uses."""
    return f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"


def stale_uploads(
    uploads: Iterable[OpenUpload], *, now: datetime, older_than_seconds: float
) -> list[OpenUpload]:
    """Return the uploads that were initiated at least so long before `now`."""
    return [each for each in uploads if _age(each.initiated, now) >= older_than_seconds]


def stale_objects(
    metas: Iterable[ObjectMeta], *, now: datetime, older_than_seconds: float
) -> list[ObjectMeta]:
    """Return the temporary objects that were last written at least so long before `now`.

    One of unknown time stays.
    """
    return [
        meta
        for meta in metas
        if is_temporary(meta.key)
        and meta.updated is not None
        and _age(meta.updated, now) >= older_than_seconds
    ]


def _age(since: datetime, now: datetime) -> float:
    return (now - since).total_seconds()

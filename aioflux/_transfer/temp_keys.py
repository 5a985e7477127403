"""Keys of temporary objects: uploads before they are published, and composites."""

from __future__ import annotations

import uuid

__all__ = ["COMPOSITE_PREFIX", "TEMPORARY_PREFIX", "is_temporary", "new_temporary_key"]

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

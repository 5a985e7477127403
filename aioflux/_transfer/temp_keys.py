"""Where what aioflux writes for a while lies: uploads before they are visible, and composites."""

from __future__ import annotations

import uuid

__all__ = ["COMPOSITE_PREFIX", "TEMPORARY_PREFIX", "is_staged", "new_staged_key"]

TEMPORARY_PREFIX = ".aioflux-uploads/"
"""Conditional uploads of several parts grow here, below the store's prefix. Listings leave it out,
writes below it are refused, and `Store.clean` removes what a dead process left."""

COMPOSITE_PREFIX = "aioflux-composed-objects/"
"""Composites that serve one download lie here, below the store's prefix; all else holds as above.
"""


def is_staged(key: str) -> bool:
    """Tell whether a key, or a prefix, is of what is written for a while.

    By this store, or by one below it.
    """
    return any(f"/{prefix}" in f"/{key}" for prefix in (TEMPORARY_PREFIX, COMPOSITE_PREFIX))


def new_staged_key() -> str:
    """Return a key that no other upload has."""
    return f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"

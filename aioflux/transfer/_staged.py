"""Where conditional uploads of several parts grow before they are made visible."""

from __future__ import annotations

import uuid

__all__ = ["TEMPORARY_PREFIX", "is_staged", "new_staged_key"]

TEMPORARY_PREFIX = ".aioflux-uploads/"
"""Conditional uploads of several parts grow here, below the store's prefix. Listings leave it out,
writes below it are refused, and `Store.clean` removes what a dead process left."""


def is_staged(key: str) -> bool:
    """Tell whether a key, or a prefix, is of staged uploads: of this store, or of one below it."""
    return f"/{TEMPORARY_PREFIX}" in f"/{key}"


def new_staged_key() -> str:
    """Return a key that no other upload has."""
    return f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"

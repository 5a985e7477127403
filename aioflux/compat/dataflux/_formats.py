"""Applying a user's `data_format_fn`, so that its failure names the object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["data_format_default", "formatted"]


def data_format_default(data: bytes) -> bytes:
    """Return the bytes as they are."""
    return data


def formatted(uri: str, data: bytes, data_format_fn: Callable[[bytes], Any]) -> Any:
    """Return what a `data_format_fn` makes of the bytes of an object."""
    try:
        return data_format_fn(data)
    except Exception as exc:
        exc.add_note(f"while formatting {uri}")
        raise

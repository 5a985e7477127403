"""The checkpoint_id of DCP, which here is a whole uri."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._values.uri import parse_uri

if TYPE_CHECKING:
    import os

__all__ = ["is_checkpoint_uri", "require_checkpoint_uri"]


def is_checkpoint_uri(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether this is a uri that a checkpoint can have; a path never is."""
    if not isinstance(checkpoint_id, str):
        return False
    try:
        parse_uri(checkpoint_id)
    except ValueError:
        return False
    return True


def require_checkpoint_uri(checkpoint_id: str | os.PathLike[str], *, example: str) -> None:
    """Raise ValueError unless this is a uri that a checkpoint can have."""
    if not is_checkpoint_uri(checkpoint_id):
        raise ValueError(
            f"checkpoint_id must be a whole uri in a string, such as {example!r}, not "
            f"{checkpoint_id!r}; a Path drops a slash of gs://"
        )

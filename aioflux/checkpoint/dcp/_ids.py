"""What a checkpoint_id of DCP may be here: a whole uri."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._values.uri import parse_uri

if TYPE_CHECKING:
    import os

__all__ = ["is_checkpoint_uri"]


def is_checkpoint_uri(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Tell whether this is a uri that a checkpoint can have; a path never is."""
    if not isinstance(checkpoint_id, str):
        return False
    try:
        parse_uri(checkpoint_id)
    except ValueError:
        return False
    return True

"""Checks of the `checkpoint_id` that DCP passes: it must be a uri in a string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._values.uri import parse_uri

if TYPE_CHECKING:
    import os


def is_checkpoint_uri(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether `checkpoint_id` has the form of a uri. A path does not."""
    if not isinstance(checkpoint_id, str):
        return False
    try:
        parse_uri(checkpoint_id)
    except ValueError:
        return False
    return True


def require_checkpoint_uri(checkpoint_id: str | os.PathLike[str], *, example: str) -> None:
    """Raise ValueError unless `checkpoint_id` has the form of a uri."""
    if not is_checkpoint_uri(checkpoint_id):
        raise ValueError(
            f"checkpoint_id must be a string with a uri, such as {example!r}, not "
            f"{checkpoint_id!r}; a Path drops a slash of gs://"
        )

"""Applying a user's transform, so that its failure names the sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["transformed"]


def transformed(sample: Any, transform: Callable[[Any], Any] | None, *, uri: str = "") -> Any:
    """Return what `transform` makes of a sample; the sample itself where there is none.

    Args:
        sample: A `Sample`, or a record of an object.
        transform: The user's.
        uri: Of the object, where it is a record.
    """
    if transform is None:
        return sample
    where = uri or sample.uri
    try:
        return transform(sample)
    except (StopIteration, StopAsyncIteration) as exc:
        # Raised further, it would be taken for the end of the data.
        raise RuntimeError(f"the transform raised {exc!r} for {where}") from exc
    except Exception as exc:
        exc.add_note(f"while transforming {where}")
        raise

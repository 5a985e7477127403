"""Applying a user's transform, so that its failure names the sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.data._sample import Sample

__all__ = ["transformed"]


def transformed(sample: Sample, transform: Callable[[Sample], Any] | None) -> Any:
    """Return what `transform` makes of a sample; the sample itself where there is none."""
    if transform is None:
        return sample
    try:
        return transform(sample)
    except Exception as exc:
        exc.add_note(f"while transforming {sample.uri}")
        raise

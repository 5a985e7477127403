"""Objects one after another, and past those that may be skipped."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from aioflux.data._on_error import Failures
    from aioflux.data._sample import Sample
    from aioflux.data._source import Objects

__all__ = ["fetch"]


def fetch(
    objects: Objects, positions: Sequence[int], *, is_ordered: bool, failures: Failures
) -> Generator[tuple[int, Sample | None], None, None]:
    """Read the objects at `positions`, fetched ahead of the consumer.

    Yields:
        The index in `positions`, with the sample, or with None where it was skipped.

    Raises:
        StorageError: An object cannot be read, and is not to be skipped.
    """
    with closing(objects.read(positions, is_ordered=is_ordered)) as stream:
        for number, sample in stream:
            if isinstance(sample, StorageError):
                failures.skip(sample, sample.uri)
                yield number, None
            else:
                yield number, sample

"""Objects one after another, and past those that may be skipped."""

from __future__ import annotations

from array import array
from contextlib import closing
from typing import TYPE_CHECKING

from aioflux._errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from aioflux.data._objects import Objects
    from aioflux.data._on_error import Failures
    from aioflux.data._sample import Sample

__all__ = ["fetch"]


def fetch(
    objects: Objects, positions: Sequence[int], *, is_ordered: bool, failures: Failures
) -> Generator[tuple[int, Sample | None], None, None]:
    """Read the objects at `positions`, fetched ahead of the consumer.

    An error ends the reading of all that is under way. Where it may be skipped, what was not handed
    out is begun again.

    Yields:
        The index in `positions`, with the sample, or with None where it was skipped.
    """
    indices = range(len(positions))
    todo: Sequence[int] = indices
    while todo:
        given: set[int] = set()
        here = positions if todo is indices else array("q", (positions[index] for index in todo))
        try:
            with closing(objects.read(here, is_ordered=is_ordered)) as stream:
                for number, sample in stream:
                    if failures.may_skip:
                        given.add(number)
                    yield todo[number], sample
        except StorageError as exc:
            failed = _failed(objects, exc, here, given) if failures.may_skip else None
            if failed is None:
                raise
            failures.skip(exc, exc.uri)
            skipped = todo[failed]
            given.add(failed)
            todo = array("q", (index for n, index in enumerate(todo) if n not in given))
            yield skipped, None
        else:
            return


def _failed(
    objects: Objects, error: StorageError, positions: Sequence[int], given: set[int]
) -> int | None:
    """Find which object an error is of; None where it is of none of them."""
    for number, position in enumerate(positions):
        if number not in given and objects.uri_at(position) == error.uri:
            return number
    return None

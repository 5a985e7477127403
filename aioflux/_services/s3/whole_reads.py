"""When a read of S3 asks for all of an object where a range is wanted. No I/O."""

from __future__ import annotations

from typing import Final

__all__ = ["Guesses"]

_MAX_GUESSED_BYTES: Final = 4 * 1024 * 1024
_NOT_GUESSED: Final = 1000
"""Reads by name that ask for a range after one that turned out to be longer."""


class Guesses:
    """Reads by name whose object is hoped to be no longer than what is wanted of it.

    Only an answer for all of an object tells a checksum. Most reads of small objects by name ask
    for more than there is; where one asked for less, the connection is lost, and so is the wish to
    guess, for a while.
    """

    def __init__(self) -> None:
        self._num_not_guessed = 0

    def asks_for_all(self, end: int | None) -> bool:
        """Tell whether all of an object is asked for, where `[0, end)` is wanted."""
        if end is None or end > _MAX_GUESSED_BYTES:
            return False
        if self._num_not_guessed:
            self._num_not_guessed -= 1
        return not self._num_not_guessed

    def was_wrong(self) -> None:
        """Take note that there was more."""
        self._num_not_guessed = _NOT_GUESSED

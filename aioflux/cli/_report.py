"""What failed: the first lines of it on stderr, the number of the rest, and the exit status."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from aioflux.cli._text import complain

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Report"]

_MAX_LINES = 10


class Report:
    """Failures of one command.

    Attributes:
        num_failed: How many there were.
        say: Writes one line; a progress display puts its own here.
    """

    def __init__(self) -> None:
        self.num_failed = 0
        self.say: Callable[[str], None] = complain

    def fail(self, message: str) -> None:
        """Count a failure, and tell it if it is one of the first."""
        self.num_failed += 1
        if self.num_failed <= _MAX_LINES:
            self.say(message)

    def finish(self, summary: str) -> int:
        """Tell the rest, and return the exit status."""
        if self.num_failed > _MAX_LINES:
            complain(f"and {self.num_failed - _MAX_LINES:,} more failures")
        failed = f"; {self.num_failed:,} failed" if self.num_failed else ""
        print(f"{summary}{failed}", file=sys.stderr, flush=True)  # noqa: T201
        return 1 if self.num_failed else 0

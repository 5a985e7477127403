"""The progress of a checkpoint command on a terminal: bytes and rate."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aioflux.cli._text import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["show_bytes"]


@contextmanager
def show_bytes(*, is_wanted: bool = True) -> Iterator[Callable[[int], None] | None]:
    """Show the bytes read so far and their rate on stderr, if it is a terminal.

    Nothing else may be written to stderr until the body ends.

    Args:
        is_wanted: Whether to show anything.
    """
    if not is_wanted or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(file=sys.stderr), transient=True)
    task = progress.add_task("", total=None, amount="")
    num_bytes = 0

    def advance(count: int) -> None:
        nonlocal num_bytes
        num_bytes += count
        speed = num_bytes / max(progress.tasks[0].elapsed or 0.0, 0.1)
        progress.update(task, amount=f"{format_size(num_bytes)}, {format_size(speed)}/s")

    with progress:
        yield advance

"""Bytes of a checkpoint that went by, on a terminal."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aioflux.cli._text import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["shown"]


@contextmanager
def shown(*, is_wanted: bool = True) -> Iterator[Callable[[int], None] | None]:
    """Show how many bytes went by and how fast, on stderr, where that is a terminal.

    Nothing else is to be written until the body ends.

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

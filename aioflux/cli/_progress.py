"""The progress of a copy on a terminal: bar, bytes, objects, rate and time left."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TimeRemainingColumn
from rich.text import Text

from aioflux.cli._text import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Task

    from aioflux.cli._copy_run import Tally

__all__ = ["describe_amount", "show_progress"]


class _Rate(ProgressColumn):
    """Bytes per second of the last seconds."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("-" if speed is None else f"{format_size(speed)}/s")


class _Share(ProgressColumn):
    """The percentage, if the total is known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.percentage:>3.0f}%")


class _Amount(ProgressColumn):
    """Bytes and objects so far."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(describe_amount(self._tally))


def describe_amount(tally: Tally) -> str:
    """Return bytes and objects so far, of the total if it is known, else of those listed so far."""
    amount = format_size(tally.num_bytes)
    _, total = tally.progress
    if total is not None:
        amount += f" of {format_size(tally.planned_bytes)}"
    objects = f"{tally.num_objects:,} of {tally.planned_objects:,}"
    return f"{amount}, {objects}{' listed so far' if tally.num_listings else ''}"


@contextmanager
def show_progress(tally: Tally) -> Iterator[None]:
    """Show the progress of a copy on stderr until the body ends; failures appear above it."""
    console = Console(file=sys.stderr)
    columns = (
        _Share(),
        BarColumn(bar_width=None),
        _Amount(tally),
        _Rate(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, transient=True, expand=True)
    task = progress.add_task("", total=None)

    def update() -> None:
        done, total = tally.progress
        progress.update(task, completed=done, total=total)

    def say(message: str) -> None:
        console.print(f"aioflux: {message}", markup=False, highlight=False, soft_wrap=True)

    tally.changed, told = update, tally.report.say
    tally.report.say = say
    try:
        with progress:
            yield
    finally:
        tally.report.say = told

"""CommandProgress: bytes and objects planned and done, and the bar on a terminal.

     40% ======------  16.0 MiB of 40.0 MiB, 120 of 301  8.2 MiB/s  eta 0:00:03

Each column of text is a function below; `CommandProgress.show` lists all columns in order.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from aioflux._values.stats import format_size
from aioflux.cli._settings import settings
from aioflux.cli._text import format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Task

_STEADY_SECONDS = 2.0


class CommandProgress:
    """Bytes and objects of one command.

    Attributes:
        num_objects: Objects that are done.
        num_bytes: Bytes that are done.
        num_skipped: Objects that were not copied because the target exists.
        num_different: Those of them whose target is known to differ.
        planned_objects: Objects that are done or planned.
        planned_bytes: Size of the objects that are done or planned.
        num_listings: Listings in progress, which can plan more objects.
    """

    def __init__(self, *, num_listings: int = 0) -> None:
        self.num_objects = 0
        self.num_bytes = 0
        self.num_skipped = 0
        self.num_different = 0
        self.planned_objects = 0
        self.planned_bytes = 0
        self.num_listings = num_listings
        self._is_size_known = True
        self._started = time.monotonic()

    @property
    def completed(self) -> tuple[int, int | None]:
        """Amount done and amount planned: bytes, or objects if all objects are empty.

        The amount planned is None while it is unknown.
        """
        if not self._is_size_known or self.num_listings or not self.planned_objects:
            return self.num_bytes, None
        if not self.planned_bytes:
            return self.num_objects, self.planned_objects
        return self.num_bytes, self.planned_bytes

    def plan(self, size: int) -> None:
        """Count an object to copy; its size is -1 if it is unknown."""
        self.planned_objects += 1
        self.planned_bytes += max(size, 0)
        self._is_size_known = self._is_size_known and size >= 0

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were transferred; a negative number if they must be sent again."""
        self.num_bytes += num_bytes

    def finish(self, size: int, *, counted: int = 0) -> None:
        """Count an object that is done; `advance` has counted `counted` of its bytes."""
        self.num_objects += 1
        self.num_bytes += size - counted if size >= 0 else 0

    def drop(self, size: int, *, counted: int = 0) -> None:
        """Remove an object that failed or was skipped from the counts.

        Args:
            size: Size of the object in bytes; -1 if it is unknown.
            counted: Bytes of the object that `advance` has counted.
        """
        self.num_bytes -= counted
        self.planned_bytes -= max(size, 0)
        self.planned_objects -= 1

    def summary(self, verb: str, *, is_timed: bool = True) -> str:
        """Return the last line that the command prints."""
        objects = format_count(self.num_objects, "object")
        text = f"{verb} {objects}, {format_size(self.num_bytes)}"
        if is_timed:
            seconds = max(time.monotonic() - self._started, 1e-3)
            text += f" in {format_seconds(seconds)} ({format_size(self.num_bytes / seconds)}/s)"
        if self.num_skipped:
            text += f", {self.num_skipped:,} skipped"
        return text + (f", {self.num_different:,} of them different" if self.num_different else "")

    @contextmanager
    def show(self, *, is_wanted: bool = True) -> Iterator[None]:
        """Show progress on stderr during the body, if stderr is a terminal.

        Errors that are printed to stderr appear above the bar.
        """
        is_shown = is_wanted and not settings.quiet and sys.stderr.isatty()
        if not is_shown or os.environ.get("TERM") == "dumb":
            yield
            return
        from rich import progress as _rich
        from rich.console import Console
        from rich.text import Text

        counts = self

        class Column(_rich.ProgressColumn):
            """A column whose text a function returns."""

            def __init__(self, describe: Callable[[Task], str]) -> None:
                super().__init__()
                self._describe = describe

            def render(self, task: Task) -> Text:
                return Text(self._describe(task))

        class Display(_rich.Progress):
            """The bar, which reads the counts whenever it is drawn."""

            def get_renderables(self) -> Iterable[RenderableType]:
                done, total = counts.completed
                for task_id in self.task_ids:
                    self.update(task_id, completed=done, total=total)
                return super().get_renderables()

        columns = (
            Column(lambda task: "" if task.total is None else f"{task.percentage:>3.0f}%"),
            _rich.BarColumn(bar_width=None),
            Column(lambda _: amount(counts)),
            Column(_rate),
            Column(_time),
        )
        console = Console(file=sys.stderr)
        with Display(*columns, console=console, transient=True, expand=True) as display:
            display.add_task("", total=None)
            yield


def amount(progress: CommandProgress) -> str:
    """Return the bytes and objects done and planned, as text."""
    text = format_size(progress.num_bytes)
    if progress.completed[1] is not None:
        text += f" of {format_size(progress.planned_bytes)}"
    if not (progress.planned_objects or progress.num_listings):
        return text
    text += f", {progress.num_objects:,} of {progress.planned_objects:,}"
    return f"{text} found so far" if progress.num_listings else text


def _rate(task: Task) -> str:
    """Return the bytes per second; rich averages the last 30 seconds.

    In the first seconds its average is of two or three moments, and can be far too high.
    """
    elapsed = task.elapsed or 0.0
    speed = (task.finished_speed or task.speed) if elapsed >= _STEADY_SECONDS else None
    if speed is None:
        speed = task.completed / max(elapsed, 0.1)
    return f"{format_size(speed)}/s"


def _time(task: Task) -> str:
    """Return the remaining time, or the elapsed time if the total is unknown."""
    if task.total is None:
        return str(timedelta(seconds=int(task.elapsed or 0)))
    remaining = task.time_remaining
    return "eta -:--:--" if remaining is None else f"eta {timedelta(seconds=int(remaining))}"

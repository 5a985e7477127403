"""ProgressBar: one line on stderr with the progress of an epoch."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Self, TextIO, TypeVar

from aioflux._values.stats import format_size
from aioflux.data._counters import LoadStats

if TYPE_CHECKING:
    from aioflux.data._counters import LoadCounters

T = TypeVar("T")

_BAR_COLUMNS = 20
_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 30.0
"""Seconds between two lines if the output is not a terminal: such lines cannot be redrawn."""


class ProgressBar:
    """A line with percentage, objects, bytes, rates, time waited and time left.

    On a terminal the line is redrawn at most five times a second, in the width of the terminal. To
    other outputs a line is written every 30 seconds and at the end. The workers of a rank share one
    line. The unfinished worker with the lowest id draws the line; the last worker to finish draws
    the final line.
    """

    def __init__(
        self,
        counters: LoadCounters,
        *,
        label: str,
        total_objects: int | None = None,
        num_workers: int = 0,
        file: TextIO,
    ) -> None:
        """Start at the current counts, without drawing.

        Args:
            counters: Counts to show.
            label: Beginning of the line, such as the uri.
            total_objects: Number of objects in this iteration; None if unknown.
            num_workers: Number of workers that share `counters` and the line; each passes the size
                of its own share as `total_objects`. 0 for a line that is not shared.
            file: Output, such as `sys.stderr`.
        """
        self._counters = counters
        self._label = label
        self._total = total_objects
        self._num_workers = num_workers
        self._file = file
        self._is_terminal = file.isatty()
        self._interval_seconds = _TERMINAL_SECONDS if self._is_terminal else _LOG_SECONDS
        self._before = counters.snapshot()
        if num_workers:
            counters.start_share(total_objects or 0)
        self._next_draw = self._started = time.monotonic()
        if not self._is_terminal:
            self._next_draw += self._interval_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_last = not self._num_workers or self._counters.end_share(self._num_workers)
        if is_last or error is not None:
            self._draw(is_last=True)
        if is_last and self._num_workers:
            self._counters.clear_shares(self._num_workers)

    def update(self) -> None:
        """Draw the line if the interval has passed. Otherwise a call costs 50 nanoseconds."""
        if time.monotonic() >= self._next_draw:
            if not self._num_workers or self._counters.is_first_reading(self._num_workers):
                self._draw()
            self._next_draw = time.monotonic() + self._interval_seconds

    def _draw(self, *, is_last: bool = False) -> None:
        seconds = time.monotonic() - self._started
        width = _columns(self._file) - 1 if self._is_terminal else None
        stats, before, total = self._counters.snapshot(), self._before, self._total
        if self._num_workers:
            (stats, total), before = self._counters.shares(self._num_workers), LoadStats()
        line = render(stats, before, seconds, label=self._label, total=total, width=width)
        if self._is_terminal:
            # Spaces overwrite a longer line, also of another worker. The last column stays empty,
            # because some terminals break the line after writing to it.
            self._file.write(f"\r{line:<{width}}" + ("\n" if is_last else ""))
        else:
            self._file.write(f"{line}\n")
        self._file.flush()


def _columns(file: TextIO) -> int:
    """Return the width of a terminal; if the system reports none, COLUMNS or 80."""
    try:
        columns = os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):  # no file descriptor, or not a terminal
        columns = 0
    return columns or shutil.get_terminal_size().columns


def render(
    stats: LoadStats,
    before: LoadStats,
    seconds: float,
    *,
    label: str,
    total: int | None,
    width: int | None = None,
) -> str:
    """Return the line for the counts since `before`.

    The counts in `before` were taken `seconds` ago. If the line is wider than `width` columns,
    the least important parts are left out.
    """
    num_objects = stats.num_objects - before.num_objects
    num_bytes = stats.num_bytes - before.num_bytes
    waited = stats.waited_seconds - before.waited_seconds
    rate = num_objects / seconds if seconds > 0 else 0.0
    count = f"{num_objects:,} objects"
    percent = bar = ""
    if total:
        percent = f"{min(1.0, num_objects / total):4.0%} "
        full = int(min(1.0, num_objects / total) * _BAR_COLUMNS)
        bar = "[" + "#" * full + "." * (_BAR_COLUMNS - full) + "] "
        count = f"{num_objects:,} of {total:,} objects"
    parts = [
        format_size(num_bytes),
        f"{rate:,.0f}/s",
        f"{format_size(num_bytes / seconds if seconds > 0 else 0)}/s",
        f"waited {waited:.1f} s",
    ]
    for name, number in (
        ("from cache", stats.num_cache_hits - before.num_cache_hits),
        ("retries", stats.num_retries - before.num_retries),
        ("skipped", stats.num_skipped - before.num_skipped),
    ):
        if number:
            parts.append(f"{number:,} {name}")
    time_left = ""
    if total and rate and num_objects < total:
        time_left = f", {_clock((total - num_objects) / rate)} left"
    return _fit(label, percent, bar, count, parts, time_left, width)


def _fit(
    label: str,
    percent: str,
    bar: str,
    count: str,
    parts: list[str],
    time_left: str,
    width: int | None,
) -> str:
    """Return the joined line, without the parts that do not fit into `width` columns."""

    def line() -> str:
        return f"{label} {percent}{bar}{', '.join([count, *parts])}{time_left}"

    if width is None:
        return line()
    while parts and len(line()) > width:
        parts.pop()
    if len(line()) > width:
        bar = ""
    if (over := len(line()) - width) > 0:
        # Cut the start of the label: the end names the epoch.
        label = f"...{label[over + 3 :]}" if len(label) > over + 3 else ""
    return line().strip()[:width]


def show_progress(
    items: Iterable[T],
    counters: LoadCounters,
    *,
    label: str,
    total_objects: int | None = None,
    num_workers: int = 0,
    file: TextIO | None = None,
) -> Iterator[T]:
    """Yield `items`, and draw the progress line meanwhile; `file` is stderr by default."""
    with ProgressBar(
        counters,
        label=label,
        total_objects=total_objects,
        num_workers=num_workers,
        file=file or sys.stderr,
    ) as bar:
        for item in items:
            bar.update()
            yield item


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

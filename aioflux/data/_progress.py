"""The progress of an epoch, on one line of stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self, TextIO, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from aioflux.data._meter import LoadStats, Meter

__all__ = ["ProgressBar", "shown"]

T = TypeVar("T")

_BAR_COLUMNS = 20
_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 30.0
"""Between two lines where stderr is no terminal, and each line stays."""


class ProgressBar:
    """Draws what a meter tells: share, objects, bytes, rates, time waited, time left.

    On a terminal one line is drawn over, five times a second at most; elsewhere there is a line
    every 30 seconds and one at the end. The meter is shared by all workers, so one of them, or the
    main process, draws for all.
    """

    def __init__(
        self, meter: Meter, *, label: str, total_objects: int | None = None, file: TextIO
    ) -> None:
        """Draw nothing yet.

        Args:
            meter: What to tell of; what it has counted by now is left out.
            label: What stands in front, such as the uri.
            total_objects: Objects to come, or None where nobody knows.
            file: Where, such as `sys.stderr`.
        """
        self._meter = meter
        self._label = label
        self._total = total_objects
        self._file = file
        self._is_terminal = file.isatty()
        self._every_seconds = _TERMINAL_SECONDS if self._is_terminal else _LOG_SECONDS
        self._before = meter.snapshot()
        self._next = self._started = time.monotonic()
        if not self._is_terminal:
            self._next += self._every_seconds
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._draw(is_last=True)

    def update(self) -> None:
        """Draw anew where it is time for it; costs 50 nanoseconds where it is not."""
        if time.monotonic() >= self._next:
            self._draw()
            self._next = time.monotonic() + self._every_seconds

    def _draw(self, *, is_last: bool = False) -> None:
        seconds = time.monotonic() - self._started
        line = render(
            self._meter.snapshot(), self._before, seconds, label=self._label, total=self._total
        )
        if self._is_terminal:
            # Spaces wipe out what is left of a longer line.
            text, self._width = f"\r{line:<{self._width}}", len(line)
            self._file.write(f"{text}\n" if is_last else text)
        else:
            self._file.write(f"{line}\n")
        self._file.flush()


def render(
    stats: LoadStats, before: LoadStats, seconds: float, *, label: str, total: int | None
) -> str:
    """Return the line for what was counted since `before`, in so many seconds."""
    num_objects = stats.num_objects - before.num_objects
    num_bytes = stats.num_bytes - before.num_bytes
    waited = stats.waited_seconds - before.waited_seconds
    rate = num_objects / seconds if seconds > 0 else 0.0
    parts = [f"{num_objects:,} objects"]
    if total:
        share = min(1.0, num_objects / total)
        full = int(share * _BAR_COLUMNS)
        bar = "#" * full + "." * (_BAR_COLUMNS - full)
        parts = [f"{share:4.0%} [{bar}] {num_objects:,} of {total:,} objects"]
    parts.append(_size(num_bytes))
    parts.append(f"{rate:,.0f}/s")
    parts.append(f"{_size(num_bytes / seconds if seconds > 0 else 0)}/s")
    parts.append(f"waited {waited:.1f} s")
    for name, count in (
        ("from cache", stats.num_cache_hits - before.num_cache_hits),
        ("retries", stats.num_retries - before.num_retries),
        ("skipped", stats.num_skipped - before.num_skipped),
    ):
        if count:
            parts.append(f"{count:,} {name}")
    if total and rate and num_objects < total:
        parts.append(f"{_clock((total - num_objects) / rate)} left")
    return f"{label} {', '.join(parts)}"


def shown(
    items: Iterable[T],
    meter: Meter,
    *,
    label: str,
    total_objects: int | None = None,
    file: TextIO | None = None,
) -> Iterator[T]:
    """Yield `items`, and show meanwhile on stderr, or on `file`, what `meter` tells."""
    with ProgressBar(
        meter, label=label, total_objects=total_objects, file=file or sys.stderr
    ) as bar:
        for item in items:
            bar.update()
            yield item


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

"""A picture of a history of saves: how long each held training up and took, and how fast it went.

matplotlib is loaded when a picture is asked for.
"""

from __future__ import annotations

import importlib
import os
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.checkpoint._maintain.history import SaveRecord

__all__ = ["plot"]

_MB = 1e6
_COLORS = {"committed": "tab:blue", "failed": "tab:red", "cancelled": "tab:gray"}


def plot(
    records: Sequence[SaveRecord], target: str | os.PathLike[str] | IO[bytes], *, title: str = ""
) -> None:
    """Draw a history: throughput above, seconds staged and uploaded below, over the steps.

    Args:
        records: As `read_history` returns them.
        target: Local path of a picture (.png, .svg, .pdf), or a binary file, which gets a PNG.
        title: Heading.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: There are no records, or the path ends in no kind of picture.
    """
    if not records:
        raise ValueError("there is nothing to draw: the history has no records")
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as exc:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from exc
    # Without pyplot, which would choose a window system and keep every figure.
    figure = figures.Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_throughput(upper, records)
    _draw_seconds(lower, records)
    if title:
        figure.suptitle(title)
    is_path = isinstance(target, str | os.PathLike)
    figure.savefig(target, format=None if is_path else "png")


def _draw_throughput(axes: Any, records: Sequence[SaveRecord]) -> None:
    for outcome, color in _COLORS.items():
        chosen = [record for record in records if record.outcome == outcome]
        if chosen:
            axes.scatter(
                [record.step for record in chosen],
                [record.bytes_per_second / _MB for record in chosen],
                color=color,
                label=f"{outcome} ({len(chosen)})",
                s=18,
            )
    axes.set_ylabel("MB/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_seconds(axes: Any, records: Sequence[SaveRecord]) -> None:
    steps = [record.step for record in records]
    axes.plot(steps, [record.upload_seconds for record in records], ".-", label="uploaded")
    axes.plot(steps, [record.staged_seconds for record in records], ".-", label="staged")
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()

"""`aioflux ckpt history`: every save and its outcome, as a table, JSON, CSV or plot.

To add a column to the table, add a line to `_COLUMNS`. JSON and CSV have the `COLUMNS` of
`checkpoint/_store/history.py`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux._values.stats import format_size
from aioflux.cli._arguments import Json, parse_root_argument
from aioflux.cli._ckpt.inspect import Root, open_checkpoints
from aioflux.cli._event_loop import run
from aioflux.cli._output import print_lines
from aioflux.cli._text import (
    format_count,
    format_seconds,
    format_time,
    one_line,
    table,
)
from aioflux.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from aioflux.checkpoint._store.history import SaveRecord

_BAR_WIDTH = 40
_MAX_BARS = 100
_COLOURS = {"committed": "green", "failed": "red", "cancelled": "yellow"}


def history(
    uri: Root,
    *,
    as_json: Json = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV with a header; its fields are above.")
    ] = False,
    as_plot: Annotated[
        bool, typer.Option("--plot", help="Plot the throughput of the last 100 saves as bars.")
    ] = False,
    picture: Annotated[
        str,
        typer.Option(metavar="PATH", help="Also plot all saves to this .png, .svg or .pdf."),
    ] = "",
) -> int:
    """Show every save below URI and its outcome, oldest first. A step can be saved repeatedly.

    STAGED is the time for which the save blocked training. UPLOADED is the time after that, until
    the commit.

    --json, --csv: time (RFC 3339), step, outcome ("committed", "failed" or "cancelled"), num_bytes,
    staged_seconds, upload_seconds, bytes_per_second, num_retries, world_size, error and record_id.

    Example: aioflux ckpt history --plot gs://bucket/runs/7
    """
    if as_json + as_csv + as_plot > 1:
        raise typer.BadParameter("--json, --csv and --plot cannot be combined")
    from aioflux.checkpoint._store.history import plot, read_history, to_csv, to_json

    argument = parse_root_argument(uri)

    async def work() -> int:
        root = await open_checkpoints(argument)
        records = await read_history(root.store)
        title = root.store.uri
        if not records:
            raise CheckpointNotFoundError(
                f"there is no history below {title}: a Checkpointer writes it when it saves"
            )
        if as_json:
            await print_lines("\n".join(json.dumps(row) for row in json.loads(to_json(records))))
        elif as_csv:
            await print_lines(to_csv(records).replace("\r\n", "\n").rstrip("\n"))
        elif as_plot:
            await print_lines(_bars(records[-_MAX_BARS:], is_terminal=sys.stdout.isatty()))
        else:
            await print_lines(_table(records))
        if picture:
            try:
                plot(records, picture, title=title)
            except ImportError as exc:
                raise ValueError(f"--picture: {exc}") from exc
        return 0

    return run(work)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else format_seconds(seconds)


_COLUMNS: dict[str, Callable[[SaveRecord], str]] = {
    "TIME": lambda save: format_time(save.time) or "-",
    "STEP": lambda save: str(save.step),
    "OUTCOME": lambda save: save.outcome,
    "SIZE": lambda save: format_size(save.num_bytes),
    "STAGED": lambda save: f"{save.staged_seconds:.3f} s",
    "UPLOADED": lambda save: _seconds(save.upload_seconds),
    "RATE": lambda save: f"{format_size(save.bytes_per_second)}/s",
    "RETRIES": lambda save: str(save.num_retries),
    "ERROR": lambda save: save.error,
}
"""Header and text of each column of the table."""
_LEFT = frozenset({"TIME", "OUTCOME", "ERROR"})
"""Columns that are aligned left."""


def _table(records: Sequence[SaveRecord]) -> str:
    rows = [[text(record) for text in _COLUMNS.values()] for record in records]
    left = frozenset(index for index, name in enumerate(_COLUMNS) if name in _LEFT)
    failed = sum(record.outcome == "failed" for record in records)
    summary = f"{format_count(len(records), 'save')}, {failed:,} failed"
    return f"{table(list(_COLUMNS), rows, left=left)}\n{summary}"


def _bars(records: Sequence[SaveRecord], *, is_terminal: bool) -> str:
    """Return a bar of the throughput of each save, coloured by outcome on a terminal."""
    is_coloured = is_terminal and not os.environ.get("NO_COLOR")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    full = "\u2588" if encoding.lower().startswith("utf") else "#"
    most = max((record.bytes_per_second for record in records), default=0.0) or 1.0
    width = max(len(str(record.step)) for record in records)
    lines = []
    for record in records:
        size = round(record.bytes_per_second / most * _BAR_WIDTH)
        bar = f"{full * size:<{_BAR_WIDTH}}"
        if is_coloured:
            bar = typer.style(bar, fg=_COLOURS[record.outcome])
        line = f"{record.step:>{width}}  {bar}  {format_size(record.bytes_per_second)}/s"
        if record.outcome != "committed":
            line += f"  {record.outcome}: {one_line(record.error)}".rstrip(": ")
        lines.append(line)
    return "\n".join(lines)

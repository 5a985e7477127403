"""`aioflux ckpt history`: what became of each save, as a table, as JSON or CSV, or as pictures."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._ckpt_list import table
from aioflux.cli._ckpt_location import Anonymous, Endpoint, Root, opened, prepare
from aioflux.cli._event_loop import run
from aioflux.cli._stdout import tell
from aioflux.cli._text import format_count, format_seconds, format_size, format_time, one_line
from aioflux.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux.checkpoint._maintain.history import SaveRecord

__all__ = ["bars", "history"]

_BAR_WIDTH = 40
_MAX_BARS = 100
_STYLES = {"committed": "green", "failed": "red", "cancelled": "yellow"}


def history(
    uri: Root,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line; the fields stand above.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with a header; the same fields.")] = (
        False
    ),
    as_plot: Annotated[
        bool, typer.Option("--plot", help="Bars of the throughput, of the last 100 saves.")
    ] = False,
    picture: Annotated[
        str,
        typer.Option(metavar="PATH", help="Draw all saves to this .png, .svg or .pdf, too."),
    ] = "",
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Show what became of each save below URI, oldest first; the newest of a step is what it holds.

    STAGED is the time for which training was held up, UPLOADED the time from then to the commit.

    --json, --csv: time (RFC 3339), step, outcome ("committed", "failed" or "cancelled"), num_bytes,
    staged_seconds, upload_seconds, bytes_per_second, num_retries, world_size, error and record_id.
    """
    if as_json + as_csv + as_plot > 1:
        raise typer.BadParameter("--json, --csv and --plot exclude each other")
    from aioflux.checkpoint._maintain.history import plot, read_history, to_csv, to_json

    place, access = prepare(uri, endpoint_url, anonymous=anonymous)

    async def work() -> int:
        async with opened(place, access) as root:
            records = await read_history(root.store)
            title = root.store.uri
        if not records:
            raise CheckpointNotFoundError(
                f"there is no history below {title}: a Checkpointer writes one as it saves"
            )
        if as_json:
            await tell("\n".join(json.dumps(row) for row in json.loads(to_json(records))))
        elif as_csv:
            await tell(to_csv(records).replace("\r\n", "\n").rstrip("\n"))
        elif as_plot:
            await tell(bars(records[-_MAX_BARS:], is_terminal=sys.stdout.isatty()))
        else:
            await tell(_table(records))
        if picture:
            try:
                plot(records, picture, title=title)
            except ImportError as exc:
                raise ValueError(f"--picture: {exc}") from exc
        return 0

    return run(work)


def _table(records: Sequence[SaveRecord]) -> str:
    header = ("TIME", "STEP", "OUTCOME", "SIZE", "STAGED", "UPLOADED", "RATE", "RETRIES", "ERROR")
    rows = [
        (
            format_time(record.time) or "-",
            str(record.step),
            record.outcome,
            format_size(record.num_bytes),
            f"{record.staged_seconds:.3f} s",
            _seconds(record.upload_seconds),
            f"{format_size(record.bytes_per_second)}/s",
            str(record.num_retries),
            record.error,
        )
        for record in records
    ]
    failed = sum(record.outcome == "failed" for record in records)
    summary = f"{format_count(len(records), 'save')}, {failed:,} failed"
    return f"{table(header, rows, left=frozenset({0, 2, 8}))}\n{summary}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else format_seconds(seconds)


def bars(records: Sequence[SaveRecord], *, is_terminal: bool) -> str:
    """Return a bar for the throughput of each save, coloured by outcome on a terminal."""
    from io import StringIO

    from rich.console import Console
    from rich.text import Text

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    full = "\u2588" if encoding.lower().startswith("utf") else "#"
    most = max((record.bytes_per_second for record in records), default=0.0) or 1.0
    width = max(len(str(record.step)) for record in records)
    out = StringIO()
    console = Console(
        file=out, force_terminal=is_terminal, color_system="standard" if is_terminal else None
    )
    for record in records:
        size = round(record.bytes_per_second / most * _BAR_WIDTH)
        line = Text(f"{record.step:>{width}}  ")
        line.append(f"{full * size:<{_BAR_WIDTH}}", style=_STYLES[record.outcome])
        line.append(f"  {format_size(record.bytes_per_second)}/s")
        if record.outcome != "committed":
            line.append(f"  {record.outcome}: {one_line(record.error)}".rstrip(": "))
        console.print(line, soft_wrap=True, highlight=False)
    return out.getvalue().rstrip("\n")

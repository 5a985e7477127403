"""Formats for output: sizes and times for people, JSON for programs.

The JSON rows are stable: fields keep their names and meanings, and new fields may be added.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from aioflux._values.stats import format_size
from aioflux.errors import AiofluxError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

_ADVICE = {
    'credentials="anonymous"': "--anonymous",
    "endpoint_url=": "--endpoint-url",
    "credentials=aioflux.S3Access(anonymous=True)": "--anonymous",
    "list it again": "run the command again",
}
"""Advice in messages of the store, and what it is on the command line."""
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def one_line(text: str) -> str:
    """Escape characters that cannot be printed, as they could break the line or move the cursor."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or 0xDC80 <= ord(char) <= 0xDCFF else repr(char)[1:-1]
        for char in text
    )


def describe(error: BaseException) -> str:
    """Return the message of an error and its notes in one line."""
    if isinstance(error, OSError) and error.strerror and not getattr(error, "message", ""):
        names = [name for name in (error.filename, error.filename2) if name is not None]
        text = f"{' -> '.join(map(str, names))}: {error.strerror}" if names else error.strerror
    elif isinstance(error, UnicodeEncodeError):
        text = f"{error.object!r} is not valid UTF-8, which object names must be"
    else:
        text = str(error) or type(error).__name__
    if isinstance(error, AiofluxError):
        for name, option in _ADVICE.items():
            text = text.replace(name, option)
    return one_line("; ".join([text, *getattr(error, "__notes__", ())]).replace("\n", " "))


def format_count(count: int, noun: str) -> str:
    """Format a count and its noun: `1 object`, `10,000 objects`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Format a duration: `3.2 s`, `2:05`, `1:02:05`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_time(moment: datetime | None) -> str | None:
    """Format a time as RFC 3339 in UTC, with milliseconds: `2026-01-31T12:00:00.000Z`."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_age(text: str) -> float:
    """Parse `90s`, `30m`, `12h`, `1d` or `2w`, and return seconds.

    Raises:
        typer.BadParameter: The text is not of this form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if not found:
        raise typer.BadParameter(
            f"{text!r} is not an age; write a number and a unit, such as 30m, 12h or 1d"
        )
    return float(found[1]) * _AGES[found[2]]


def meta_row(meta: ObjectMeta) -> dict[str, Any]:
    """Return the JSON fields of an object."""
    crc32c = meta.crc32c
    return {
        "type": "object",
        "uri": meta.uri,
        "size": meta.size,
        "updated": format_time(meta.updated),
        "generation": meta.generation,
        "etag": meta.etag,
        "crc32c": None if crc32c is None else base64.b64encode(crc32c.to_bytes(4, "big")).decode(),
        "content_type": meta.content_type,
        "content_encoding": meta.content_encoding,
        "content_disposition": meta.content_disposition,
        "cache_control": meta.cache_control,
        "storage_class": meta.storage_class,
        "metadata": dict(sorted(meta.metadata.items())),
    }


def prefix_row(uri: str) -> dict[str, Any]:
    return {"type": "prefix", "uri": uri}


def _percent_encode_invalid(uri: str) -> str:
    """Percent-encode the bytes of a local name that are not UTF-8: JSON is Unicode text."""
    return re.sub("[\udc80-\udcff]", lambda found: f"%{ord(found[0]) - 0xDC00:02X}", uri)


def json_line(row: dict[str, Any]) -> str:
    """Return a row as JSON, in ASCII, on one line."""
    return json.dumps(row | {"uri": _percent_encode_invalid(row["uri"])})


def paragraph(row: Mapping[str, Any]) -> str:
    """Format the JSON fields of an object for people: the uri, then a line for each field."""
    fields = {name: value for name, value in row.items() if name not in {"type", "uri"}}
    width = max(map(len, fields)) + 2
    lines = [one_line(row["uri"])]
    for name, value in fields.items():
        texts = [] if isinstance(value, dict) else [str("-" if value in (None, "") else value)]
        if isinstance(value, list | tuple):
            texts = [", ".join(map(str, value)) or "-"]
        elif name == "size":
            texts = [f"{value} ({format_size(value)})"]
        elif name == "metrics":
            texts = [format_metrics(value)]
        elif name == "metadata":
            texts = [f"{key}: {text}" for key, text in value.items()]
        label = f"{name.replace('_', ' ')}:"
        lines += [f"  {label:<{width}}{one_line(text)}" for text in texts]
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[int]) -> str:
    """Format rows as a table.

    Args:
        header: Names of the columns.
        rows: Cells of each row.
        left: Indices of the columns that are aligned left; the others are aligned right.
    """
    cells = [list(header), *(list(map(one_line, row)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Format metrics by name: `accuracy=0.91 loss=0.3`."""
    return " ".join(f"{name}={value:g}" for name, value in sorted(metrics.items())) or "-"


def format_timestamp(seconds: float) -> str | None:
    """Format seconds since 1970 as RFC 3339."""
    return format_time(datetime.fromtimestamp(seconds, UTC))

"""`aioflux ckpt list` and `show`: what checkpoints there are, and what one holds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux.cli._ckpt_location import Anonymous, Endpoint, Json, Root, opened, prepare
from aioflux.cli._event_loop import run
from aioflux.cli._report import Report
from aioflux.cli._stdout import tell
from aioflux.cli._text import format_count, format_size, format_time, json_line, one_line
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflux.checkpoint._format.commit import Commit
    from aioflux.checkpoint._store.commits import StepSummary
    from aioflux.cli._ckpt_location import Anonymous, Endpoint, Opened

__all__ = ["list_command", "show", "table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[int]) -> str:
    """Return rows as text: columns as wide as they need to be, numbers to the right.

    Args:
        header: Names of the columns.
        rows: What stands in them.
        left: Columns that begin at the left.
    """
    cells = [list(header), *(list(map(one_line, row)) for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Write metrics by name: `accuracy=0.91 loss=0.3`."""
    return " ".join(f"{name}={value:g}" for name, value in sorted(metrics.items())) or "-"


def format_created(seconds: float) -> str | None:
    """Write a time of a commit as RFC 3339 does."""
    return format_time(datetime.fromtimestamp(seconds, UTC))


def list_command(
    uri: Root,
    *,
    as_json: Json = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """List the committed steps below URI. They are not verified: see "ckpt verify".

    A step whose commit object is damaged is listed, and the exit status is 1.

    --json: type ("checkpoint"), uri, step, created (RFC 3339), size (bytes), num_objects,
    world_size, layout ("dcp" or "safetensors"), save_id, metrics and problem; what is not known is
    null or empty.
    """
    from aioflux.checkpoint._store.commits import summarize

    place, access = prepare(uri, endpoint_url, anonymous=anonymous)
    report = Report()

    async def work() -> int:
        async with opened(place, access) as root:
            if not root.is_root:
                raise ValueError(f"{root.store.uri} is one checkpoint; see it with `ckpt show`")
            found = await summarize(root.store)
            if not found:
                raise CheckpointNotFoundError(
                    f"there is no checkpoint below {root.store.uri}; check the spelling"
                )
        if as_json:
            await tell("\n".join(json_line(_row(each)) for each in found))
        else:
            header = ("STEP", "CREATED", "SIZE", "OBJECTS", "RANKS", "LAYOUT", "METRICS")
            rows = [_cells(each) for each in found]
            await tell(table(header, rows, left=frozenset({1, 5, 6})))
        for each in found:
            if each.problem:
                report.fail(each.problem)
        total = sum(each.num_bytes for each in found)
        return report.finish(f"{format_count(len(found), 'step')}, {format_size(total)}")

    return run(work)


def _cells(summary: StepSummary) -> tuple[str, ...]:
    if summary.problem:
        return (str(summary.step), "-", "-", "-", "-", "-", "cannot be read")
    return (
        str(summary.step),
        format_created(summary.created) or "-",
        format_size(summary.num_bytes),
        f"{summary.num_objects:,}",
        str(summary.world_size),
        summary.layout,
        format_metrics(summary.metrics),
    )


def _row(summary: StepSummary) -> dict[str, Any]:
    is_known = not summary.problem
    return {
        "type": "checkpoint",
        "uri": summary.uri,
        "step": summary.step,
        "created": format_created(summary.created) if is_known else None,
        "size": summary.num_bytes if is_known else None,
        "num_objects": summary.num_objects if is_known else None,
        "world_size": summary.world_size if is_known else None,
        "layout": summary.layout,
        "save_id": summary.save_id,
        "metrics": dict(summary.metrics),
        "problem": summary.problem,
    }


def show(
    uri: Root,
    *,
    step: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="This step; the newest that verifies by default."),
    ] = None,
    as_json: Json = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Show one checkpoint, and the objects it is made of.

    --json: one line with type ("checkpoint"), uri, step, created, size, num_objects, world_size,
    layout, save_id and metrics, then one for each object with type ("object"), uri, size, crc32c
    (8 hexadecimal digits), generation, rank and num_items.
    """
    from aioflux.checkpoint._store.commits import read_commit

    place, access = prepare(uri, endpoint_url, anonymous=anonymous)

    async def work() -> int:
        async with opened(place, access) as root:
            prefix = await _chosen(root, step)
            commit = (await read_commit(root.store, prefix)).commit
            if commit is None:
                raise CheckpointCorruptError(
                    f"{root.uri(prefix)} holds no commit of aioflux: something else wrote it"
                )
            rows = _rows(root, prefix, commit)
        await tell("\n".join(map(json_line, rows)) if as_json else _paragraph(rows))
        return 0

    return run(work)


async def _chosen(root: Opened, step: int | None) -> str:
    """Return the prefix of the checkpoint to show.

    Raises:
        CheckpointNotFoundError: No step verifies.
    """
    from aioflux.checkpoint._maintain.verify import newest_first

    if step is not None or not root.is_root:
        return (await root.prefixes(None if step is None else [step]))[0]
    async for each in newest_first(root.store):
        if each.is_valid:
            return each.uri.removeprefix(root.uri(""))
    raise CheckpointNotFoundError(f"no checkpoint below {root.store.uri} verifies")


def _rows(root: Opened, prefix: str, commit: Commit) -> list[dict[str, Any]]:
    whole = {
        "type": "checkpoint",
        "uri": root.uri(prefix),
        "step": commit.step,
        "created": format_created(commit.created),
        "size": commit.num_bytes,
        "num_objects": len(commit.objects),
        "world_size": commit.world_size,
        "layout": commit.layout,
        "save_id": commit.save_id,
        "metrics": dict(commit.metrics),
    }
    return [whole] + [
        {
            "type": "object",
            "uri": root.uri(prefix + stored.key),
            "size": stored.size,
            "crc32c": f"{stored.crc32c:08x}",
            "generation": stored.generation,
            "rank": stored.rank,
            "num_items": len(stored.items),
        }
        for stored in commit.objects
    ]


def _paragraph(rows: list[dict[str, Any]]) -> str:
    whole, *objects = rows
    lines = [one_line(whole["uri"])]
    for name, value in whole.items():
        if name in {"type", "uri"}:
            continue
        text = str("-" if value is None else value)
        if name == "size":
            text = f"{value} ({format_size(value)})"
        elif name == "metrics":
            text = format_metrics(value)
        lines.append(f"  {name.replace('_', ' ') + ':':<13}{one_line(text)}")
    header = ("SIZE", "CRC32C", "RANK", "ITEMS", "OBJECT")
    cells = [
        (
            str(row["size"]),
            row["crc32c"],
            str(row["rank"]),
            f"{row['num_items']:,}",
            row["uri"].removeprefix(whole["uri"]),
        )
        for row in objects
    ]
    return "\n".join([*lines, "", table(header, cells, left=frozenset({4}))])

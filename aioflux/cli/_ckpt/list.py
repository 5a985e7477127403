"""`aioflux ckpt list`: the committed steps of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux._values.stats import format_size
from aioflux.cli._ckpt.root import Root, checkpoint_row, open_checkpoints
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines
from aioflux.cli._text import (
    format_count,
    format_metrics,
    format_timestamp,
    json_line,
    table,
)
from aioflux.cli._uri_or_path import Json, parse_root_argument
from aioflux.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import StepInfo


def list_command(
    uri: Root,
    *,
    as_json: Json = False,
) -> int:
    """List the committed steps below URI, without verifying them (see "ckpt verify").

    A step whose commit object is damaged is listed, and the exit status is 1.

    --json: type ("checkpoint"), uri, step, created (RFC 3339), size (bytes), num_objects,
    world_size, layout ("dcp" or "safetensors"), save_id, metrics and problem; unknown values are
    null or empty.

    Example: aioflux ckpt list gs://bucket/runs/7
    """
    from aioflux.checkpoint._store.steps import describe_steps

    argument = parse_root_argument(uri)
    report = Report()

    async def work() -> int:
        root = await open_checkpoints(argument)
        if not root.is_root:
            raise ValueError(f"{root.store.uri} is one checkpoint; use `aioflux ckpt show`")
        found = await describe_steps(root.store)
        if not found:
            raise CheckpointNotFoundError(
                f"there is no checkpoint below {root.store.uri}; check the spelling"
            )
        if as_json:
            await print_lines("\n".join(json_line(_row(each)) for each in found))
        else:
            header = ("STEP", "CREATED", "SIZE", "OBJECTS", "RANKS", "LAYOUT", "METRICS")
            rows = [_cells(each) for each in found]
            await print_lines(table(header, rows, left=frozenset({1, 5, 6})))
        for each in found:
            if each.problem:
                report.fail(each.problem)
        total = sum(each.num_bytes for each in found)
        return report.finish(f"{format_count(len(found), 'step')}, {format_size(total)}")

    return run(work)


def _cells(info: StepInfo) -> tuple[str, ...]:
    if info.problem:
        return (str(info.step), "-", "-", "-", "-", "-", "cannot be read")
    return (
        str(info.step),
        format_timestamp(info.created) or "-",
        format_size(info.num_bytes),
        f"{info.num_objects:,}",
        str(info.world_size),
        info.layout,
        format_metrics(info.metrics),
    )


def _row(info: StepInfo) -> dict[str, Any]:
    row = checkpoint_row(info.uri, info, info.num_objects)
    unknown = ("created", "size", "num_objects", "world_size") if info.problem else ()
    return row | dict.fromkeys(unknown) | {"problem": info.problem}

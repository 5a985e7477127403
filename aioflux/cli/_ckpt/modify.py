"""`aioflux ckpt prune` and `copy`: deletion of the steps that no rule keeps, and copies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux._values.stats import format_size
from aioflux.cli._arguments import Json, parse_arguments, parse_root_argument
from aioflux.cli._ckpt.inspect import (
    Root,
    Steps,
    open_checkpoints,
)
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines
from aioflux.cli._progress import CommandProgress
from aioflux.cli._text import format_count, json_line, one_line, parse_age

if TYPE_CHECKING:
    from aioflux.checkpoint._store.copy import CheckpointLocation, Copied
    from aioflux.checkpoint._store.retention_rules import Retention
    from aioflux.cli._arguments import UriOrPath
    from aioflux.errors import AiofluxError


KeepLast = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Keep the N newest valid steps.")
]
KeepEvery = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Keep the steps that are multiples of N.")
]
KeepBest = Annotated[
    str | None,
    typer.Option(
        metavar="METRIC:MODE[:N]",
        help='Keep the best step, or the N best: "loss:min", "accuracy:max:3".',
    ),
]
Ttl = Annotated[
    str | None, typer.Option(metavar="AGE", help="Keep steps younger than this: 30m, 12h, 7d, 2w.")
]
Protect = Annotated[
    list[int] | None, typer.Option(metavar="STEP", min=0, help="Keep this step; repeatable.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
]


def prune_command(
    uri: Root,
    *,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_best: KeepBest = None,
    ttl: Ttl = None,
    protect: Protect = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Delete the steps below URI that no rule keeps; at least one rule is needed.

    The newest valid step and all newer steps are always kept. Rules count valid steps only. The
    commit object of a step is deleted first: if the command is interrupted, "aioflux clean" deletes
    the remaining objects of the step.

    --json: type ("checkpoint"), uri and step of each deleted step.

    Example: aioflux ckpt prune --keep-last 3 --keep-best loss:min --dry-run gs://bucket/runs/7
    """
    from aioflux.checkpoint._format.commit import step_prefix
    from aioflux.checkpoint._store.retention import prune

    retention = _parse_rules(keep_last, keep_every, keep_best, ttl)
    argument = parse_root_argument(uri)
    report = Report()

    async def work() -> int:
        root = await open_checkpoints(argument)
        if not root.is_root:
            raise ValueError(f"{root.store.uri} is one checkpoint; use `aioflux rm -r`")
        done = await prune(
            root.store,
            retention,
            now=time.time(),
            protected=frozenset(protect or ()),
            dry_run=dry_run,
        )
        rows: list[dict[str, Any]] = [
            {"type": "checkpoint", "uri": root.uri(step_prefix(step)), "step": step}
            for step in done.removed
        ]
        verb = "would delete" if dry_run else "deleted"
        await print_lines(
            "\n".join(
                json_line(row) if as_json else f"{verb} {one_line(row['uri'])}" for row in rows
            )
        )
        for _, error in sorted(done.errors.items()):
            report.fail(error)
        steps = format_count(len(rows), "step")
        return report.finish(f"{verb} {steps}, {len(done.kept):,} kept")

    return run(work)


def _parse_rules(
    keep_last: int | None, keep_every: int | None, keep_best: str | None, ttl: str | None
) -> Retention:
    from aioflux.checkpoint._store.retention_rules import Retention

    try:
        retention = Retention(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=None if keep_best is None else _parse_best(keep_best),
            ttl_seconds=None if ttl is None else parse_age(ttl),
        )
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None
    if not retention.has_rules:
        raise typer.BadParameter("use --keep-last, --keep-every, --keep-best or --ttl")
    return retention


def _parse_best(text: str) -> tuple[str, str] | tuple[str, str, int]:
    """Parse `loss:min` or `accuracy:max:3`.

    Raises:
        ValueError: The text has neither form.
    """
    metric, colon, mode = text.partition(":")
    mode, more, count = mode.partition(":")
    if not metric or not colon or mode not in {"min", "max"} or (more and not count.isdecimal()):
        raise ValueError(
            f'--keep-best: {text!r} is not a rule; write "loss:min" or "accuracy:max:3"'
        )
    return (metric, mode, int(count)) if more else (metric, mode)


def copy_command(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="One checkpoint, or the root of a run.")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The uri of the copy.")],
    *,
    step: Steps = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Overwrite different checkpoints at TARGET.")
    ] = False,
) -> int:
    """Copy checkpoints: first the objects, verified, then the commit object.

    A copy can be loaded like the original, also by PyTorch alone. An interrupted copy is not
    visible. The same command resumes it: objects that exist are not copied again. If a step cannot
    be copied, an error is printed, the other steps are copied, and the exit status is 1.

    "aioflux cp -r" copies the same bytes, but an interrupted copy can be visible and incomplete,
    and the copy is not verified with the commit object.

    Example: aioflux ckpt copy --step 1000 gs://bucket/runs/7 s3://archive/7
    """
    from aioflux.checkpoint._store.copy import copy_checkpoint, copy_root
    from aioflux.checkpoint._store.steps import read_commits

    arguments = parse_arguments([source, target])
    report = Report()

    async def work() -> int:
        errors: dict[str, AiofluxError] = {}
        progress = CommandProgress()
        locations = [_locate(each) for each in arguments]
        is_one = bool(await read_commits(locations[0].store, locations[0].prefix))
        if is_one and step:
            raise ValueError(f"{source} is one checkpoint; --step needs the run's root")
        with progress.show():
            count = progress.advance
            if is_one:
                copied = [await copy_checkpoint(*locations, overwrite=overwrite, progress=count)]
            else:
                copied, errors = await copy_root(
                    *locations, steps=step, overwrite=overwrite, progress=count
                )
        for _, error in sorted(errors.items()):
            report.fail(error)
        if not copied and not errors:
            report.fail(f"there is no checkpoint at {one_line(source)}")
        await print_lines("\n".join(_line(each) for each in copied))
        new = [each for each in copied if each.is_new]
        size = format_size(sum(each.num_bytes for each in new))
        return report.finish(f"copied {format_count(len(new), 'checkpoint')}, {size}")

    return run(work)


def _locate(argument: UriOrPath) -> CheckpointLocation:
    """Return store and prefix of an argument.

    Source and target in one bucket get the same store, so that the service copies the bytes.
    """
    from aioflux.checkpoint._store.copy import CheckpointLocation

    return CheckpointLocation(*argument.open())


def _line(copied: Copied) -> str:
    uri = one_line(copied.uri)
    if not copied.is_new:
        return f"exists  {uri}"
    count = format_count(copied.num_objects, "object")
    return f"copied  {uri}  {count}, {format_size(copied.num_bytes)}"

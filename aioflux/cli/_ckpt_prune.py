"""`aioflux ckpt prune`: removes steps that no rule keeps."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from aioflux.cli._ckpt_location import Anonymous, Endpoint, Json, Root, opened, prepare
from aioflux.cli._event_loop import run
from aioflux.cli._report import Report
from aioflux.cli._stdout import tell
from aioflux.cli._text import describe, format_count, json_line, one_line, parse_age

__all__ = ["parse_best", "prune_command"]


def prune_command(
    uri: Root,
    *,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the N newest steps that verify.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the steps that N divides.")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:MODE[:N]",
            help='Keep the best step, or N of them: "loss:min", "accuracy:max:3".',
        ),
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="AGE", help="Keep what is younger: 30m, 12h, 7d, 2w.")
    ] = None,
    protect: Annotated[
        list[int] | None,
        typer.Option(metavar="STEP", min=0, help="Keep this step; may be given repeatedly."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    as_json: Json = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Remove the steps below URI that no rule keeps; at least one rule is needed.

    The newest step that verifies always stays, and so does what is newer; steps that do not verify
    take the place of none. The commit object goes first: what is left where this is interrupted,
    "aioflux clean" finds.

    --json: type ("checkpoint"), uri and step of each step that was removed.
    """
    from aioflux.checkpoint._format.commit import step_prefix
    from aioflux.checkpoint._maintain.retention import Retention, prune

    try:
        retention = Retention(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=None if keep_best is None else parse_best(keep_best),
            ttl_seconds=None if ttl is None else parse_age(ttl),
        )
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None
    if not retention.has_rules:
        raise typer.BadParameter(
            "say what stays, with --keep-last, --keep-every, --keep-best or --ttl"
        )
    place, access = prepare(uri, endpoint_url, anonymous=anonymous)
    report = Report()

    async def work() -> int:
        async with opened(place, access) as root:
            if not root.is_root:
                raise ValueError(f"{root.store.uri} is one checkpoint; remove it with `rm -r`")
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
        await tell(
            "\n".join(
                json_line(row) if as_json else f"{verb} {one_line(row['uri'])}" for row in rows
            )
        )
        for _, error in sorted(done.errors.items()):
            report.fail(describe(error))
        steps = format_count(len(rows), "step")
        return report.finish(f"{verb} {steps}, {len(done.kept):,} kept")

    return run(work)


def parse_best(text: str) -> tuple[str, str] | tuple[str, str, int]:
    """Read `loss:min` or `accuracy:max:3`.

    Raises:
        ValueError: It is neither.
    """
    metric, colon, mode = text.partition(":")
    mode, more, count = mode.partition(":")
    if not metric or not colon or mode not in {"min", "max"} or (more and not count.isdecimal()):
        raise ValueError(f'--keep-best: {text!r} is no rule; write "loss:min" or "accuracy:max:3"')
    return (metric, mode, int(count)) if more else (metric, mode)

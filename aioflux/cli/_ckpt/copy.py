"""`aioflux ckpt copy`: copies of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from aioflux._values.stats import format_size
from aioflux.cli._ckpt.root import Steps  # noqa: TC001  typer reads it
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines
from aioflux.cli._progress import CommandProgress
from aioflux.cli._text import format_count, one_line
from aioflux.cli._uri_or_path import parse_arguments

if TYPE_CHECKING:
    from aioflux.checkpoint._store.copy import CheckpointLocation, Copied
    from aioflux.cli._uri_or_path import UriOrPath
    from aioflux.errors import AiofluxError


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

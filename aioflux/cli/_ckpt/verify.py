"""`aioflux ckpt verify`: comparison of checkpoints with their commit objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux._values.stats import format_size
from aioflux.cli._ckpt.root import Root, Steps, open_checkpoints
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines
from aioflux.cli._progress import CommandProgress
from aioflux.cli._text import format_count, json_line, one_line
from aioflux.cli._uri_or_path import Json, parse_root_argument

if TYPE_CHECKING:
    from aioflux.checkpoint._store.verify import Verification


def verify_command(
    uri: Root,
    *,
    step: Steps = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Read all bytes, and verify the crc32c of every block."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Verify the steps below URI, or one checkpoint, against their commit objects.

    A checkpoint is valid if its commit object is intact, and all objects in the commit exist with
    the same size, generation and crc32c. If there is a problem, it is printed, and the exit status
    is 1.

    --json: type ("checkpoint"), uri, step, is_valid, num_objects, size (bytes) and problems, a list
    of kind ("no_commit", "commit", "foreign", "missing", "size", "generation", "crc32c" or
    "bytes"), uri and message.

    Example: aioflux ckpt verify --deep gs://bucket/runs/7
    """
    from aioflux.checkpoint._store.verify import verify

    argument = parse_root_argument(uri)
    report = Report()

    async def work() -> int:
        num_valid = num_bytes = 0
        root = await open_checkpoints(argument)
        for prefix in await root.prefixes(step):
            progress = CommandProgress()
            with progress.show(is_wanted=deep):
                found = await verify(root.store, prefix, deep=deep, progress=progress.advance)
            await print_lines(json_line(_row(found)) if as_json else _line(found))
            num_valid += found.is_valid
            num_bytes += found.num_bytes
            for problem in found.problems:
                report.fail(one_line(problem.message))
        what = "read and verified" if deep else "verified"
        count = format_count(num_valid, "checkpoint")
        return report.finish(f"{what} {count}, {format_size(num_bytes)}")

    return run(work)


def _line(found: Verification) -> str:
    uri = one_line(found.uri)
    if found.is_valid:
        count = format_count(found.num_objects, "object")
        return f"ok      {uri}  {count}, {format_size(found.num_bytes)}"
    kinds = sorted({problem.kind for problem in found.problems})
    return f"broken  {uri}  {', '.join(kinds).replace('_', ' ')}"


def _row(found: Verification) -> dict[str, Any]:
    return {
        "type": "checkpoint",
        "uri": found.uri,
        "step": found.step,
        "is_valid": found.is_valid,
        "num_objects": found.num_objects,
        "size": found.num_bytes,
        "problems": [
            {"kind": problem.kind, "uri": problem.uri, "message": problem.message}
            for problem in found.problems
        ],
    }

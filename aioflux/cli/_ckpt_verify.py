"""`aioflux ckpt verify`: whether checkpoints are all there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux.cli._ckpt_location import Anonymous, Endpoint, Json, Root, Steps, opened, prepare
from aioflux.cli._ckpt_progress import show_bytes
from aioflux.cli._event_loop import run
from aioflux.cli._report import Report
from aioflux.cli._stdout import tell
from aioflux.cli._text import format_count, format_size, json_line, one_line

if TYPE_CHECKING:
    from aioflux.checkpoint._maintain.verify import Verification

__all__ = ["verify_command"]


def verify_command(
    uri: Root,
    *,
    step: Steps = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Read all bytes, and compare the crc32c of every block."),
    ] = False,
    as_json: Json = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Verify the steps below URI, or one checkpoint, against their commit objects.

    The commit object is whole, and each object that it names is there, with that size, generation
    and crc32c. The exit status is 1 where something is wrong, which is named.

    --json: type ("checkpoint"), uri, step, is_valid, num_objects, size (bytes) and problems, a list
    of kind ("no_commit", "commit", "foreign", "missing", "size", "generation", "crc32c" or
    "bytes"), uri and message.
    """
    from aioflux.checkpoint._maintain.verify import verify

    place, access = prepare(uri, endpoint_url, anonymous=anonymous)
    report = Report()

    async def work() -> int:
        num_valid = num_bytes = 0
        async with opened(place, access) as root:
            for prefix in await root.prefixes(step):
                with show_bytes(is_wanted=deep) as progress:
                    found = await verify(root.store, prefix, deep=deep, progress=progress)
                await tell(json_line(_row(found)) if as_json else _line(found))
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

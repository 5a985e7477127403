"""`aioflux ckpt list`, `show` and `verify`: the checkpoints of a run.

The URI argument of all commands is the root of a run, or one checkpoint. Each command imports the
modules of `aioflux.checkpoint` when it runs, so that `--help` and the other commands do not wait
for these imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux._values.stats import format_size
from aioflux.cli._arguments import Json, parse_root_argument
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines
from aioflux.cli._progress import CommandProgress
from aioflux.cli._text import (
    format_count,
    format_metrics,
    format_timestamp,
    json_line,
    one_line,
    paragraph,
    table,
)
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import Commit, StepInfo
    from aioflux.checkpoint._store.verify import Verification
    from aioflux.cli._arguments import UriOrPath
    from aioflux.store import Store


Root = Annotated[
    str,
    typer.Argument(
        metavar="URI", help="The root of a run, as given to Checkpointer, or one checkpoint."
    ),
]
Steps = Annotated[
    list[int] | None,
    typer.Option("--step", metavar="STEP", min=0, help="Only this step; repeatable."),
]


@dataclass(frozen=True, slots=True)
class CheckpointRoot:
    """The root of a run, or one checkpoint."""

    store: Store
    """The store at the uri of the argument."""
    is_root: bool
    """True for the root of a run, False for one checkpoint."""

    async def prefixes(self, steps: Sequence[int] | None) -> list[str]:
        """Return the prefixes of the given steps, or of all steps for None, sorted by step.

        Raises:
            CheckpointNotFoundError: The root has no checkpoint.
            ValueError: Steps are given, but the store is one checkpoint.
        """
        from aioflux.checkpoint._format.commit import step_prefix
        from aioflux.checkpoint._store.steps import list_steps

        if not self.is_root:
            if steps:
                raise ValueError(f"{self.store.uri} is one checkpoint; --step needs the run's root")
            return [""]
        found = sorted(set(steps)) if steps else await list_steps(self.store)
        if not found:
            raise CheckpointNotFoundError(
                f"there is no checkpoint below {self.store.uri}; check the spelling"
            )
        return [step_prefix(step) for step in found]

    def uri(self, prefix: str) -> str:
        """Return the uri of the checkpoint with this prefix."""
        from aioflux.checkpoint._store.steps import uri_below

        return uri_below(self.store, prefix)


async def open_checkpoints(argument: UriOrPath) -> CheckpointRoot:
    """Open the root of a run, or one checkpoint: a prefix that has a commit object."""
    from aioflux.checkpoint._store.steps import read_commits

    store = argument.open_root(str(argument.location))
    return CheckpointRoot(store, not await read_commits(store, ""))


def checkpoint_row(uri: str, saved: Commit | StepInfo, num_objects: int) -> dict[str, Any]:
    """Return the JSON fields of a checkpoint: all facts of its save, and its size."""
    from aioflux.checkpoint._format.commit import SaveFacts

    facts = {name: getattr(saved, name) for name in SaveFacts.__struct_fields__}
    created = format_timestamp(saved.created)
    known = {"uri": uri, "created": created, "size": saved.num_bytes, "num_objects": num_objects}
    return {"type": "checkpoint"} | facts | known


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
            await print_lines("\n".join(json_line(_step_row(each)) for each in found))
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


def _step_row(info: StepInfo) -> dict[str, Any]:
    row = checkpoint_row(info.uri, info, info.num_objects)
    unknown = ("created", "size", "num_objects", "world_size") if info.problem else ()
    return row | dict.fromkeys(unknown) | {"problem": info.problem}


def show(
    uri: Root,
    *,
    step: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="Show this step. Default: the newest valid one."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show one checkpoint and its objects.

    --json: one line with type ("checkpoint"), uri, step, created, size, num_objects, world_size,
    layout, save_id and metrics, then one for each object with type ("object"), uri, size, crc32c
    (8 hexadecimal digits), generation, rank and num_items.

    Example: aioflux ckpt show --step 1000 gs://bucket/runs/7
    """
    from aioflux.checkpoint._store.steps import read_commit

    argument = parse_root_argument(uri)

    async def work() -> int:
        root = await open_checkpoints(argument)
        prefix = await _choose(root, step)
        commit = (await read_commit(root.store, prefix)).commit
        if commit is None:
            raise CheckpointCorruptError(
                f"{root.uri(prefix)} has no commit of aioflux: another program wrote it"
            )
        rows = _rows_of(root, prefix, commit)
        await print_lines("\n".join(map(json_line, rows)) if as_json else _describe(rows))
        return 0

    return run(work)


async def _choose(root: CheckpointRoot, step: int | None) -> str:
    """Return the prefix of the checkpoint to show.

    Raises:
        CheckpointNotFoundError: `step` is None, and no step is valid.
        ValueError: `step` is given, but the uri is one checkpoint.
    """
    from aioflux.checkpoint._store.verify import newest_first

    if step is not None or not root.is_root:
        return (await root.prefixes(None if step is None else [step]))[0]
    async for each in newest_first(root.store):
        if each.is_valid:
            return each.uri.removeprefix(root.uri(""))
    raise CheckpointNotFoundError(f"there is no valid checkpoint below {root.store.uri}")


def _rows_of(root: CheckpointRoot, prefix: str, commit: Commit) -> list[dict[str, Any]]:
    whole = checkpoint_row(root.uri(prefix), commit, len(commit.objects))
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


def _describe(rows: list[dict[str, Any]]) -> str:
    whole, *objects = rows
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
    return f"{paragraph(whole)}\n\n{table(header, cells, left=frozenset({4}))}"


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
            await print_lines(
                json_line(_verification_row(found)) if as_json else _verification_line(found)
            )
            num_valid += found.is_valid
            num_bytes += found.num_bytes
            for problem in found.problems:
                report.fail(one_line(problem.message))
        what = "read and verified" if deep else "verified"
        count = format_count(num_valid, "checkpoint")
        return report.finish(f"{what} {count}, {format_size(num_bytes)}")

    return run(work)


def _verification_line(found: Verification) -> str:
    uri = one_line(found.uri)
    if found.is_valid:
        count = format_count(found.num_objects, "object")
        return f"ok      {uri}  {count}, {format_size(found.num_bytes)}"
    kinds = sorted({problem.kind for problem in found.problems})
    return f"broken  {uri}  {', '.join(kinds).replace('_', ' ')}"


def _verification_row(found: Verification) -> dict[str, Any]:
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

"""`aioflux ckpt show`: one checkpoint and its objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux.cli._ckpt.root import Root, checkpoint_row, open_checkpoints
from aioflux.cli._event_loop import run
from aioflux.cli._output import print_lines
from aioflux.cli._text import json_line, paragraph, table
from aioflux.cli._uri_or_path import Json, parse_root_argument
from aioflux.errors import CheckpointCorruptError, CheckpointNotFoundError

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import Commit
    from aioflux.cli._ckpt.root import CheckpointRoot


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
        rows = _rows(root, prefix, commit)
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


def _rows(root: CheckpointRoot, prefix: str, commit: Commit) -> list[dict[str, Any]]:
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

"""`aioflux ckpt copy`: checkpoints from anywhere to anywhere, each whole or not at all."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._ckpt_location import VERIFIED_BY_BLOCKS, Steps
from aioflux.cli._ckpt_progress import show_bytes
from aioflux.cli._event_loop import run
from aioflux.cli._location import (
    Access,
    Anonymous,
    Endpoint,
    check_places,
    open_place,
    parse_place,
)
from aioflux.cli._report import Report
from aioflux.cli._stdout import tell
from aioflux.cli._text import describe, format_count, format_size, one_line

if TYPE_CHECKING:
    from aioflux.checkpoint._maintain.copy import CheckpointLocation, Copied
    from aioflux.cli._location import Place
    from aioflux.store import Store

__all__ = ["copy_command"]


def copy_command(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="One checkpoint, or what steps are below.")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Where it goes, with all below.")],
    *,
    step: Steps = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace other checkpoints that are there.")
    ] = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Copy checkpoints: the objects, verified, then the commit object.

    A copy can be loaded as what it was made of can, by PyTorch too. One that is interrupted is not
    visible, and goes on where it ended when it is begun again. What is there already is not copied
    twice. A step that cannot be copied does not keep the others; the exit status is then 1.

    "aioflux cp -r" copies the bytes, too. It makes a checkpoint visible before it is whole where
    it is interrupted, and verifies nothing by the commit.
    """
    from aioflux.checkpoint._maintain.copy import copy_checkpoint, copy_root
    from aioflux.checkpoint._store.commits import read_commits

    places = parse_place(source), parse_place(target)
    access = Access(endpoint_url, anonymous)
    check_places(places, access)
    report = Report()

    async def work() -> int:
        async with AsyncExitStack() as stack:
            stores: dict[str, Store] = {}
            spots = [await _spot(place, access, stores, stack) for place in places]
            if await read_commits(spots[0].store, spots[0].prefix):
                if step:
                    raise ValueError(f"{source} is one checkpoint; --step needs what it is in")
                with show_bytes() as progress:
                    done = await copy_checkpoint(*spots, overwrite=overwrite, progress=progress)
                copied = [done]
            else:
                with show_bytes() as progress:
                    copied, errors = await copy_root(
                        *spots, steps=step, overwrite=overwrite, progress=progress
                    )
                for _, error in sorted(errors.items()):
                    report.fail(describe(error))
                if not copied and not errors:
                    report.fail(f"there is no checkpoint at {one_line(source)}")
        await tell("\n".join(_line(each) for each in copied))
        new = [each for each in copied if each.is_new]
        size = format_size(sum(each.num_bytes for each in new))
        return report.finish(f"copied {format_count(len(new), 'checkpoint')}, {size}")

    return run(work)


async def _spot(
    place: Place, access: Access, stores: dict[str, Store], stack: AsyncExitStack
) -> CheckpointLocation:
    """Return where a place is; places in one bucket are in one store, which copies by itself."""
    from aioflux.checkpoint._maintain.copy import CheckpointLocation

    root, prefix = place.split()
    if root not in stores:
        store = open_place(root, access, transfer=VERIFIED_BY_BLOCKS)
        stores[root] = await stack.enter_async_context(store)
    return CheckpointLocation(stores[root], prefix)


def _line(copied: Copied) -> str:
    uri = one_line(copied.uri)
    if not copied.is_new:
        return f"there already  {uri}"
    count = format_count(copied.num_objects, "object")
    return f"copied         {uri}  {count}, {format_size(copied.num_bytes)}"

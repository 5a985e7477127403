"""What the commands of `aioflux ckpt` open: the root of a run's checkpoints, or one checkpoint.

As in all of them, what works on checkpoints is loaded by the command that runs: the help, and the
other commands, do without it.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._location import Access, Anonymous, Endpoint, check_places, open_place, parse_place
from aioflux.errors import CheckpointNotFoundError, NotFoundError
from aioflux.options import TransferOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aioflux.cli._location import Place
    from aioflux.store import Store

__all__ = [
    "VERIFIED_BY_BLOCKS",
    "Anonymous",
    "Endpoint",
    "Json",
    "Opened",
    "Root",
    "Steps",
    "opened",
    "prepare",
]

Root = Annotated[
    str,
    typer.Argument(
        metavar="URI",
        help="What the steps are below, as a Checkpointer was given it, or one checkpoint.",
    ),
]
Steps = Annotated[
    list[int] | None,
    typer.Option("--step", metavar="STEP", min=0, help="Only this step; may be given repeatedly."),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object per line; the fields stand above.")
]

VERIFIED_BY_BLOCKS = TransferOptions(verify_ranges="never")
"""For reads that compare the blocks of the commit: no other comparison is needed."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A root, or one checkpoint."""

    store: Store
    """The store that was opened on it."""
    is_root: bool
    """False where it is one checkpoint itself."""

    async def prefixes(self, steps: Sequence[int] | None) -> list[str]:
        """Return the prefixes of the checkpoints that were asked for, by step.

        Raises:
            CheckpointNotFoundError: There is none.
            ValueError: It is one checkpoint, and steps of it are asked for.
        """
        from aioflux.checkpoint._format.commit import step_prefix
        from aioflux.checkpoint._store.commits import list_steps

        if not self.is_root:
            if steps:
                raise ValueError(f"{self.store.uri} is one checkpoint; --step needs what it is in")
            return [""]
        found = sorted(set(steps)) if steps else await list_steps(self.store)
        if not found:
            raise CheckpointNotFoundError(
                f"there is no checkpoint below {self.store.uri}; check the spelling"
            )
        return [step_prefix(step) for step in found]

    def uri(self, prefix: str) -> str:
        """Return the uri of a checkpoint."""
        from aioflux.checkpoint._store.commits import uri_below

        return uri_below(self.store, prefix)


def prepare(uri: str, endpoint_url: str | None, *, anonymous: bool) -> tuple[Place, Access]:
    """Read the argument, before there is an event loop.

    Raises:
        NotFoundError: It is a local directory that is not there.
        ValueError: It cannot be opened.
    """
    place = parse_place(uri)
    access = Access(endpoint_url, anonymous)
    check_places([place], access)
    if place.is_local and not os.path.isdir(place.path):
        raise NotFoundError(f"there is no directory {place.text}", uri=str(place.location))
    return place, access


@asynccontextmanager
async def opened(place: Place, access: Access) -> AsyncIterator[Opened]:
    """Open a root or a checkpoint; a look at its commit object tells which it is."""
    from aioflux.checkpoint._store.commits import read_commits

    root = str(place.location)
    async with open_place(root, access, transfer=VERIFIED_BY_BLOCKS) as store:
        yield Opened(store, not await read_commits(store, ""))

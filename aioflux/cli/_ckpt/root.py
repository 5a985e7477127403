"""Opens the URI argument of `aioflux ckpt`: the root of a run, or one checkpoint.

Modules of `aioflux.checkpoint` are imported by the command that runs: the help and the other
commands start without them.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.errors import CheckpointNotFoundError
from aioflux.options import TransferOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aioflux.cli._uri_or_path import UriOrPath
    from aioflux.store import Store

__all__ = ["VERIFIED_BY_BLOCKS", "CheckpointRoot", "Root", "Steps", "open_checkpoints"]

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

VERIFIED_BY_BLOCKS = TransferOptions(verify_ranges="never")
"""For reads that are verified with the checksums of the commit: no other check is needed."""


@dataclass(frozen=True, slots=True)
class CheckpointRoot:
    """The root of a run, or one checkpoint."""

    store: Store
    """The store of the uri."""
    is_root: bool
    """False for one checkpoint."""

    async def prefixes(self, steps: Sequence[int] | None) -> list[str]:
        """Return the prefixes of these steps, or of all, by step.

        Raises:
            CheckpointNotFoundError: There is none.
            ValueError: It is one checkpoint, and steps are given.
        """
        from aioflux.checkpoint._format.commit import step_prefix
        from aioflux.checkpoint._store.commits import list_steps

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
        """Return the uri of a checkpoint."""
        from aioflux.checkpoint._store.commits import uri_below

        return uri_below(self.store, prefix)


@asynccontextmanager
async def open_checkpoints(argument: UriOrPath) -> AsyncIterator[CheckpointRoot]:
    """Open a root or a checkpoint; it is a checkpoint if it has a commit object."""
    from aioflux.checkpoint._store.commits import read_commits

    root = str(argument.location)
    async with argument.open_root(root, transfer=VERIFIED_BY_BLOCKS) as store:
        yield CheckpointRoot(store, not await read_commits(store, ""))

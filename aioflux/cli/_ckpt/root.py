"""The URI argument of `aioflux ckpt`, opened: the root of a run, or one checkpoint.

Each command imports the modules of `aioflux.checkpoint` when it runs, so that `--help` and the
other commands do not wait for these imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux.cli._text import format_timestamp
from aioflux.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import Commit, StepInfo
    from aioflux.cli._uri_or_path import UriOrPath
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

"""Checkpoints of several objects, in the layout that Lightning's sharded strategies have.

    C/<save id>/*.distcp, C/.metadata    weights and optimizer state, and everything else with them
    C/meta.pt                            everything else once more, for Lightning's own strategies

Lightning keeps what is neither weights nor optimizer state (loops, callbacks, schedules) in meta.pt
alone, so that a save which is killed in between leaves weights of one step with loops of another.
Here it is one more item of the save, and visible with it.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from aioflux.errors import CheckpointError
from aioflux.integrations.lightning._objects import META_KEY, put_beside

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from aioflux.options import StoreOptions

__all__ = ["REST_NAME", "Rest", "has_rest", "load_sharded", "save_sharded"]

REST_NAME: Final = "aioflux.rest"
"""Name of the item that holds everything else."""


class Rest:
    """What is neither weights nor optimizer state, as torch.save writes it."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def of(cls, checkpoint: dict[str, Any]) -> Rest:
        """Pickle it."""
        file = io.BytesIO()
        torch.save(checkpoint, file)
        return cls(file.getvalue())

    def load(self, *, weights_only: bool | None) -> dict[str, Any]:
        """Unpickle it."""
        rest: dict[str, Any] = torch.load(
            io.BytesIO(self.data), map_location="cpu", weights_only=weights_only
        )
        return rest


class _Writer(StorageWriter):
    """Stores meta.pt when the checkpoint is visible."""

    def __init__(self, uri: str, rest: Rest | None, **settings: Any) -> None:
        super().__init__(uri, **settings)
        self._rest = rest

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See base class."""
        super().finish(metadata, results)
        if self._rest is not None:
            put_beside(self.checkpoint_id, META_KEY, self._rest.data, self._options)


def save_sharded(
    uri: str,
    state: dict[str, Any],
    rest: Rest | None,
    settings: Mapping[str, Any],
    group: ProcessGroup | None = None,
) -> None:
    """Save the shards of all ranks; called by every one.

    Args:
        uri: Prefix of the checkpoint.
        state: Weights and optimizer states of this rank.
        rest: Everything else, on the coordinator; None on the other ranks.
        settings: What `StorageWriter` takes.
        group: Ranks that save, and how they talk; all of them by default.

    Raises:
        CheckpointError: A rank could not save, on every rank.
    """
    if rest is not None:
        state = {**state, REST_NAME: rest.data}
    with _told(f"{uri} could not be saved"):
        save_distributed(state, storage_writer=_Writer(uri, rest, **settings), process_group=group)


def has_rest(uri: str, options: StoreOptions) -> bool:
    """Tell whether everything else is in the checkpoint, or in meta.pt alone.

    Raises:
        CheckpointError: It cannot be read.
    """
    return REST_NAME in StorageReader(uri, **options).read_metadata().state_dict_metadata


def load_sharded(
    uri: str,
    state: dict[str, Any],
    options: StoreOptions,
    *,
    weights_only: bool | None,
    is_strict: bool,
) -> None:
    """Load into the tensors of `state`, and replace its other values; called by every rank.

    Raises:
        CheckpointError: A rank could not load, on every rank; the state may be loaded in part.
    """
    # None is the default of torch.load, which is True.
    reader = StorageReader(
        uri,
        weights_only=weights_only is not False,
        process_group=torch.distributed.group.WORLD,
        **options,
    )
    planner = DefaultLoadPlanner(allow_partial_load=not is_strict)
    with _told(f"{uri} could not be loaded"):
        load_distributed(state, storage_reader=reader, planner=planner)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Make an error of the exception of DCP, which is none that `except Exception` catches."""
    try:
        yield
    except CheckpointException as exc:
        failures = sorted(exc.failures.items())
        told = "; ".join(f"rank {rank}: {error}" for rank, (error, _) in failures)
        raise CheckpointError(f"{what}: {told}") from exc

"""Checkpoints of several objects, in the layout that Lightning's sharded strategies have.

    C/<save id>/*.distcp, C/.metadata    weights and optimizer state, and everything else with them
    C/meta.pt                            everything else once more, for Lightning's own strategies

Lightning keeps everything else (loops, callbacks, schedules) in meta.pt alone, so that a save which
is killed in between leaves weights of one step with loops of another. Here it is one more item of
the save, and committed with it.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from aioflux.errors import CheckpointError
from aioflux.integrations.lightning._objects import META_KEY, put_below

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from aioflux.options import StoreOptions

__all__ = [
    "REST_NAME",
    "Rest",
    "has_rest",
    "live_memory",
    "load_sharded",
    "save_sharded",
    "snapshot",
]

REST_NAME: Final = "aioflux.rest"
"""Name of the item that holds everything else."""


class Rest:
    """Everything but weights and optimizer state, as torch.save writes it."""

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
    """A writer that stores meta.pt after the commit."""

    def __init__(self, uri: str, rest: Rest | None, **settings: Any) -> None:
        super().__init__(uri, **settings)
        self._rest = rest

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See base class."""
        super().finish(metadata, results)
        if self._rest is not None:
            put_below(self.checkpoint_id, META_KEY, self._rest.data, self._options)


def save_sharded(
    uri: str,
    state: dict[str, Any],
    rest: Rest | None,
    settings: Mapping[str, Any],
    group: ProcessGroup | None = None,
) -> None:
    """Save the shards of all ranks; called by every one.

    `rest` is None on ranks other than the coordinator.

    Raises:
        CheckpointError: A rank could not save, on every rank.
    """
    if rest is not None:
        state = {**state, REST_NAME: rest.data}
    with _checkpoint_errors(f"{uri} could not be saved"):
        save_distributed(state, storage_writer=_Writer(uri, rest, **settings), process_group=group)


def has_rest(uri: str, options: StoreOptions) -> bool:
    """Return whether everything else is in the checkpoint, rather than in meta.pt alone.

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
    with _checkpoint_errors(f"{uri} could not be loaded"):
        load_distributed(state, storage_reader=reader, planner=planner)


@contextmanager
def _checkpoint_errors(message: str) -> Iterator[None]:
    """Raise the exception of DCP, which `except Exception` does not catch, as an error."""
    try:
        yield
    except CheckpointException as exc:
        failures = sorted(exc.failures.items())
        errors = "; ".join(f"rank {rank}: {error}" for rank, (error, _) in failures)
        raise CheckpointError(f"{message}: {errors}") from exc


def live_memory(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> frozenset[int]:
    """Return the start addresses of the memory that training writes to."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        tensors += tree_leaves(list(optimizer.state.values()))
    return frozenset(_address_of(each) for each in tensors if isinstance(each, torch.Tensor))


def snapshot(state: dict[str, Any], live: frozenset[int]) -> dict[str, Any]:
    """Return a state in host memory that shares none with the live memory of the training.

    Lightning copies the state of an accelerator to host memory by itself, which is used as it is.
    State that shares memory with the model or its optimizers is copied: all of it without an
    accelerator or offloaded from it, and the step counts of optimizers always.
    """

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            return _copy_shards(leaf, live)
        if isinstance(leaf, torch.Tensor):
            return _copy_tensor(leaf, live)
        return deepcopy(leaf)

    with torch.no_grad():
        result: dict[str, Any] = tree_map(copy, state)
    return result


def _copy_tensor(tensor: torch.Tensor, live: frozenset[int]) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor.detach().cpu()
    return tensor.detach().clone() if _address_of(tensor) in live else tensor.detach()


def _copy_shards(tensor: ShardedTensor, live: frozenset[int]) -> ShardedTensor:
    """Copy the shards of this rank: torch has no public way to do it."""
    shards = [
        Shard(_copy_tensor(each.tensor, live), each.metadata) for each in tensor.local_shards()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001
        shards,
        sharded_tensor_metadata=tensor.metadata(),
        process_group=tensor._process_group,  # noqa: SLF001
    )


def _address_of(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()

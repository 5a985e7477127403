"""Sharded checkpoints, in the layout of Lightning's sharded strategies.

    C/<save id>/*.distcp, C/.metadata    weights, optimizer states and the trainer data
    C/meta.pt                            the trainer data again, for Lightning's own strategies

The trainer data is all of a Lightning checkpoint except weights and optimizer states: loops,
callbacks, schedulers. Lightning stores it only in meta.pt: a save that is killed before meta.pt is
written leaves the weights of one step with the loops of another. This module saves the trainer data
as one more item, so that one commit object covers everything.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
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
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from aioflux.options import StoreOptions

TRAINER_DATA_NAME: Final = "aioflux.rest"
"""Name of the item that contains the trainer data."""


class TrainerData:
    """The trainer data of a checkpoint, serialized by torch.save."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def serialize(cls, checkpoint: dict[str, Any]) -> TrainerData:
        """Serialize a checkpoint from which weights and optimizer states were removed."""
        file = io.BytesIO()
        torch.save(checkpoint, file)
        return cls(file.getvalue())

    def load(self, *, weights_only: bool | None) -> dict[str, Any]:
        """Return the deserialized trainer data."""
        checkpoint: dict[str, Any] = torch.load(
            io.BytesIO(self.data), map_location="cpu", weights_only=weights_only
        )
        return checkpoint


class _Writer(StorageWriter):
    """Storage writer that stores meta.pt after the commit."""

    def __init__(self, uri: str, trainer_data: TrainerData | None, **settings: Any) -> None:
        super().__init__(uri, **settings)
        self._trainer_data = trainer_data

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See base class."""
        super().finish(metadata, results)
        if self._trainer_data is not None:
            put_below(self.checkpoint_id, META_KEY, self._trainer_data.data, self._options)


def save_sharded(
    uri: str,
    state: dict[str, Any],
    trainer_data: TrainerData | None,
    settings: Mapping[str, Any],
    group: ProcessGroup | None = None,
) -> None:
    """Save the shards of all ranks; called by every rank.

    Only the coordinator passes `trainer_data`; the other ranks pass None.

    Raises:
        CheckpointError: A rank could not save; raised on all ranks.
    """
    if trainer_data is not None:
        state = {**state, TRAINER_DATA_NAME: trainer_data.data}
    writer = _Writer(uri, trainer_data, **settings)
    with _checkpoint_errors(f"{uri} could not be saved"):
        save_distributed(state, storage_writer=writer, process_group=group)


def has_trainer_data(uri: str, options: StoreOptions) -> bool:
    """Return whether the trainer data is an item of the checkpoint, and not only in meta.pt.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    return TRAINER_DATA_NAME in StorageReader(uri, **options).read_metadata().state_dict_metadata


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
        CheckpointError: A rank could not load; raised on all ranks. Some values of `state` may have
            been loaded.
    """
    # As in torch.load, None means True.
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
    """Convert DCP's exception, which is not a subclass of Exception, to CheckpointError."""
    try:
        yield
    except CheckpointException as exc:
        failures = sorted(exc.failures.items())
        errors = "; ".join(f"rank {rank}: {error}" for rank, (error, _) in failures)
        raise CheckpointError(f"{message}: {errors}") from exc


def training_memory(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> frozenset[int]:
    """Return the start addresses of the memory of the model and its optimizers."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        tensors += tree_leaves(list(optimizer.state.values()))
    return frozenset(_address_of(leaf) for leaf in tensors if isinstance(leaf, torch.Tensor))


def snapshot(state: dict[str, Any], in_use: frozenset[int]) -> dict[str, Any]:
    """Return a state in host memory that training does not change.

    A tensor that is already in host memory is copied only if its address is in `in_use`. Lightning
    itself copies state of an accelerator to host memory, and this copy need not be copied again.
    Without an accelerator, or with offloaded parameters, the tensors of the state are those that
    training changes, and are copied. The step counts of optimizers are mostly in host memory, and
    then copied, too.
    """

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            return _copy_shards(leaf, in_use)
        if isinstance(leaf, torch.Tensor):
            return _copy_tensor(leaf, in_use)
        return deepcopy(leaf)

    with torch.no_grad():
        result: dict[str, Any] = tree_map(copy, state)
    return result


def _copy_tensor(tensor: torch.Tensor, in_use: frozenset[int]) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor.detach().cpu()
    return tensor.detach().clone() if _address_of(tensor) in in_use else tensor.detach()


def _copy_shards(tensor: ShardedTensor, in_use: frozenset[int]) -> ShardedTensor:
    """Copy the shards of this rank, by a private constructor: torch has no public one."""
    shards = [
        Shard(_copy_tensor(shard.tensor, in_use), shard.metadata) for shard in tensor.local_shards()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001
        shards,
        sharded_tensor_metadata=tensor.metadata(),
        process_group=tensor._process_group,  # noqa: SLF001
    )


def _address_of(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()

"""A state that training leaves alone: copies of what it goes on writing to, in host memory.

Lightning brings the state of an accelerator to host memory by itself: that is a copy already, and
is taken as it is. What shares memory with the model or its optimizers is copied: all of it where
there is no accelerator or it is offloaded, and the step counts of optimizers everywhere.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["live_memory", "snapshot"]


def live_memory(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> frozenset[int]:
    """Return where the memory that training writes to begins."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        tensors += tree_leaves(list(optimizer.state.values()))
    return frozenset(_begin(each) for each in tensors if isinstance(each, torch.Tensor))


def snapshot(state: dict[str, Any], live: frozenset[int]) -> dict[str, Any]:
    """Return a state that shares no memory with what is live.

    Args:
        state: Nested dictionaries, lists and tuples of tensors and plain values.
        live: What `live_memory` returned.
    """

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            return _copied_shards(leaf, live)
        if isinstance(leaf, torch.Tensor):
            return _copied(leaf, live)
        return deepcopy(leaf)

    with torch.no_grad():
        result: dict[str, Any] = tree_map(copied, state)
    return result


def _copied(tensor: torch.Tensor, live: frozenset[int]) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor.detach().cpu()
    return tensor.detach().clone() if _begin(tensor) in live else tensor.detach()


def _copied_shards(tensor: ShardedTensor, live: frozenset[int]) -> ShardedTensor:
    """Copy the shards of this rank: torch has no other way for a tensor of this kind."""
    shards = [Shard(_copied(each.tensor, live), each.metadata) for each in tensor.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001
        shards,
        sharded_tensor_metadata=tensor.metadata(),
        process_group=tensor._process_group,  # noqa: SLF001
    )


def _begin(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()

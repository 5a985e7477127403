"""The API of Nebula (`nebulaml`, `torch_nebula`) for every storage that aioflux supports.

    import aioflux.compat.nebula as nm

    nm.init("gs://bucket/run-7", persistent_time_interval=100)
    checkpoint = nm.Checkpoint("global_step500")
    checkpoint.save("model", model.state_dict())        # copies to memory; training continues

    state = nm.get_latest_checkpoint().load("model")    # from memory, local disk or bucket

    torch.save -> memory of the node daemon (tier 1) -> local disk (tier 2) -> bucket (tier 3)

Differences from Nebula: a commit that fails on one rank raises on all ranks, the whole
NEBULA_MEMORY_BUFFER_SIZE is used for checkpoints, a load verifies the part, and any text can be a
tag.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflux.compat.nebula._api import (
        flush_persistence,
        get_checkpoint,
        get_latest_checkpoint,
        get_latest_checkpoint_path,
        init,
        install_alias,
        list_checkpoints,
        shutdown,
    )
    from aioflux.compat.nebula._checkpoint import Checkpoint

    # Both are in `__all__`, but raise ModuleNotFoundError if Lightning is not installed.
    from aioflux.compat.nebula._lightning import NebulaCallback, NebulaCheckpointIO

__all__ = [
    "Checkpoint",
    "NebulaCallback",
    "NebulaCheckpointIO",
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "install_alias",
    "list_checkpoints",
    "shutdown",
]

_MODULES = {
    "Checkpoint": "_checkpoint",
    "NebulaCallback": "_lightning",
    "NebulaCheckpointIO": "_lightning",
}
"""Modules of the public names that are not in `_api`. All are imported on first use, so that the
node daemon does not import them."""

_PRIVATE_NAMES = {"_shutdown": "shutdown"}
"""Private names of Nebula that existing programs use."""


def __getattr__(name: str) -> Any:
    public_name = _PRIVATE_NAMES.get(name, name)
    if public_name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(public_name, '_api')}")
    return getattr(module, public_name)

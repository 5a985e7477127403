"""The API of Nebula (`nebulaml`, `torch_nebula`) on every storage that aioflux supports.

    import aioflux.compat.nebula as nm

    nm.init("gs://bucket/run-7", persistent_time_interval=100)
    checkpoint = nm.Checkpoint("global_step500")
    checkpoint.save("model", model.state_dict())        # one copy in memory; training continues

    state = nm.get_latest_checkpoint().load("model")    # memory, local disk or bucket

    torch.save -> memory of the node daemon (tier 1) -> local disk (tier 2) -> bucket (tier 3)

Differences from Nebula: a commit succeeds on all ranks or raises, all of NEBULA_MEMORY_BUFFER_SIZE
is for checkpoints, a part is verified when it is loaded, and any tag is allowed.
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

    # Listed without Lightning, too: importing them then raises an error that names it.
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
"""Modules of the names that are not in `_api`; the node daemon imports none of them."""

_PRIVATE = {"_shutdown": "shutdown"}
"""Private names of Nebula that programs use."""


def __getattr__(name: str) -> Any:
    known = _PRIVATE.get(name, name)
    if known not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(known, '_api')}")
    return getattr(module, known)

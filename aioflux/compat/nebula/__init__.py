"""Nebula, as `nebulaml` and `torch_nebula` had it, on every storage that aioflux speaks.

    import aioflux.compat.nebula as nm

    nm.init("gs://bucket/run-7", persistent_time_interval=100)
    checkpoint = nm.Checkpoint("global_step500")
    checkpoint.save("model", model.state_dict())        # one copy in memory; training goes on

    state = nm.get_latest_checkpoint().load("model")    # memory, local disk or bucket

    torch.save -> memory that a process of the node holds -> local disk -> bucket

It differs where Nebula lost something: a commit counts on all ranks or raises, all of
NEBULA_MEMORY_BUFFER_SIZE is for checkpoints, a part is verified when it is loaded, and any tag is
allowed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflux.compat.nebula._alias import install_alias
    from aioflux.compat.nebula._api import (
        flush_persistence,
        get_checkpoint,
        get_latest_checkpoint,
        get_latest_checkpoint_path,
        init,
        list_checkpoints,
        shutdown,
    )
    from aioflux.compat.nebula._checkpoint import Checkpoint

    # Where Lightning is not installed they are found all the same: what imports them says so.
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

_HOMES = {
    "Checkpoint": "_checkpoint",
    "NebulaCallback": "_lightning",
    "NebulaCheckpointIO": "_lightning",
    "install_alias": "_alias",
}
"""Names that are not in `_api`. The process that holds checkpoints imports none of them."""

_PRIVATE = {"_shutdown": "shutdown"}
"""What Nebula called it."""


def __getattr__(name: str) -> Any:
    known = _PRIVATE.get(name, name)
    if known not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOMES.get(known, '_api')}")
    return getattr(module, known)

"""install_alias: the names by which Nebula was imported, for programs that cannot be changed."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

__all__ = ["NAMES", "install_alias"]

NAMES: Final = ("torch_nebula", "nebulaml")
"""What Nebula was imported as: by DeepSpeed, and by its own manual."""


def install_alias(*names: str) -> None:
    """Let `import torch_nebula` and `import nebulaml` of this process mean `aioflux.compat.nebula`.

    Call it before DeepSpeed builds its engine, which then finds its `torch_nebula`. Where no line
    of the program can be changed, install the distribution `torch_nebula` of the source tree.

    Args:
        names: Which names; both by default.

    Raises:
        ImportError: Another package of that name is imported already.
    """
    module = import_module("aioflux.compat.nebula")
    for name in names or NAMES:
        there = sys.modules.setdefault(name, module)
        if there is not module:
            raise ImportError(f"{name} is imported already, from {there!r}")

"""Descriptors that a forked child lets go of, so that it does not keep a stopped server alive.

A child (a data loader's worker, say) inherits the sockets and the lock of a server that runs in
its parent. Held there, they would keep the address taken, the directory locked and connections
open after the parent has closed them.
"""

from __future__ import annotations

import os

_held: dict[int, tuple[int, int]] = {}


def hold(descriptor: int) -> None:
    """Have children that are forked from now on let go of a descriptor."""
    _held[descriptor] = _identity(descriptor)


def release(descriptor: int) -> None:
    """Forget a descriptor that is about to be closed."""
    _held.pop(descriptor, None)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _let_go() -> None:
    """Point the descriptors elsewhere: closed, their numbers could be given out again."""
    if not _held:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor, identity in _held.items():
        try:
            if _identity(descriptor) == identity:
                os.dup2(null, descriptor, inheritable=False)
        except OSError:  # closed since
            continue
    os.close(null)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)

"""Descriptors of running servers, from which forked children are detached.

A child (a data loader's worker, say) inherits the sockets and the lock of a server in its parent.
If it kept them, the address would stay taken, the directory locked and connections open after the
parent has closed them.
"""

from __future__ import annotations

import os

_tracked: dict[int, tuple[int, int]] = {}


def track(descriptor: int) -> None:
    """Detach children that are forked from now on from a descriptor."""
    _tracked[descriptor] = _identity(descriptor)


def untrack(descriptor: int) -> None:
    """Forget a descriptor that is about to be closed."""
    _tracked.pop(descriptor, None)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _detach() -> None:
    """Redirect the descriptors to /dev/null: if closed, their numbers could be reused."""
    if not _tracked:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor, identity in _tracked.items():
        try:
            if _identity(descriptor) == identity:
                os.dup2(null, descriptor, inheritable=False)
        except OSError:  # closed since
            continue
    os.close(null)
    _tracked.clear()


os.register_at_fork(after_in_child=_detach)

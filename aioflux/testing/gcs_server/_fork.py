"""File descriptors of running servers, which forked child processes release.

A forked child, for example a DataLoader worker, inherits the sockets and the lock file of a server
in its parent. If the child kept them open, the address would stay in use, the directory would stay
locked, and connections would stay open after the parent has closed them.
"""

from __future__ import annotations

import os

_tracked: dict[int, tuple[int, int]] = {}


def track(descriptor: int) -> None:
    """Release a descriptor in all children that are forked from now on."""
    _tracked[descriptor] = _identity(descriptor)


def untrack(descriptor: int) -> None:
    """Stop tracking a descriptor, before it is closed."""
    _tracked.pop(descriptor, None)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _release_in_child() -> None:
    # Redirect the descriptors to /dev/null. If they were closed, the objects that own them could
    # later close new descriptors with the same numbers.
    if not _tracked:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor, identity in _tracked.items():
        try:
            if _identity(descriptor) == identity:
                os.dup2(null, descriptor, inheritable=False)
        except OSError:  # the descriptor was closed but is still tracked
            continue
    os.close(null)
    _tracked.clear()


os.register_at_fork(after_in_child=_release_in_child)

"""A new lock for coverage's tracers in forked children.

Coverage.py 7.17 holds a lock for a moment when a thread runs a file for the first time. A child
that is forked in that moment would wait for it without an end, already in our fork hooks. Hooks run
in the order of their registration, so this module is imported before all of ours. Plugins of pytest
import fsspec even earlier; its hook drops file systems, which closes our stores.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Iterator


def _replace_lock() -> None:
    if (coverage := sys.modules.get("coverage")) is None:
        return
    collector = getattr(coverage.Coverage.current(), "_collector", None)
    if getattr(collector, "data_lock", None) is not None:
        collector.data_lock = threading.Lock()


class _Classes(WeakSet[Any]):
    """The classes over which fsspec's hook iterates."""

    def __iter__(self) -> Iterator[Any]:
        if os.getpid() != _PID:
            _replace_lock()
        return super().__iter__()


_PID = os.getpid()
os.register_at_fork(after_in_child=_replace_lock)
if (_fsspec := sys.modules.get("fsspec.spec")) is not None:
    _fsspec._registered_classes = _Classes(_fsspec._registered_classes)

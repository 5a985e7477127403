"""A new lock for coverage's tracers in forked children.

Coverage.py 7.17 holds a lock for a moment when a thread runs a file for the first time. A child
that is forked in that moment would wait for it without an end, already in our fork hooks. Hooks run
in the order of their registration, so this module is imported before all of ours.
"""

from __future__ import annotations

import os
import sys
import threading


def _replace_lock() -> None:
    if (coverage := sys.modules.get("coverage")) is None:
        return
    collector = getattr(coverage.Coverage.current(), "_collector", None)
    if getattr(collector, "data_lock", None) is not None:
        collector.data_lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock)
